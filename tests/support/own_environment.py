"""A virtual environment of a test's own, with packages that are too large or too restrictive for all tests.

With `torch=True` it also sees the packages of the environment that runs the tests. A package that depends on torch then
finds the torch that is there, and pip must not bring another one.
"""

from __future__ import annotations

import site
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_S = 600.0


class OwnEnvironment:
    """Installs packages, or skips the test with the reason why it cannot."""

    def __init__(self, folder: Path, *packages: str, torch: bool = False, options: tuple[str, ...] = ()) -> None:
        self.folder = folder / "environment"
        self.python = self.folder / "bin" / "python"
        self._run(sys.executable, "-m", "venv", str(self.folder))
        if torch:
            shared = next(path for path in site.getsitepackages() if (Path(path) / "torch").exists())
            # `addsitedir` reads the .pth files there too: rdzv may be installed by one.
            (self._site() / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        if packages:
            self._install(packages, options)

    def _install(self, packages: tuple[str, ...], options: tuple[str, ...]) -> None:
        pip = [str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *options]
        try:
            done = self._run(*pip, *packages, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"NOT TESTED with {', '.join(packages)}: not installed within {INSTALL_S:g} s")
        if done.returncode:
            pytest.skip(f"NOT TESTED with {', '.join(packages)}: {done.stderr.strip().splitlines()[-1:]}")
        assert not list(self._site().glob("torch-*")), "another torch was installed"

    def _site(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def _run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=check)
