"""Commands within this process: their messages and exit codes."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from rdzv import __version__, errors
from rdzv.cli.exit_codes import ExitCode, exit_code_of
from rdzv.cli.main import make_app
from rdzv.cli.start import command_of
from rdzv.cli.words import word_of
from rdzv.config.auto_endpoint import HOST_ENV, RUN_ID_ENV

_numbers = itertools.count()


def invoke(*words, env=None):
    return CliRunner().invoke(make_app(), [str(word) for word in words], env=env)


def alone():
    """Return the options of a run of one member, with an id of its own."""
    run_id = f"inside-{next(_numbers)}"
    return ["memory://", "--run-id", run_id, "--nnodes", "1", "--conf", "last_call=0.1"]


def test_the_version_is_shown():
    assert invoke("--version").stdout == f"{__version__}\n"


@pytest.mark.parametrize("command", sorted(typer.main.get_command(make_app()).commands))
def test_every_command_has_help(command):
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert "Usage" in shown.stdout


@pytest.mark.parametrize("command", sorted(typer.main.get_command(make_app()).commands))
def test_the_help_shows_the_whole_description_of_each_option(command):
    shown = " ".join(invoke(command, "--help", env={"COLUMNS": "400"}).stdout.split())
    found = [word_of(one) for one in inspect.signature(command_of(command)).parameters.values()]
    assert [word.details["help"] for _, word in filter(None, found) if word.details["help"] not in shown] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingsError("x"), ExitCode.USAGE),
        (errors.JoinTimeout("r", 1.0, "x"), ExitCode.TIMEOUT),
        (errors.Closed("r", "x"), ExitCode.CLOSED),
        (errors.Closed("r", "x", success=True), ExitCode.OK),
        (errors.Unreachable("e", "x"), ExitCode.UNREACHABLE),
        (errors.EngineMoved("r", "a", "b"), ExitCode.UNREACHABLE),
        (errors.Drained("r", "m", "x"), ExitCode.REFUSED),
        (errors.Banned("r", "h", "x"), ExitCode.REFUSED),
        (errors.Untrusted("e", "x"), ExitCode.REFUSED),
        (errors.NotFound("r", "x"), ExitCode.ABSENT),
        (errors.RoundOver(1, "x"), ExitCode.FAILED),
    ],
)
def test_every_error_has_its_code(error, code):
    assert exit_code_of(error) is code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["join", "memory://", "--run-id", "t", "--nnodes", "3:2"], "min_nodes is 3 and max_nodes is 2"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "2:"], "--nnodes is '2:'"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "--conf", "x"], "--conf is 'x'"),
        (["run", "memory://", "--run-id", "t", "--nnodes", "1"], "rdzv run needs a program"),
        (["run", "memory://", "--run-id", "t", "--nnodes", "1", "--", "no-such-program"], "'no-such-program' cannot be run"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "last_cal=1"], "did you mean 'last_call'?"),
        (["join", "nonsense://x", "--run-id", "t", "--nnodes", "1"], "unknown scheme 'nonsense'"),
        (["serve", "--bind", "127.0.0.1:99999"], "--bind is wrong: '127.0.0.1:99999' is not HOST:PORT"),
        (["journal", "no/such/file"], "'no/such/file' is neither a journal file"),
        (["journal", "none.jsonl"], "'none.jsonl' is neither a journal file"),
        (["journal", "~no-user/a.rdzv.jsonl"], "'~no-user/a.rdzv.jsonl' is neither a journal file"),
        (["journal", f"{'a' * 300}/x"], "/x' is neither a journal file"),
        (["journal", "a" * 300], "' is not a host name"),
        (["journal", "~no-user"], "'~no-user' is not a host name"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "journal_dir=~no-user/j"],
         "journal_dir is '~no-user/j': it must be the path of a folder"),
        (["serve", "--bind", "nowhere"], "'nowhere' is not HOST:PORT; it must be HOST:PORT, such as"),
        (["serve", "--token-file", "/no/such"], "token_file '/no/such' cannot be read: no such file or directory"),
        (["serve", "--tls-key", "/no/such"], "tls_key is set and tls_cert is not"),
        (["serve", "--tls-ca", "/no/such"], "tls is on without tls_cert and tls_key"),
        (["serve", "--conf", "token=4711"], "a secret is not given as an argument"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "token=4711"], "a secret is not given as an argument"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "run-id=u"], "'run_id', which is given with --run-id"),
        (["run", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "min_nodes=1", "--", "true"], "given with --nnodes"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "info=x"], "'info', which is given by programs only"),
        (["join", "memory://", "--run-id", "t", "--nnodes", "1", "-c", "observer=x"], "unknown setting 'observer'"),
        (["status", "memory://", "--run-id", "t", "-c", "endpoint=x"], "'endpoint', which is given as the argument ENDPOINT"),
        (["status", "memory://", "--run-id", "t", "-c", "environ=x"], "unknown setting 'environ'"),
        (["serve", "--conf", "max_nodes=2"], "--conf has 'max_nodes'"),
        (["serve", "--conf", "is_host=false"], "is_host is false, and `rdzv serve` always serves"),
    ],
)
def test_a_mistake_is_said_in_one_sentence(words, sentence):
    done = invoke(*words)
    assert done.exit_code == ExitCode.USAGE
    assert sentence in done.stderr
    assert done.stderr.startswith("rdzv: ")
    assert done.stderr.count("\n") == 1
    assert "4711" not in done.stderr


@pytest.mark.parametrize("command", ["journal", "runs"])
def test_a_file_name_that_is_too_long_is_said_in_one_sentence(command):
    place = f"file:///tmp/{'a' * 300}"
    done = invoke(command, place)
    assert done.exit_code == ExitCode.UNREACHABLE
    assert done.stderr.startswith(f"rdzv: engine {place} is unreachable: file name too long")


def test_a_name_to_listen_at_that_no_host_can_have_is_said_in_one_sentence():
    done = invoke("serve", "--bind", "a..b:1")
    assert done.exit_code == ExitCode.UNREACHABLE
    assert done.stderr.startswith("rdzv: engine a..b:1 is unreachable: cannot listen there: ")
    assert done.stderr.count("\n") == 1


def test_adopt_without_force_changes_nothing_and_says_what_it_would_do():
    done = invoke("adopt", "memory://", "--run-id", "t")
    assert done.exit_code == ExitCode.USAGE
    assert re.fullmatch(
        r"rdzv: members of run 't' would follow to the engine at memory\S+; make sure that the one they knew is gone, then "
        r"give --force: if it still serves others, the run is split \[RDZV-E01\]\n", done.stderr,
    )  # fmt: skip
    done = invoke("adopt", "memory://", "--run-id", "t", "--force")
    assert (done.exit_code, done.stderr) == (ExitCode.OK, "")
    assert re.fullmatch(r"members of run 't' may follow to memory\S+ for 3600 s from now\n", done.stdout)


def test_a_join_timeout_says_what_was_missing():
    done = invoke("join", "memory://", "--run-id", "vain", "--nnodes", "2", "--conf", "join_timeout=0.2", "--json")
    assert done.exit_code == ExitCode.TIMEOUT
    assert "waiting for 1 more" in done.stderr
    assert json.loads(done.stdout.splitlines()[0])["kind"] == "joining"


def test_a_program_that_succeeds_ends_the_run():
    options = alone()
    program = "import os; assert os.environ['RDZV_ROUND'] == '1'"
    assert invoke("run", *options, "--", sys.executable, "-c", program).exit_code == 0
    again = invoke("join", *options)
    assert (again.exit_code, again.stderr) == (ExitCode.OK, "")


def test_a_program_that_fails_is_tried_again_as_often_as_was_said(tmp_path):
    program = f"open({str(tmp_path / 'tries')!r}, 'a').write('x'); raise SystemExit(7)"
    done = invoke("run", *alone(), "--max-restarts", "2", "--", sys.executable, "-c", program)
    assert done.exit_code == 7
    assert "the program failed: rank 0: exit code 7 (local rank 0, pid " in done.stderr
    assert re.findall(r"restart (\d) of 2", done.stderr) == ["1", "2"]
    assert not re.search(r"leaves the run.*exit code", done.stderr), "it is told once"
    assert (tmp_path / "tries").read_text() == "xxx"


@pytest.mark.parametrize("command", ["join", "run"])
def test_a_failure_is_told_once(command):
    """As the error of the command, and not in the line about leaving as well."""
    program = ["--", sys.executable, "-c", ""] if command == "run" else []
    done = invoke(command, "memory://", "--run-id", f"once-{command}", "--nnodes", "2", "-c", "join_timeout=0.1", *program)
    assert done.exit_code == ExitCode.TIMEOUT
    said = done.stdout + done.stderr
    assert said.count("gave no world in") == 1
    assert re.search(r"leaves the run after [\d.]+ s$", said, re.MULTILINE)


def test_auto_is_resolved_by_every_command(monkeypatch):
    """The variables name an endpoint where nothing listens, and the id of the job."""
    for name in (*HOST_ENV, *RUN_ID_ENV):
        monkeypatch.delenv(name, raising=False)
    refused = invoke("status", "auto")
    assert refused.exit_code == ExitCode.USAGE
    assert "looked for PET_MASTER_ADDR" in refused.stderr
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    join = ["join", "auto", "--nnodes", "2", "-c", "is_host=false", "-c", "join_timeout=0.2"]
    for words in (["status", "auto"], ["journal", "auto"], join):
        away = invoke(*words)
        assert away.exit_code in (ExitCode.UNREACHABLE, ExitCode.TIMEOUT), away.stderr
        assert "127.0.0.1:1" in away.stderr
    assert invoke("close", "n1").exit_code == ExitCode.USAGE, "an id is needed"
