"""docs/settings.md is made from the code, and the commands in the documents are such as exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rdzv.cli.main import make_app
from rdzv.config.settings import DEFAULTS, TABLE, _plain

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "settings.md"
HEAD = "| setting | default | allowed | meaning | if raised, or set |\n|---|---|---|---|---|\n"
COMMANDS = typer.main.get_command(make_app()).commands
DOCUMENTS = sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"])


def row(name):
    setting = TABLE[name]
    default = "must be given" if name not in DEFAULTS else _plain(DEFAULTS[name])
    shown = {"": "", "None": "", "{}": "", "must be given": default}.get(default, f"`{default}`")
    cells = [f"`{name}`", shown, setting.allowed, setting.meaning, setting.raised]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def test_the_page_has_every_setting_as_the_code_has_it(request):
    text = PAGE.read_text()
    wanted = HEAD + "".join(map(row, TABLE))
    found = re.search(re.escape(HEAD) + r"(?:\|.*\n)*", text)
    assert found
    if request.config.getoption("--rewrite"):
        PAGE.write_text(text.replace(found[0], wanted))
    else:
        assert found[0] == wanted


@pytest.mark.parametrize("document", DOCUMENTS, ids=[one.name for one in DOCUMENTS])
def test_every_command_that_is_shown_exists_with_its_options(document):
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    for line in lines:
        command = re.search(r"(?:^|(?<=srun --kill-on-bad-exit=0 ))rdzv (.+)", line)
        if command is None:
            continue
        name, *words = shlex.split(command[1].partition(" -- ")[0], comments=True)
        assert name in COMMANDS, line
        flags = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= flags, line
        for pair in (second for first, second in itertools.pairwise(words) if first in ("-c", "--conf")):
            assert pair.partition("=")[0] in TABLE, line


def test_the_program_of_the_how_to_runs_as_it_stands(tmp_path):
    programs = re.findall(r"^```python\n(.*?)^```$", (DOCS / "howto.md").read_text(), re.MULTILINE | re.DOTALL)
    (program,) = [one for one in programs if "memory://" in one]  # The other one is part of a worker.
    file = tmp_path / "own.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "round 1: rank 0 of 1\n", "")
