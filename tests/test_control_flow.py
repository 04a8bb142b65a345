"""Control flows one way: real joins, traced by file, show that no lower layer calls a higher one.

A request goes down through the files that docs/architecture.md names, each once, and its answer comes back as a return value.
The few calls that go up are listed here.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import groupby, pairwise
from pathlib import Path

import pytest

import rdzv
from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.engines.embedded.hosting import HostingDriver
from rdzv.engines.embedded.server import Server
from rdzv.member.member import Member
from rdzv.system.node import LocalNode

ROOT = f"{Path(rdzv.__file__).parent}/"
RUNNER = "member/member.py"
EMBEDDED = "engines/embedded/"
UPWARD = {
    ("member/presence.py", RUNNER),  # An event.
    ("engines/reference.py", f"{EMBEDDED}session.py"),  # News for a watch.
    ("engines/reference.py", f"{EMBEDDED}run.py"),  # The size of what was written.
    (f"{EMBEDDED}client_protocol.py", f"{EMBEDDED}client.py"),  # News for a watch, or the end of the connection.
}
"""Calls by which control turns round: from here on it is on its way up."""


class Trace:
    """Calls from one file of rdzv into another."""

    def __init__(self):
        self.calls = set()
        """Caller, callee, and the name of the function."""
        self.paths = set()
        """The files from the event loop down to each call, without repetitions in a row."""

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _argument):
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        name, files = frame.f_code.co_name, []
        while frame is not None:
            if frame.f_code.co_filename.startswith(ROOT):
                files.append(frame.f_code.co_filename.removeprefix(ROOT))
            frame = frame.f_back
        if len(files) > 1 and files[0] != files[1]:
            self.calls.add((files[1], files[0], name))
            self.paths.add(tuple(file for file, _ in groupby(reversed(files))))


async def joins_and_breaks(options):
    """Two members join, one is gone, and a third takes its place. Return the trace of it all."""
    server = Server(("127.0.0.1", 0))
    await server.start()
    endpoint = Endpoint.parse(f"127.0.0.1:{server.port}")
    settings = Settings.make(endpoint, run_id="job", min_nodes=2, max_nodes=2, **options)
    drivers = [HostingDriver(endpoint, run_id="job", is_host=False) for _ in range(3)]
    first, second, third = (Member(driver, settings, LocalNode(f"n{at}")) for at, driver in enumerate(drivers))
    with Trace() as trace:
        await asyncio.gather(first.join(timeout_s=30), second.join(timeout_s=30))
        await second.leave()
        assert await first.wait_changed(30) is not None
        await asyncio.gather(first.join(timeout_s=30), third.join(timeout_s=30))
        await asyncio.gather(first.leave(), third.leave())
    await server.stop()
    return trace


@pytest.mark.parametrize("options", [{}, {"check": "true"}], ids=["plain", "with a check"])
def test_control_flows_one_way(options):
    trace = asyncio.run(joins_and_breaks(options))
    expected = "core/member.py", "core/rules.py", "member/leader.py", "member/registration.py", "engines/reference.py"
    assert {callee for _, callee, _ in trace.calls}.issuperset(expected)
    assert {call for call in trace.calls if call[1] == RUNNER} == {("member/presence.py", RUNNER, "_on")}
    assert not [call for call in trace.calls if call[0].startswith("core/") and not call[1].startswith("core/")]
    assert not [call for call in trace.calls if call[0].startswith("engines/") and call[1].startswith(("core/", "member/"))]


def test_a_join_passes_each_file_at_most_once_in_each_direction():
    """The leader is left out: it is a part of its member's presence, and writes by it."""
    paths = [path for path in asyncio.run(joins_and_breaks({})).paths if "member/leader.py" not in path]
    assert any({"member/presence.py", "member/registration.py", "engines/embedded/connection.py"} <= {*path} for path in paths)
    assert any({"engines/embedded/session.py", "engines/embedded/run.py", "engines/reference.py"} <= {*path} for path in paths)
    for path in paths:
        turn = next((at for at, call in enumerate(pairwise(path), 1) if call in UPWARD), 0)
        for way in (path[:turn], path[turn:]):
            assert len(way) == len(set(way)), path
