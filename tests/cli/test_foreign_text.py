"""What others wrote reaches no terminal, journal or log as it is, and a record that is garbage stops no command."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Ban, DrainRequest, JournalEntry, MemberRecord
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.port import Delete, Get, List, Put
from rdzv.errors import Incompatible
from support.cli_commands import LIMIT_S, QUICK, rdzv, running, served

HOST = os.uname().nodename
KEYS = Keys("t")
RUN = ["--run-id", "t"]
EVIL = "evil\x1b[2J\x1b]0;title\x07\nrdzv: all is well\r\x00\x9b31m\u202eeno"
"""Clears the screen, sets the title, writes a line of its own, ends a C string, turns red, and turns around."""
PROGRAM = """
import os, time
parent = os.getppid()
print(os.environ["RANK"], os.environ["RDZV_REASON"], flush=True)
while os.getppid() == parent:
    time.sleep(0.05)
"""


def engine(place, work):
    """Use the engine of a run directly, as any member could."""

    async def using():
        session = await RemoteDriver(Endpoint.parse(place), run_id="t").connect()
        try:
            return await work(session)
        finally:
            await session.close()

    return asyncio.run(using())


def put(place, **values):
    puts = [Put(KEYS.group + key.replace("__", "/"), value) for key, value in values.items()]
    engine(place, lambda session: session.txn(then=puts))


def hostile(drain=""):
    record = MemberRecord(name=EVIL, host=EVIL, addr=EVIL, order=EVIL, info={EVIL: EVIL}, boot="127.0.0.1:1", drain=drain)
    return wire.encode(record)


def is_plain(text):
    return all(line.isprintable() for line in text.split("\n"))


def lines_until(process, pattern):
    """Read lines until one matches; return all."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"ended without {pattern!r}: {lines} {process.stderr.read()!r}")


@pytest.fixture
def place():
    with served() as place:
        yield place


def test_texts_of_a_hostile_member_are_shown_without_escapes_wherever_they_appear(place):
    """The member is sealed in, and lost again: its name is in the head, the journal, notices and the program's reason."""
    run = ("run", place, *RUN, "--nnodes", "1:3", *QUICK, "--", sys.executable, "-c", PROGRAM)
    join = ("--verbose", "join", place, *RUN, "--nnodes", "1:3", *QUICK, "--conf", "slot=b")
    with running(*run) as program, running(*join) as member:
        lines_until(program, "this node came to join")
        lines_until(member, r"rank \d of")
        with running("watch", place, *RUN) as watch:
            lines_until(watch, "sealed")
            put(place, members__hostile=hostile())
            seen = lines_until(watch, "3 in")
            status = [rdzv("status", place, *RUN), rdzv("status", place, *RUN, "--json")]
            engine(place, lambda session: session.txn(then=[Delete(KEYS.member("hostile"))]))
            seen += lines_until(watch, "evil.* lost")
        lost = lines_until(program, "evil.* lost")
        told = lines_until(member, "evil.* lost")
        status += [rdzv("journal", place, *RUN), rdzv("journal", place, *RUN, "--json")]
    for text in (seen, lost, told, *(done.stdout for done in status), *(done.stderr for done in status)):
        assert is_plain(text), ascii(text)
        assert "\nrdzv: all is well" not in text
    assert [done.returncode for done in status] == [0] * 4
    assert "evil [2J" in status[0].stdout
    (info,) = [one["info"] for one in json.loads(status[1].stdout)["members"] if one["info"]]
    assert info == {EVIL: EVIL}, "a program gets what a program wrote"


def test_a_terminal_gets_no_escapes_of_others(place):
    put(place, settings=b'{"v":1,"type":"settings","min_nodes":1,"max_nodes":2}', members__hostile=hostile(drain=EVIL))
    main, other = pty.openpty()
    command = [sys.executable, "-m", "rdzv", "status", place, *RUN]
    with subprocess.Popen(command, stdout=other, stderr=other, env={**os.environ, "TERM": "dumb", "COLUMNS": "300"}) as shown:
        os.close(other)
        assert shown.wait(LIMIT_S) == 0
    text = os.read(main, 100_000).decode()
    os.close(main)
    assert "evil" in text
    for bad in ("\x1b", "\x07", "\x00", "\x9b", "\u202e"):
        assert bad not in text, ascii(text)


@contextmanager
def program_of_two(place):
    """Yield a program under `rdzv run` in a round of two."""
    run = ("run", place, *RUN, "--nnodes", "1:2", *QUICK, "--conf", "slot=a", "--", sys.executable, "-c", PROGRAM)
    other = ("join", place, *RUN, "--nnodes", "1:2", *QUICK, "--conf", "slot=b")
    with running(*other) as member, running(*run) as program:
        lines_until(member, "of 2, formed")
        lines_until(program, "this node came to join")
        yield program


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff", b'{"v":99,"type":"member"}'])
def test_garbage_disables_neither_status_nor_drain_nor_run(place, garbage):
    with program_of_two(place) as program:
        put(place, members__x=garbage, asks__y=garbage, ban__z=garbage, ranks__t__x=garbage, else__where=garbage)
        engine(place, lambda session: session.txn(then=[Put(KEYS.journal_entry(200), garbage)]))
        status = rdzv("status", place, *RUN, "--json")
        assert status.returncode == 0, status.stderr
        assert [one["state"] for one in json.loads(status.stdout)["members"]] == ["in", "in"]
        assert rdzv("journal", place, *RUN).returncode == 0
        assert program.poll() is None, "its workers go on"
        drained = rdzv("drain", f"{HOST}/a", place, *RUN, "--json")
        assert (drained.returncode, json.loads(drained.stdout)["members"]) == (0, [f"{HOST}/a"]), drained.stderr
        assert program.wait(LIMIT_S) == 6


def test_a_drain_request_that_is_garbage_is_one_without_a_reason(place):
    with program_of_two(place) as program:
        found = engine(place, lambda session: session.txn(then=[List(KEYS.members)]))
        records = {item.key.removeprefix(KEYS.members): wire.decode(MemberRecord, item.value) for item in found.reads[0]}
        (id,) = [id for id, record in records.items() if record.name == f"{HOST}/a"]
        put(place, **{f"asks__{id}": b"garbage"})
        _, err = program.communicate(timeout=LIMIT_S)
        assert program.returncode == 6, err
        assert "is drained from run 't': no readable reason; leave, do not join again [RDZV-E09]\n" in err


def test_a_ban_that_is_garbage_is_a_ban(place):
    put(place, settings=b'{"v":1,"type":"settings","min_nodes":1,"max_nodes":1}', **{f"ban__{HOST}": b"garbage"})
    done = rdzv("join", place, *RUN, "--nnodes", "1")
    assert (done.returncode, "is banned from run 't': no readable reason" in done.stderr) == (6, True), done.stderr


def test_settings_that_are_garbage_are_shown_and_replaced_by_the_first_who_comes(place):
    put(place, settings=b"garbage")
    shown = rdzv("status", place, *RUN)
    assert shown.returncode == 0, shown.stderr
    assert "record 'settings' cannot be read: it is not a record of rdzv; the next member to lead replaces it" in shown.stdout
    with running("run", place, *RUN, "--nnodes", "1", *QUICK, "--", sys.executable, "-c", PROGRAM) as program:
        lines_until(program, "0 this node came to join")


def test_a_head_that_is_garbage_is_shown_and_closed(place):
    put(place, settings=b'{"v":1,"type":"settings","min_nodes":1,"max_nodes":1}', members__x=hostile(), round=b"garbage")
    shown = rdzv("status", place, *RUN)
    assert shown.returncode == 0, shown.stderr
    assert "record 'head' cannot be read: it is not a record of rdzv; the next member to lead replaces it" in shown.stdout
    assert "evil" in shown.stdout
    with running("watch", place, *RUN) as watch:
        assert "record 'head' cannot be read" in lines_until(watch, "cannot be read")
        put(place, round=b"other garbage", asks__x=wire.encode(DrainRequest(reason=EVIL)))
        assert is_plain(lines_until(watch, "draining"))
    found = engine(place, lambda session: session.txn(then=[Get(KEYS.head)]))
    with pytest.raises(Incompatible):
        wire.decode(JournalEntry, found.item(0).value)
    assert rdzv("drain", "x", place, *RUN).returncode == 0
    assert rdzv("ban", "y", place, *RUN).returncode == 0
    assert wire.reason_of(Ban, b"") == "no readable reason"
    closed = rdzv("close", place, *RUN, "--reason", "enough")
    assert (closed.returncode, closed.stdout) == (0, "run 't' is closed: enough\n"), closed.stderr
    assert rdzv("join", place, *RUN, "--nnodes", "1").returncode == 4


def test_a_head_that_is_garbage_is_replaced_and_programs_go_on(place):
    with program_of_two(place) as program:
        put(place, round=b"garbage")
        lines_until(program, "2 of 2 members came back")
        status = rdzv("status", place, *RUN, "--json")
        assert program.poll() is None
        assert status.returncode == 0, status.stderr
        drained = rdzv("drain", f"{HOST}/a", place, *RUN)
        assert drained.returncode == 0, drained.stderr
        assert program.wait(LIMIT_S) == 6
        assert "evicted from its round" in (log := program.stderr.read())
        assert "the run's records are gone or cannot be read" in log
