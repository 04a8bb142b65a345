"""Build wheel and sdist, twice, and check them; write the bill of materials beside them: `python tools/dist.py FOLDER`.

Two builds of one commit must be equal to the byte: the time in the archives is that of the commit (SOURCE_DATE_EPOCH). The
bill lists, in the format CycloneDX 1.5, the versions of all packages that the extras bring into this environment.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "cli", "etcd", "quorum", "web")


def epoch() -> str:
    """Return the time of the last commit; without a history, that of the changelog."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    asked = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    return asked.stdout.strip() or str(int((ROOT / "CHANGELOG.md").stat().st_mtime))


def build(folder: Path) -> dict[str, str]:
    """Build into a folder, without fetching anything, and return the hash of each file."""
    # hatchling's answers are the same in every environment, so none is made for it.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": epoch()}, check=True, stdout=subprocess.DEVNULL)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def check(folder: Path) -> None:
    """Ask twine and check-wheel-contents."""
    files = [str(file) for file in sorted(folder.glob("rdzv-*")) if file.suffix in (".whl", ".gz")]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    wheels = [file for file in files if file.endswith(".whl")]
    subprocess.run([sys.executable, "-m", "check_wheel_contents", *wheels], check=True)


def needed(requirements: list[str], extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield those of a package's requirements that hold here with one of the extras."""
    for text in requirements:
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (extras or ("",))):
            yield one


def closure(start: list[str], extras: tuple[str, ...]) -> dict[str, Distribution]:
    """Return the packages that requirements name with these extras, and what that needs, as far as it is installed."""
    found: dict[str, Distribution] = {}
    waiting = list(needed(start, extras))
    while waiting:
        one = waiting.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in found or name == "rdzv":
            continue
        try:
            found[name] = distribution(one.name)
        except PackageNotFoundError:
            print(f"warning: {one.name} is not installed here, so the bill leaves it out", file=sys.stderr)
            continue
        waiting += needed(found[name].requires or [], ("", *one.extras))
    return found


def bill(wheel: Path) -> str:
    """Return the bill of materials of a wheel."""
    version = wheel.name.split("-")[1]
    parts = sorted(closure(requirements_of(wheel), EXTRAS).items())
    component = {"type": "library", "name": "rdzv", "version": version, "purl": f"pkg:pypi/rdzv@{version}"}
    component["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]  # type: ignore[assignment]
    listed = [
        {"type": "library", "name": name, "version": one.version, "purl": f"pkg:pypi/{name}@{one.version}",
         "licenses": [{"license": {"name": _licence(one)}}]}
        for name, one in parts
    ]  # fmt: skip
    about = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": component}}
    return json.dumps({**about, "components": listed}, indent=2) + "\n"


def _licence(one: Distribution) -> str:
    told = one.metadata.json
    text = str(told.get("license_expression") or told.get("license") or "not declared")
    return text.strip().splitlines()[0][:80]


def metadata_of(wheel: Path) -> Message:
    """Return what a wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, with those of its extras."""
    return metadata_of(wheel).get_all("Requires-Dist") or []


def check_addresses(metadata: Message) -> None:
    """Refuse a release whose addresses lead nowhere. A development version may have them, with a warning."""
    addresses = [line.partition(", ")[2] for line in metadata.get_all("Project-URL") or []]
    unreal = [one for one in addresses if (urlsplit(one).hostname or "").endswith(".example")]
    problem = f"[project.urls] has no real addresses yet: {', '.join(unreal)}"
    if unreal and not Version(metadata["Version"]).is_prerelease:
        raise SystemExit(f"version {metadata['Version']} is a release, and {problem}")
    if unreal:
        print(f"warning: {problem}", file=sys.stderr)


def main() -> None:
    """Build, compare, check and list."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as other:
        first, again = build(folder), build(Path(other))
    if any(first.get(name) != value for name, value in again.items()):
        raise SystemExit(f"two builds differ: {first} and {again}")
    check(folder)
    wheel = max(folder.glob("rdzv-*.whl"), key=lambda file: file.stat().st_mtime)
    check_addresses(metadata_of(wheel))
    (folder / f"{wheel.name.split('-py3')[0]}.cdx.json").write_text(bill(wheel))
    for name, value in again.items():
        print(f"{value}  {name}")


if __name__ == "__main__":
    main()
