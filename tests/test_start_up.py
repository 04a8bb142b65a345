"""Modules that are imported when a program starts: names are counted, because times depend on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

THE_OTHERS = "typer rich pydantic grpc torch numpy starlette uvicorn cryptography rdzv.web rdzv.operate rdzv.testing rdzv.torch"
UNUSED = "difflib shutil tempfile lzma bz2 unittest email http.client xml importlib.metadata"
COMMANDS = "rdzv.cli.viewer rdzv.cli.watch rdzv.cli.tables rdzv.cli.journal rdzv.cli.operator rdzv.cli.demo"
RUN = "import runpy; sys.argv = ['rdzv', {words}]; runpy.run_module('rdzv', run_name='__main__')"


def imported(program: str) -> set[str]:
    """Return the modules that a program has imported when it ends. It may end with exit code 0."""
    show = "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules)); "
    done = subprocess.run([sys.executable, "-c", show + program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())


def found(modules: set[str], names: str) -> list[str]:
    """Return the modules that have one of these names, or are part of a package with such a name."""
    return sorted(one for one in modules for name in names.split() if one == name or one.startswith(name + "."))


@pytest.mark.parametrize(
    ("program", "unwanted", "own_max"),
    [
        ("import rdzv", f"{THE_OTHERS} {UNUSED} asyncio msgspec rdzv.core rdzv.config rdzv.member rdzv.engines rdzv.cli", 4),
        ("import rdzv.worker", f"{THE_OTHERS} {UNUSED} asyncio rdzv.config rdzv.member rdzv.engines rdzv.cli", 8),
        ("import rdzv.blocking", f"{THE_OTHERS} {UNUSED} rdzv.cli rdzv.engines.embedded rdzv.engines.etcd", 90),
        (RUN.format(words="'run', '--nnodes', '1', '--', 'true'"), f"{THE_OTHERS} {COMMANDS} rdzv.cli.main", 135),
        (RUN.format(words="'--version'"), f"{THE_OTHERS} {UNUSED} asyncio rdzv.member rdzv.engines", 9),
    ],
    ids=["import rdzv", "import rdzv.worker", "import rdzv.blocking", "rdzv run", "rdzv --version"],
)
def test_a_start_imports_only_what_it_needs(program: str, unwanted: str, own_max: int):
    modules = imported(program)
    assert found(modules, unwanted) == []
    own = found(modules, "rdzv")
    assert len(own) <= own_max, own


def test_a_command_line_that_needs_an_explanation_gets_it_from_typer():
    words = "'run', '--help'"
    assert found(imported(RUN.format(words=words)), "typer.main")
