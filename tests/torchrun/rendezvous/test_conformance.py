"""Every behaviour of torch's public rendezvous API, on torch's package and on ours over each engine.

The two may differ only where DIFFERENCES says so, and docs/torch-names.md shows that list. `pytest` with `--rewrite` makes the
page's table again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

from support import conformance
from support.timing import TooSlow

PAGE = Path(__file__).parents[3] / "docs" / "torch-names.md"
BEGIN, END = "<!-- differences -->", "<!-- end of differences -->"
LIMIT_S = 150.0
ENGINES = ("embedded", "c10d", "file", "etcd")
MEMBERS = ("embedded", "etcd")
"""Engines whose handlers are not `DynamicRendezvousHandler`."""


class Difference(NamedTuple):
    """What is observed with torch and here, and why that is so."""

    torch: Any
    here: Any
    why: str
    is_defect: bool = False
    """Torch's observation is a defect of torch 2.13."""
    engines: tuple[str, ...] = ENGINES


LEAVES = "`shutdown()` leaves the run and does not end it for the others; `set_closed()` ends it"
TEXTLESS = "every error says what happened, with which values, and what to do"
NO_RUN_YET = "a run exists from its first member on, so there is nothing to close for others"
WAITS = "an outage is waited for until `join_timeout`, and the error says so"
UNSOUND = "a state that no handler of rdzv has written is a `RendezvousStateError`, and is never executed"
OUT_OF_RANGE = "a value that cannot be meant is refused at once"

TRAMPOLINE = "torch's C++ code does not pass these calls on to a store written in Python; call them on `info.store` itself"

DIFFERENCES: dict[tuple[str, str], Difference] = {
    ("the_store_of_a_round", "PrefixStore over it: list_keys"): Difference(True, "NotImplementedError", TRAMPOLINE),
    ("the_store_of_a_round", "PrefixStore over it: queues"): Difference(
        [None, None, 2, "1", "2", 0], "NotImplementedError", TRAMPOLINE
    ),
    ("the_store_of_a_round", "PrefixStore over it: queue_pop of an empty queue"): Difference(
        "QueueEmptyError", "NotImplementedError", TRAMPOLINE
    ),
    ("the_store_of_a_round", "PrefixStore over it: queue_pop that waits"): Difference(
        "DistStoreError", "NotImplementedError", TRAMPOLINE
    ),
    ("late_nodes", "the places of the late ones"): Difference(
        ["DistStoreError", "DistStoreError"], [[1, 3], [2, 3]],
        "torch's first node does not tell newcomers its bootstrap address; here it is part of each round", True,
    ),
    ("a_newcomer_that_sorts_first", "places of the old and the new node"): Difference(
        [[1, 2], [0, 2]], [[0, 2], [1, 2]], "ranks are kept from round to round; addresses order the first round only"
    ),
    ("a_newcomer_that_sorts_first", "bootstrap addresses"): Difference(
        2, 1, "torch's old nodes keep the address of the first round", True
    ),
    ("a_closed_run", "it has a message"): Difference(False, True, TEXTLESS, True),
    ("too_few_nodes", "it has a message"): Difference(False, True, TEXTLESS, True),
    ("closed_before_the_first_round", "is_closed() of another handler"): Difference(True, False, NO_RUN_YET),
    ("closed_before_the_first_round", "set_closed()"): Difference(
        None, "RendezvousError", "a handler that is not a `DynamicRendezvousHandler` must have joined to close", engines=MEMBERS
    ),
    ("closed_before_the_first_round", "is_closed() there"): Difference(True, False, NO_RUN_YET, engines=MEMBERS),
    ("closed_before_the_first_round", "next_rendezvous() there"): Difference(
        "RendezvousClosedError", [0, 1], NO_RUN_YET, engines=MEMBERS
    ),
    ("a_node_that_leaves", "num_nodes_waiting() of the other"): Difference(
        0, 1, "a node that goes is reported like one that comes: the agent must form the next round"
    ),
    ("a_node_that_leaves", "is_closed() of the other"): Difference(True, False, LEAVES),
    ("a_node_that_leaves", "next_rendezvous() of the other"): Difference(
        "RendezvousClosedError", "RendezvousTimeoutError", f"{LEAVES}. Here too few nodes are left, and no other comes"
    ),
    ("a_node_that_is_killed", "num_nodes_waiting() of the other"): Difference(
        0, 1, "torch drops a lost node silently; here the others are told, within the lease", True
    ),
    ("a_backend_that_is_away", "num_nodes_waiting()"): Difference(
        "RendezvousConnectionError", 0, "a local read that never raises: in torch, a short outage ends healthy workers", True
    ),
    ("a_backend_that_is_away", "set_closed() at once"): Difference(
        True, False, "the same error, but after trying for `RendezvousTimeout.close`"
    ),
    ("a_backend_that_is_away", "next_rendezvous()"): Difference("RendezvousConnectionError", "RendezvousTimeoutError", WAITS),
    ("a_backend_that_is_away", "shutdown() of a handler that never joined"): Difference(
        False, True, "it has nothing to leave. After a round it is False, as with torch"
    ),
    ("a_backend_that_keeps_nothing", "next_rendezvous()"): Difference(
        [0, 1], "RendezvousStateError", "torch forms a round that nobody else can see", True
    ),
    ("a_foreign_state", "next_rendezvous() with nothing"): Difference("EOFError", "RendezvousStateError", UNSOUND, True),
    ("a_foreign_state", "next_rendezvous() with a foreign pickle"): Difference(
        "AttributeError", "RendezvousStateError", UNSOUND, True
    ),
    ("a_foreign_state", "the pickle was executed"): Difference(True, False, UNSOUND, True),
    ("endpoints", "parse_rendezvous_endpoint('::1')"): Difference(
        [":", 1], ["::1", 7], "an IPv6 address without brackets is one address", True
    ),
    ("wrong_parameters", "create_handler({'keep_alive_interval': '-1'})"): Difference(
        "a handler", "SettingsError", f"{OUT_OF_RANGE}. The error is a `ValueError`", True
    ),
    ("a_static_run", "create_rdzv_handler('h:1', {'rank': 'x'})"): Difference(
        "StaticTCPRendezvous", "ValueError", OUT_OF_RANGE, True
    ),
    ("a_static_run", "create_rdzv_handler('h:1', {'rank': 2})"): Difference(
        "StaticTCPRendezvous", "ValueError", f"{OUT_OF_RANGE}: of two nodes the last has rank 1", True
    ),
}  # fmt: skip


def observe(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Run all kits at once, and return what was observed, by kit and behaviour."""
    with conformance.Servers(folder) as servers:
        running = {kit.name: conformance.start(kit, folder) for kit in servers.kits}
        found = {}
        try:
            for name, process in running.items():
                out, errors = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 0, f"{name}: {errors[-4000:]}"
                found[name] = json.loads(out)
        finally:
            for process in running.values():
                process.kill()
                process.communicate(timeout=LIMIT_S)
    return found


@pytest.mark.timeout(LIMIT_S + 60)
def test_ours_does_what_torchs_does_except_for_the_listed_differences(tmp_path):
    """One test for all engines: a test run in several processes would run the kits in each."""
    observed = observe(tmp_path)
    reference = observed["torch"]
    found: dict[str, dict[tuple[str, str], Any]] = {engine: {} for engine in ENGINES}
    listed = {
        engine: {
            key: (one.torch, one.here)
            for key, one in DIFFERENCES.items()
            if engine in one.engines and key[0] in observed[engine]
        }
        for engine in ENGINES
    }
    for engine in ENGINES:
        for behaviour, seen in observed[engine].items():
            assert seen.keys() == reference[behaviour].keys()
            for what, here in seen.items():
                if here != reference[behaviour][what]:
                    found[engine][behaviour, what] = (reference[behaviour][what], here)
    wrong = [
        f"{engine}: {key}: torch and here {found[engine].get(key, 'agree')}, listed: {listed[engine].get(key, 'nothing')}"
        for engine in ENGINES
        for key in found[engine].keys() | listed[engine].keys()
        if found[engine].get(key) != listed[engine].get(key)
    ]
    if wrong:
        # Some behaviours depend on clocks: on a busy machine a handler may lose a node, also torch's. A true difference stays.
        raise TooSlow("\n".join(wrong))

    handlers, functions = ({one.__name__ for one in some} for some in (conformance.HANDLERS, conformance.FUNCTIONS))
    assert all(handlers <= seen.keys() for seen in observed.values()), "every behaviour was run"
    assert all(functions <= observed[name].keys() for name in conformance.FUNCTION_KITS)
    assert {behaviour for behaviour, _ in DIFFERENCES} <= handlers | functions


def differences_table() -> str:
    lines = ["| | torch 2.13 | here | why |", "|---|---|---|---|"]
    for (behaviour, what), one in DIFFERENCES.items():
        defect = " (a defect)" if one.is_defect else ""
        where = "" if one.engines == ENGINES else f" ({', '.join(one.engines)})"
        label = f"{behaviour.replace('_', ' ')}: {what}"
        lines.append(f"| {label}{where} | {_shown(one.torch)}{defect} | {_shown(one.here)} | {one.why} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text}`"


def test_the_page_lists_exactly_these_differences(request):
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n\n{differences_table()}\n\n{END}{after}"
    if request.config.getoption("--rewrite"):
        PAGE.write_text(made)
    else:
        assert made == text
