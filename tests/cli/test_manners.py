"""The manners of the command line: variables, misspelt options, help, completion, and output on a terminal."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rdzv.cli.completion import complete_conf, complete_run_id
from rdzv.cli.main import make_app
from rdzv.cli.tables import draw_table, duration, member_rows
from rdzv.cli.viewer import _draw_finding
from rdzv.config.endpoint import _SCHEMES
from rdzv.core.status import describe
from rdzv.engines.port import Put
from rdzv.operate.doctor import PROBLEM, Finding
from support.embedded_server import ServerThread
from support.views import sealed

GROUP = typer.main.get_command(make_app())


def invoke(*words, **environ):
    return CliRunner().invoke(make_app(), [str(word) for word in words], env={"COLUMNS": "100", **environ})


def test_the_endpoint_of_every_command_may_be_in_the_environment():
    takes = [name for name, command in GROUP.commands.items() if any(one.name == "endpoint" for one in command.params)]
    assert {"run", "runs", "join", "status", "drain"} <= set(takes)
    for name in takes:
        (endpoint,) = [one for one in GROUP.commands[name].params if one.name == "endpoint"]
        assert endpoint.envvar == "RDZV_ENDPOINT", name
    words = ["run", "--run-id", "env", "--nnodes", "1", "-c", "last_call=0", "--", sys.executable, "-c", "raise SystemExit(9)"]
    assert invoke(*words, RDZV_ENDPOINT="memory://").exit_code == 9
    words[-1] = "import sys; raise SystemExit(sys.argv[1:] != ['--', '--run-id'])"
    assert invoke(*words, "--", "--run-id", RDZV_ENDPOINT="memory://").exit_code == 0, "all behind -- is the program's"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["memory://", "--run-id", "t", "--nnode", "1", "--", "true"], "No such option: --nnode"),
        (["memory://", "--run-id", "t", "--nnodes", "1", "true", "x"], "unexpected 'true x': the program and its arguments"),
        (["memory://", "--run-id", "t", "--nnodes", "1", "--"], "rdzv run needs a program"),
        (["memory://", "--run-id", "t", "--nnodes", "two", "--", "true"], "--nnodes is 'two': it must be a number or min:max"),
        (["memory://", "--run-id", "t", "--nnodes", "0", "--", "true"], "--nnodes is '0': it must be a number or min:max of 1"),
        (["127.0.0.1", "--nnodes", "2", "--", "true"], "--run-id is not given: name the run"),
        (["--run-id", "t", "--nnodes", "2", "--", "true"],
         "no endpoint is given, and no variable names the first node (looked for PET_MASTER_ADDR, MASTER_ADDR, "),
        (["memory://", "--run-id", "t", "--nnodes", "1", "--nproc-per-node", "many", "--", "true"],
         "--nproc-per-node is 'many': it must be a number from 1 to 1024, or auto, gpu or cpu"),
        (["memory://", "--run-id", "t", "--nnodes", "1", "--tee", "--", "true"], "--tee is given without --log-dir"),
        (["memory://", "--run-id", "t", "--nnodes", "1", "--max-restarts", "-1", "--", "true"], "for '--max-restarts'"),
    ],
)
def test_a_mistake_before_the_program_is_an_error_and_not_the_program(words, sentence):
    done = invoke("run", *words)
    assert done.exit_code == 2
    assert sentence in re.sub(r"[\s│]+", " ", done.stderr)


def test_a_node_without_a_folder_for_temporary_files_is_told_what_to_do(monkeypatch):
    def refuse(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("rdzv.cli.launcher.TemporaryDirectory", refuse)
    done = invoke("run", "memory://", "--run-id", "t", "--nnodes", "1", "--", "true")
    assert done.exit_code == 2
    assert "no temporary folder can be made: No usable temporary directory found in ['/tmp']; set TMPDIR" in done.stderr


def test_help_groups_the_commands_and_names_every_kind_of_endpoint():
    shown = invoke("--help").stdout
    places = [shown.index(f" {name} ─") for name in ("Take part", "Look", "Operate", "Serve")]
    assert places == sorted(places)
    assert "─ Commands ─" not in shown, "every command has its group"
    text = re.sub(r"[\s│]+", " ", shown)
    for scheme in _SCHEMES:
        assert f"{scheme}://" in text
        assert f"{scheme}://" in re.sub(r"[\s│]+", " ", invoke("status", "--help").stdout)
    assert "auto (the first node of the job" in text
    assert "[OPTIONS] [ENDPOINT] -- PROGRAM [ARGUMENTS]..." in invoke("run", "--help").stdout
    assert "drain [OPTIONS] MEMBER|HOST [ENDPOINT]" in invoke("drain", "--help").stdout


def test_the_run_id_of_the_dashboard_is_that_of_the_run_to_show():
    # It had the words of the doctor's, which speak of a run to join.
    assert "shows that run only" in re.sub(r"[\s│]+", " ", invoke("dashboard", "--help").stdout)


@pytest.mark.parametrize("command", [None, *sorted(GROUP.commands)])
def test_flags_show_no_type_and_paragraphs_are_wrapped_once(command):
    shown = invoke(*([command] if command else []), "--help").stdout
    assert "<bool>" not in shown
    paragraphs = re.split(r"\n *\n", shown.partition("╭")[0])[1:]
    for lines in [paragraph.strip().splitlines() for paragraph in paragraphs]:
        for line, after in itertools.pairwise(lines):
            assert len(line) + len(after.split()[0]) > 95, f"{line!r} ends too early"


def test_settings_are_completed_by_name_and_by_value():
    assert [name for name, _ in complete_conf("last")] == ["last_call="]
    assert all(meaning for _, meaning in complete_conf(""))
    assert not {"token=", "run_id=", "endpoint="} & {name for name, _ in complete_conf("")}
    assert "on_failure=close" in complete_conf("on_failure=")
    assert complete_conf("on-failure=cl") == ["on_failure=close"]
    assert (complete_conf("lease="), complete_conf("nothing=")) == ([], [])


def test_run_ids_are_completed_from_the_engine_and_nothing_is_said_if_that_fails(monkeypatch, capfd):
    with ServerThread() as thread:
        thread.call(fill(thread.server))
        where = f"127.0.0.1:{thread.server.port}"
        context = SimpleNamespace(params={"endpoint": where})
        assert complete_run_id(context, "") == ["job-1", "job-2", "other"]
        assert complete_run_id(context, "job") == ["job-1", "job-2"]
        environ = {
            **os.environ, "_RDZV_COMPLETE": "complete_bash", "RDZV_ENDPOINT": where,
            "COMP_WORDS": "rdzv status --run-id jo", "COMP_CWORD": "3",
        }  # fmt: skip
        program = "from rdzv.cli.main import make_app; make_app()(prog_name='rdzv')"
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["job-1", "job-2"], done
    assert complete_run_id(context, "") == []
    assert complete_run_id(SimpleNamespace(params={"endpoint": "nonsense://"}), "") == []
    monkeypatch.delenv("RDZV_ENDPOINT", raising=False)
    assert complete_run_id(SimpleNamespace(params={}), "") == []
    assert capfd.readouterr() == ("", "")


async def fill(server):
    for name in ("job-1", "job-2", "other"):
        server.open_run(name).engine.txn([], [Put("k", b"")], [])


def drawn(renderable, width=60):
    console = Console(width=width, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_finding_is_wrapped_to_the_terminal_in_a_column_of_its_own():
    console = Console(width=60, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        _draw_finding(console, Finding(PROBLEM, "port", "x" * 30 + " [y] " + "z" * 30, "do this and " * 8), " [RDZV-P04]")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert "\x1b[1;31mproblem" in captured.get()
    assert plain[0].startswith("problem  port        xxx")
    assert all(len(line) <= 60 and line.startswith(" " * 21) for line in plain[1:])
    assert "[RDZV-P04]" in " ".join(plain)


def test_members_of_one_name_have_their_ids_in_the_table_and_those_with_problems_come_first():
    status = describe("job", sealed("a b c:lost", records={"b": {"name": "a", "info": {"x": "[red]\x1b[31m"}}}))
    titles, rows = member_rows(status)
    assert titles == ["member", "host", "rank", "state", "info"]
    assert [row[0] for row in rows] == ["c", "a (A) (leads)", "a (B)"]
    shown = drawn(draw_table(titles, rows))
    assert "[red]" in shown, "markup of others is text"
    assert "\x1b[31mlost" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")]
)
def test_a_time_is_shown_in_one_unit(seconds, text):
    assert duration(seconds) == text
