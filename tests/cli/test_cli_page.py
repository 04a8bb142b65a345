"""docs/cli.md agrees with the commands: options, defaults, lines, variables and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import typer

import rdzv
from rdzv.cli.exit_codes import ExitCode
from rdzv.cli.launcher import Printer
from rdzv.cli.main import make_app
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.core.model import Era, Phase, WorkerRanks
from rdzv.launch.environment import NodeInRound, of_worker
from rdzv.member.notices import ABOUT_OTHERS, Notice
from rdzv.system.bootstrap import Bootstrap

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
GROUP = typer.main.get_command(make_app())
COMMANDS = sorted(GROUP.commands)


def section(title):
    """Return the text from a heading to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^\1 |^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[2]


def rows(text, heading):
    """Return the rows of the table whose first column has that heading, as lists of cells."""
    found = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in found[1].splitlines()] if found else []


def words(cell):
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_command_is_listed_and_has_a_section():
    assert sorted(re.findall(r"^## rdzv (\w+)$", PAGE, re.MULTILINE)) == COMMANDS
    assert sorted(re.search(r"rdzv (\w+)", row[0])[1] for row in rows(PAGE, "command")) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_every_option_explained_exists(name):
    shared = {word for row in rows(section("Options that several commands share"), "option") for word in words(row[0])}
    own = {word: row[1] for row in rows(section(f"rdzv {name}"), "option") for word in words(row[0])}
    has = {}
    for parameter in GROUP.commands[name].params:
        for flag in parameter.opts if parameter.param_type_name == "option" else [parameter.name.upper()]:
            has[flag] = parameter.default
    has = {flag: default for flag, default in has.items() if flag not in ("WHOM", "HOST")}
    assert set(own) <= set(has)
    assert set(has) - set(own) <= shared
    for flag, shown in own.items():
        default = has[flag]
        expected = "off" if default is False else f"{default:g}" if isinstance(default, float | int) else f"`{default}`"
        assert shown == ("none" if default in ("", None) else expected), flag


@pytest.mark.parametrize("name", COMMANDS)
def test_the_environment_variables_are_those_of_the_page_in_every_command(name):
    variables = {
        word: row[1].strip("`") for row in rows(section("Options that several commands share"), "option")
        for word in words(row[0]) if row[1].startswith("`")
    }  # fmt: skip
    assert variables == {"ENDPOINT": "RDZV_ENDPOINT", "--run-id": "RDZV_RUN_ID"}
    for parameter in GROUP.commands[name].params:
        flag = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        assert parameter.envvar == variables.get(flag), flag


def test_the_options_of_the_command_itself_are_named():
    named = words(section("Options that several commands share"))
    for parameter in GROUP.params:
        for flag in parameter.opts:
            assert any(flag in word.split() for word in named), flag


def test_the_exit_codes_are_those_of_the_code():
    shown = [(int(code), words(name)) for code, name, _ in rows(section("Exit codes"), "code")]
    assert shown == [(code.value, {code.name}) for code in ExitCode]


class FakeWorld:
    """The attributes that a line shows."""

    run_id = incarnation = digest = "x"
    era, round, fence, rank, size, bootstrap = Era(1, "e"), 1, 7, 0, 2, Bootstrap("h", 1)


def test_the_lines_have_the_fields_that_are_shown(capsys):
    printer = Printer(as_json=True)
    printer.world(FakeWorld())
    printer.changed(1, Change(ChangeKind.ROUND, "x"))
    printer.notice(Notice("sealed", "run", 1, "m", "x"))
    printed = {}
    for line in capsys.readouterr().out.splitlines():
        said = msgspec.json.decode(line)
        printed[said["event"]] = set(said) - {"event"}
    shown = {row[0].strip("`"): words(row[2]) for row in rows(section("rdzv join"), "event")}
    assert shown == printed


def test_the_kinds_of_lines_are_all_explained():
    changes, notices = re.split(r"^A `notice` has", section("Lines"), flags=re.MULTILINE)
    assert {word for row in rows(changes, "kind") for word in words(row[0])} == {kind.value for kind in ChangeKind}
    files = ("core/member.py", "member/member.py", "member/notices.py")
    sources = "".join((Path(rdzv.__file__).parent / name).read_text() for name in files)
    given = set(re.findall(r'(?:Tell|_notice|Notice|tell)\(\s*"([a-z ]+)"', sources))
    given |= {phase.value for phase in Phase if phase is not Phase.OPEN} | set(ABOUT_OTHERS.values())
    assert {word for row in rows(notices, "kind") for word in words(row[0])} == given


def test_the_variables_of_a_worker_are_all_explained():
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    shown = {word for row in rows(page, "variable") for word in words(row[0])}
    defaults = {row[0].strip("`"): row[1].strip("`") for row in rows(page, "default")}
    node = NodeInRound("r", 1, 1, "", "h", 1, 0, 1, 2, WorkerRanks(0, 2, 0, 2), "default", 0, 0)
    given = of_worker({}, node, 0)
    assert shown | set(defaults) == set(given)
    mine = of_worker(dict.fromkeys(given, "mine"), node, 0)
    assert {name for name, value in mine.items() if value == "mine"} == set(defaults)
    assert defaults | {"JAX_LOCAL_DEVICE_IDS": "0"} == {name: given[name] for name in defaults}
