"""One account from the files of several agents, and `rdzv journal FILE...`."""

from __future__ import annotations

import json

import msgspec
import pytest

from rdzv.core.model import CauseKind
from rdzv.errors import SettingsError
from rdzv.member.journal_file import JournalFile, JournalHeader, JournalLine
from rdzv.member.notices import Notice, Timeline
from rdzv.operate.account import accounts, find_files, read_files
from support.cli_commands import rdzv


class Node:
    """An agent that is told things at times of its own clock, and its journal."""

    def __init__(self, folder, name, run_id="job", incarnation="life"):
        self.now, self.name, self.run_id, self.incarnation = 0.0, name, run_id, incarnation
        self.timeline = Timeline()
        self.file = JournalFile(folder, run_id, name, lambda: self.now, lambda: "2026-01-01T00:00:00Z")

    def tell(self, at, kind, number=0, reason="", **fields):
        self.now = at
        incarnation = "" if kind == "joining" and not number else self.incarnation
        notice = Notice(kind, self.run_id, number, self.name, reason, incarnation, **fields)
        self.file(self.timeline.timed(notice, at))


@pytest.fixture
def files(tmp_path):
    """Three nodes; c is killed, d joins, the run is closed by a bug of b. Their clocks have nothing in common."""
    a, b, c, d = (Node(tmp_path, name) for name in "abcd")
    for node, begin in ((a, 100.0), (b, 5000.0), (c, 30.0)):
        node.tell(begin, "joining", reason="at engine e")
        node.tell(begin + 1, "given", 1, rank="abc".index(node.name), size=3)
    for node, begin, cost in ((a, 111.0, 2.0), (b, 5011.0, 1.5)):
        node.tell(begin, "broken", 1, "c lost", cause="lost", members=("c",))
        node.tell(begin + 0.5, "joining", 1)
        node.tell(begin + cost, "given", 2, rank="ab".index(node.name), size=2)
    b.tell(5013.0, "engine away", 2, "gone")
    b.tell(5016.0, "engine back", 2, "it answers again")
    d.tell(7.0, "joining", reason="at engine e")
    for node, begin in ((a, 133.0), (b, 5033.0)):
        node.tell(begin, "broken", 2, "d came to join", cause="growth", members=("d",))
        node.tell(begin + 1, "given", 3, rank="ab".index(node.name), size=3)
    d.tell(9.0, "given", 3, rank=2, size=3)
    b.tell(5054.0, "leaving", 3, "rank 1 failed", cause="gave_up")
    a.tell(154.0, "broken", 3, "b gave up", cause="gave_up", members=("b",))
    a.tell(154.5, "closed", 3, "b gave up: rank 1 failed", cause="gave_up", members=("b",))
    a.tell(155.0, "leaving", 3, "it was given no round")
    for node in (a, b, c, d):
        node.file.close()
    with c.file.path.open("ab") as file:
        file.write(b'{"at":3.1,"stamp":"20')  # Killed in the middle of a line.
    return tmp_path


def test_every_restart_has_its_cause_and_its_cost(files):
    (account,) = accounts(read_files(find_files([str(files)])))
    assert (account.run_id, account.incarnation, account.members) == ("job", "life", ("a", "b", "c", "d"))
    assert [(one.number, one.size, one.members, str(one.ran)) for one in account.rounds] == [
        (1, 3, ("a", "b", "c"), "10.0 s"), (2, 2, ("a", "b"), "20.5 s"), (3, 3, ("a", "b", "d"), "20.0 s"),
    ]  # fmt: skip
    assert [(one.round, one.kind, one.members, str(one.cost), one.next_round) for one in account.restarts] == [
        (1, CauseKind.LOST, ("c",), "2.0 s", 2),
        (2, CauseKind.GROWTH, ("d",), "1.0 s", 3),
        (3, CauseKind.GAVE_UP, ("b",), "0.5 s", 0),
    ]
    first, second, _ = account.restarts
    assert (first.came, first.gone, second.came, second.gone) == ((), ("c",), ("d",), ())
    assert [(one.member, one.round, one.text) for one in account.incidents] == [("b", 2, "the engine was away for 3.0 s")]
    assert account.availability == pytest.approx(50.5 / 54.0)
    assert account.end == "b gave up: rank 1 failed"


def test_a_root_cause_that_one_node_heard_of_later_is_the_cause(tmp_path):
    for name, more in (("a", ()), ("b", ("c lost",))):
        node = Node(tmp_path, name)
        node.tell(0.0, "joining")
        node.tell(1.0, "given", 1, rank=0, size=2)
        node.tell(2.0, "broken", 1, "workers stopped", cause="restarted", members=("a",))
        for reason in more:
            node.tell(2.5, "broken", 1, reason, cause="lost", members=("c",))
        node.file.close()
    (account,) = accounts(read_files(find_files([str(tmp_path)])))
    (restart,) = account.restarts
    assert (restart.kind, restart.members, restart.reason, restart.cost.exact) == (CauseKind.LOST, ("c",), "c lost", False)


def test_the_files_of_some_nodes_tell_as_much_as_they_know(files):
    (path,) = files.glob("job_c_*")
    (account,) = accounts(read_files([path]))
    assert [(one.number, one.size, one.members) for one in account.rounds] == [(1, 3, ("c",))]
    assert str(account.rounds[0].ran) == "at least 0.0 s"
    assert (account.restarts, account.end, account.availability) == ((), "", None)


def test_runs_and_their_lives_are_told_apart_and_an_older_half_comes_first(tmp_path):
    one = Node(tmp_path, "a")
    one.tell(0.0, "joining")
    one.tell(1.0, "given", 1, rank=0, size=1)
    one.tell(2.0, "closed", 1, "enough", cause="closed")
    one.incarnation = "next"
    one.tell(3.0, "given", 1, rank=0, size=1)
    one.tell(8.0, "leaving", 1)
    one.file.close()
    other = Node(tmp_path, "a", run_id="other")
    other.tell(0.0, "joining")
    other.tell(1.0, "given", 1, rank=0, size=1)
    other.file.close()
    path = other.file.path
    path.rename(path.with_name(f"{path.name}.old"))
    header = JournalHeader(1, "other", "a", 1, "now", continued=True)
    last = JournalLine(4.0, "now", Notice("leaving", "other", 1, "a", "over", "life"))
    path.write_bytes(b"\n".join(map(msgspec.json.encode, (header, last))))
    found = accounts(read_files(find_files([str(tmp_path)])))
    assert [(one.run_id, one.incarnation, str(one.ran)) for one in found] == [
        ("job", "life", "1.0 s"), ("job", "next", "5.0 s"), ("other", "life", "3.0 s"),
    ]  # fmt: skip


def test_what_is_no_journal_is_refused_or_left_out(tmp_path):
    with pytest.raises(SettingsError, match="is neither a journal file"):
        find_files([str(tmp_path / "none.rdzv.jsonl")])
    with pytest.raises(SettingsError, match="is neither a journal file"):
        find_files([str(tmp_path)])
    path = tmp_path / "x.rdzv.jsonl"
    path.write_bytes(b'rubbish\n\xff\xfe\n{"at":1,"stamp":"","notice":{"kind":"given"}}\n{"rdzv_journal":99,"run_id":"j",'
                     b'"member":"m","pid":1,"stamp":""}\n{"x":' + b"[" * 100_000 + b"\n")  # fmt: skip
    assert read_files([path]) == []


def test_a_journal_that_is_gone_by_now_is_passed_by_and_one_that_cannot_be_read_is_named(files, tmp_path):
    found = find_files([str(files)])
    assert read_files([tmp_path / "gone.rdzv.jsonl", *found]) == read_files(found)
    with pytest.raises(SettingsError) as refused:
        read_files([tmp_path])
    assert refused.value.sentence == f"journal {str(tmp_path)!r} cannot be read: is a directory"


def test_the_command_shows_the_account(files):
    done = rdzv("journal", *map(str, sorted(files.iterdir())))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "run 'job', incarnation life, as told by 4 nodes: a, b, c, d",
        "round 1: 3 nodes, formed in 1.0 s, ran 10.0 s",
        "restart after round 1: lost (by c), cost 2.0 s, then round 2 with 2: c lost",
        "round 2: 2 nodes, ran 20.5 s",
        "  round 2, b: the engine was away for 3.0 s",
        "restart after round 2: growth (by d), cost 1.0 s, then round 3 with 3: d came to join",
        "round 3: 3 nodes, ran 20.0 s",
        "restart after round 3: gave_up (by b), cost 0.5 s, then no round yet: b gave up",
        "closed: b gave up: rank 1 failed",
        "restarts caused by: b (1), c (1), d (1)",
        "3 restarts, 3.5 s in total; availability 93.5 % of 54.0 s",
    ]
    told = [json.loads(line) for line in rdzv("journal", str(files), "--json", "--run-id", "job").stdout.splitlines()]
    assert [one["event"] for one in told] == ["round"] * 3 + ["restart"] * 3 + ["incident", "total"]
    assert told[3]["cost_s"] == 2.0
    assert told[-1]["availability"] == pytest.approx(50.5 / 54.0)
    absent = rdzv("journal", str(files), "--run-id", "other")
    assert (absent.returncode, "none of the files has a journal of it" in absent.stderr) == (7, True)


# ---- how the run ended


def told(folder, name, *rest, size=2):
    """Let a node be in round 1 and then hear these things."""
    node = Node(folder, name)
    node.tell(0.0, "joining")
    node.tell(1.0, "given", 1, rank="abc".index(name), size=size)
    for at, (kind, reason, fields) in enumerate(rest, start=2):
        node.tell(float(at), kind, 1, reason, **fields)
    node.file.close()


DONE = ("done", "its work succeeded", {})
INTERRUPTED = ("leaving", "SIGTERM received", {"cause": "left"})
CLOSED = ("closed", "all 2 members of round 1 are done", {"cause": "success"})
FAILED = ("closed", "b gave up: exit code 3", {"cause": "gave_up", "members": ("b",)})


@pytest.mark.parametrize(
    ("a", "b", "succeeded", "end", "code", "said"),
    [
        ([DONE], [DONE], True, "all 2 members of round 1 are done", 0, ""),
        ([DONE], [DONE, CLOSED], True, "all 2 members of round 1 are done", 0, ""),
        ([DONE], [INTERRUPTED], False, "", 7, "rdzv: the run did not end: it was interrupted, or still runs\n"),
        ([DONE], [], False, "", 7, "rdzv: the run did not end: it was interrupted, or still runs\n"),
        ([DONE, FAILED], [INTERRUPTED], False, FAILED[1], 4, f"rdzv: the run failed: {FAILED[1]}\n"),
    ],
)
def test_the_outcome_is_success_only_if_all_of_the_last_round_were_done(tmp_path, a, b, succeeded, end, code, said):
    told(tmp_path, "a", *a)
    told(tmp_path, "b", *b)
    (account,) = accounts(read_files(find_files([str(tmp_path)])))
    assert (account.succeeded, account.end) == (succeeded, end)
    done = rdzv("journal", "--outcome", str(tmp_path))
    assert (done.returncode, done.stderr) == (code, said)
    assert rdzv("journal", str(tmp_path)).returncode == 0


def test_of_several_lives_of_a_run_one_that_succeeded_is_enough(tmp_path):
    for incarnation, rest in (("first", INTERRUPTED), ("second", DONE)):
        node = Node(tmp_path, "a", incarnation=incarnation)
        node.tell(0.0, "joining")
        node.tell(1.0, "given", 1, rank=0, size=1)
        node.tell(2.0, rest[0], 1, rest[1], **rest[2])
        node.file.close()
    assert [(one.incarnation, one.end) for one in accounts(read_files(find_files([str(tmp_path)])))] == [
        ("first", ""), ("second", "the only member of round 1 is done")
    ]  # fmt: skip
    assert rdzv("journal", "--outcome", str(tmp_path)).returncode == 0


def test_a_run_that_never_had_a_round_did_not_succeed(tmp_path):
    node = Node(tmp_path, "a")
    node.tell(0.0, "joining")
    node.tell(9.0, "leaving", reason="JoinTimeout")
    node.file.close()
    assert rdzv("journal", "--outcome", str(tmp_path)).returncode == 7
