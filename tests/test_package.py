"""The package: wheel and sdist are built once, checked, and used from an environment that has nothing but what they declare."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from support.once import made_once
from support.ports import free_port
from test_docs import blocks

pytest.importorskip("build", reason="build is not installed: the extra `dist` brings it")
ROOT = Path(__file__).parents[1]
LIMIT_S = 120


def tool():
    spec = importlib.util.spec_from_file_location("dist", ROOT / "tools" / "dist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command, cwd, **environ):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words, given = [str(word) for word in command], {**clean, **environ}
    return subprocess.run(words, cwd=cwd, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder that `make dist` would make. The script itself builds twice and compares."""


    def make(folder):
        done = run(sys.executable, ROOT / "tools" / "dist.py", folder, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    return made_once(tmp_path_factory, "dist", make)


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("rdzv-*.whl")
    return found


def make_environment(folder, wheel, extras, *more):
    """Install the wheel into a new environment, and link what its metadata asks for with these extras, and nothing else."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    install = ("--python", folder / "bin" / "python", "install", "--no-index", "--no-deps", wheel)
    done = run(sys.executable, "-m", "pip", *install, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    dist_tool = tool()
    needed = dist_tool.closure([*dist_tool.requirements_of(wheel), *more], extras)
    for one in needed.values():
        tops = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target = Path(one.locate_file(top))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
    return folder / "bin"


@pytest.fixture(scope="module")
def shell(tmp_path_factory, wheel):
    return make_environment(tmp_path_factory.mktemp("env") / "cli", wheel, ("", "cli"))


def test_two_builds_are_equal_and_pass_the_checks(dist):
    assert sorted(file.name.partition("-0")[0] for file in dist.iterdir()) == ["rdzv", "rdzv", "rdzv"]


def test_the_wheel_has_the_package_and_its_types_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"rdzv/py.typed", "rdzv/web/static/page.html"} <= set(names)
    assert {re.sub(r"-.+", "", name.partition("/")[0]) for name in names} == {"rdzv"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_sdist_can_be_tested_and_documented(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {"Makefile", "mkdocs.yml", "tests/conftest.py", "tools/dist.py", "docs/quickstart.md", "CHANGELOG.md"} <= inside


def test_the_bill_lists_all_that_the_extras_bring(dist):
    (file,) = dist.glob("*.cdx.json")
    bill = json.loads(file.read_text())
    names = {one["name"]: one["version"] for one in bill["components"]}
    assert {"msgspec", "typer", "rich", "grpcio", "starlette", "uvicorn", "prometheus-client", "cryptography"} <= set(names)
    assert not {"torch", "pytest", "mkdocs"} & set(names)
    assert all(names.values())


def test_a_release_needs_real_addresses(wheel, capsys):
    dist_tool, metadata = tool(), tool().metadata_of(wheel)
    assert len(metadata.get_all("Project-URL")) == 5
    metadata.replace_header("Version", "0.2.0.dev0")
    metadata.replace_header("Project-URL", "Homepage, https://rdzv.example/docs")
    dist_tool.check_addresses(metadata)
    assert "warning: [project.urls] has no real addresses yet: https://rdzv.example" in capsys.readouterr().err
    metadata.replace_header("Version", "0.2.0")
    with pytest.raises(SystemExit, match=r"version 0\.2\.0 is a release, and .* has no real addresses"):
        dist_tool.check_addresses(metadata)
    del metadata["Project-URL"]
    metadata["Project-URL"] = "Homepage, https://rdzv.org/an.example"
    dist_tool.check_addresses(metadata)
    assert capsys.readouterr().err == ""


def test_the_extra_all_is_the_sum_of_the_others():
    project = (ROOT / "pyproject.toml").read_text()
    found = re.findall(r"^(\w+) = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    extras = {name: set(re.findall(r'"([^"]+)"', body)) for name, body in found}
    assert extras["all"] == extras["cli"] | extras["etcd"] | extras["quorum"] | extras["web"]


def test_without_extras_only_msgspec_is_needed_and_the_command_says_what_is_missing(tmp_path, wheel):
    bare = make_environment(tmp_path / "bare", wheel, ("",))
    program, = blocks(ROOT / "README.md", "python")
    (tmp_path / "example.py").write_text(program)
    done = run(bare / "python", "-I", "example.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(re.findall(r"rank \d of 2", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]
    done = run(bare / "rdzv", "demo", cwd=tmp_path)
    assert done.returncode != 0
    assert "pip install 'rdzv[cli]'" in done.stderr


def test_the_demo_runs_from_the_wheel_alone(shell, tmp_path):
    where = run(shell / "python", "-I", "-c", "import rdzv; print(rdzv.__file__)", cwd=tmp_path).stdout
    assert str(ROOT / "src") not in where
    done = run(shell / "rdzv", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all 4 agree on round 3" in done.stdout


def test_torchrun_finds_the_wheel_and_two_nodes_meet(tmp_path, wheel):
    pytest.importorskip("torch.distributed", reason="torch is not installed: the extra `torch` brings it")
    programs = make_environment(tmp_path / "torch", wheel, ("", "torch"), "numpy")
    program = 'import os\nprint("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)\n'
    (tmp_path / "train.py").write_text(program)
    line = [
        programs / "python", "-m", "torch.distributed.run", "--rdzv-backend=rdzv", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=job", "--nnodes=2", "--max-restarts=0", "train.py",
    ]  # fmt: skip
    words = [str(word) for word in line]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)}
    environ.pop("PYTHONPATH", None)
    with subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        try:
            done = run(*words, cwd=tmp_path, OMP_NUM_THREADS="1", XDG_STATE_HOME=str(tmp_path))
            said, err = other.communicate(timeout=LIMIT_S)
        finally:
            other.kill()
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + err
    assert sorted(re.findall(r"rank \d of 2", done.stdout + said)) == ["rank 0 of 2", "rank 1 of 2"]
