"""Errors: one sentence each, fields for programs, and whole after a trip between processes."""

from __future__ import annotations

import concurrent.futures
import inspect
import multiprocessing
import pickle
import re

import pytest

from rdzv import errors
from rdzv.errors import (
    Banned,
    Closed,
    Drained,
    EngineMoved,
    Evicted,
    ForkedChild,
    Incompatible,
    JoinTimeout,
    LeftAlready,
    LimitExceeded,
    NotFound,
    NotJoined,
    NotStarted,
    RdzvError,
    RoundOver,
    SettingsError,
    StoreTimeout,
    Unreachable,
    Untrusted,
    WrongArgument,
)

CASES = [
    (RdzvError("something"), "something"),
    (SettingsError("min_nodes is 0"), "min_nodes is 0"),
    (Unreachable("host:1", "connection refused"), "engine host:1 is unreachable: connection refused"),
    (
        Unreachable("host:1", "connection refused", 12.3456, applied=False),
        "engine host:1 is unreachable after 12.3 s: connection refused",
    ),
    (
        Unreachable("host:1", "connection refused", remedy="start it"),
        "engine host:1 is unreachable: connection refused; start it",
    ),
    (Untrusted("host:1", "its certificate has expired"),
     "engine host:1 and this side do not trust each other: its certificate has expired"),
    (
        EngineMoved("job", "a:1", "b:1"),
        ("run 'job' was kept by the engine at a:1, but b:1 answers now; the old one may still be serving others: bring it "
        "back, or, if it is surely gone, run `rdzv adopt --force` against the new one"),
    ),
    (
        JoinTimeout("job", 600.0, "1 of 2..4 nodes: waiting for 1 more", ["a3"], "min_nodes=2"),
        "run 'job' gave no world in 600 s: 1 of 2..4 nodes: waiting for 1 more (here: a3) [min_nodes=2]",
    ),
    (
        JoinTimeout("job", 3.0, "why", ["a"], "min_nodes=2", "start the others"),
        "run 'job' gave no world in 3 s: why (here: a) [min_nodes=2]; start the others",
    ),
    (JoinTimeout("job", 0.25, "why"), "run 'job' gave no world in 0.25 s: why (nobody is here)"),
    (
        JoinTimeout("job", 1.0, "why", [f"n{i}" for i in range(18)]),
        ("run 'job' gave no world in 1 s: why (here: n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15 "
        "and 2 more)"),
    ),
    (
        StoreTimeout(["a", "b"], 60.0, 3),
        "store of round 3: 'a', 'b' not set within 60 s; the member that should set it is slow, or waits for something else",
    ),
    (
        StoreTimeout(["a", "b", "c", "d", "e", "f", "g"], 60.0, 3),
        ("store of round 3: 'a', 'b', 'c', 'd', 'e' and 2 more not set within 60 s; the member that should set it is slow, "
        "or waits for something else"),
    ),
    (Closed("job", "all members are done", success=True), "run 'job' is closed: all members are done"),
    (
        Closed("job", "node7 gave up", closed_for_s=60.0),
        ("run 'job' is closed: node7 gave up; the id can be used again 60 s after the close, or at once with a higher "
        "incarnation"),
    ),
    (
        Evicted("job", "m1", "its lease ended"),
        "member m1 was evicted from run 'job': its lease ended; stop its workers, then join again",
    ),
    (
        Drained("job", "m1", "maintenance"),
        "member m1 is drained from run 'job': maintenance; leave, do not join again",
    ),
    (
        Banned("job", "node7", "bad memory"),
        "host 'node7' is banned from run 'job': bad memory; `rdzv unban` lets it in again",
    ),
    (RoundOver(3, "node7 was lost"), "round 3 is over: node7 was lost; call join() for the next one"),
    (LeftAlready("job", "join()"), "join(): this member has left run 'job'; make a new Rendezvous to come back"),
    (NotFound("job", "it has no member 'a'"), "run 'job': it has no member 'a'"),
    (NotJoined("job", "done"), "done: this member has not joined run 'job'; call join() first"),
    (
        ForkedChild("job", "join"),
        (
            "join: this member of run 'job' belongs to the process that this one was forked from; "
            "make a new Rendezvous here to take part"
        ),
    ),
    (NotStarted("etcd", "no program was found"), "etcd was not started: no program was found"),
    (WrongArgument("join", "timeout_s is '5'"), "join: timeout_s is '5'"),
    (LimitExceeded("record 'ask'", 2000, 1024), "record 'ask' has 2000 bytes, at most 1024 are allowed"),
    (Incompatible("record 'ask'", "it is too new"), "record 'ask' cannot be read: it is too new"),
]
each = pytest.mark.parametrize(
    ("error", "sentence"), CASES, ids=[f"{type(error).__name__}-{i}" for i, (error, _) in enumerate(CASES)]
)



def test_a_message_quotes_others_without_their_escapes_and_not_at_any_length():
    error = Unreachable("host:1", "they said: \x1b[2J\r\nrdzv: all is well\x00\x9b")
    assert str(error) == "engine host:1 is unreachable: they said:  [2J  rdzv: all is well   [RDZV-E02]"
    assert error.problem.isprintable()
    assert len(str(SettingsError("x" * 1_000_000))) < 5_000


PUBLIC = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}


def test_every_error_is_tried_here():
    assert {type(error).__name__ for error, _ in CASES} == set(PUBLIC)


@each
def test_the_sentence_is_exactly_this(error, sentence):
    assert error.sentence == sentence
    assert str(error) == f"{sentence} [{error.code}]"
    assert str(error).isprintable()
    assert not sentence.endswith(".")


def same(one: BaseException, other: BaseException) -> bool:
    return type(one) is type(other) and str(one) == str(other) and vars(one) == vars(other)


@each
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(error, sentence, protocol):
    assert same(pickle.loads(pickle.dumps(error, protocol)), error)


def _raise(case: int) -> None:
    raise CASES[case][0]


def test_an_error_raised_in_another_process_arrives_whole():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        results = [pool.submit(_raise, case) for case in range(len(CASES))]
        arrived = [result.exception(timeout=60) for result in results]
    assert [type(error) for error in arrived] == [type(error) for error, _ in CASES]
    assert [error.sentence for error in arrived] == [sentence for _, sentence in CASES]


def test_the_tree_in_the_docstring_lists_every_error_with_its_bases():
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"\s+[├└]── (\w+)(?: \((\w+)\))?\s{2,}\S", line)
        if match:
            drawn[match[1]] = match[2]
    real = {}
    for name, kind in PUBLIC.items():
        if kind is not RdzvError:
            others = [base.__name__ for base in kind.__bases__ if base is not RdzvError]
            assert len(others) <= 1, name
            real[name] = others[0] if others else None
    assert drawn == real


def test_every_error_descends_from_one_base_and_says_what_it_means():
    for name, kind in PUBLIC.items():
        assert issubclass(kind, RdzvError), name
        assert inspect.getdoc(kind), name


def test_a_list_of_members_or_keys_is_kept_as_it_was():
    present, keys = ["a"], ["k"]
    join, store = JoinTimeout("job", 1.0, "why", present), StoreTimeout(keys, 1.0, 1)
    present.append("b")
    keys.append("l")
    assert (join.present, store.keys) == (("a",), ("k",))


def test_fields_may_come_by_position_or_by_name_and_no_others():
    assert Unreachable("host:1", "x").applied is None, "unknown unless said"
    assert Unreachable("host:1", problem="x", applied=False).applied is False
    for args, named in (((), {}), (("a",), {}), (("a", "b"), {"nonsense": 1}), ((1, 2, 3, 4, 5, 6, 7), {})):
        with pytest.raises(TypeError, match="Unreachable takes endpoint, problem, waited_s, applied, remedy, other_run"):
            Unreachable(*args, **named)


def test_a_wait_of_no_time_is_shown_as_none():
    assert "gave no world in 0 s: " in str(errors.JoinTimeout("job", 6.27e-06, "x"))
    assert "gave no world in 0.25 s: " in str(errors.JoinTimeout("job", 0.25, "x"))
