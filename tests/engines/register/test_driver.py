"""The register driver beyond the contract: its costs, bad states, failing backends, and expiry of leases."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import msgspec
import pytest

from rdzv.config.settings import Settings
from rdzv.engines.port import Created, EngineReset, Get, LeaseGone, List, Put
from rdzv.engines.register.backend import BlockingRegister
from rdzv.engines.register.document import (
    LOG_EVENTS_MAX,
    MAGIC,
    STATE_MAX,
    STORED_MAX,
    Document,
    Draft,
    StoredLease,
    decode,
    encode,
    first_document,
    read_log,
)
from rdzv.engines.register.driver import RegisterDriver
from rdzv.engines.register.expiry import ExpiryObserver
from rdzv.errors import Incompatible, LimitExceeded, Unreachable
from rdzv.member.member import Member
from rdzv.system.node import LocalNode
from support.register_backends import AbleBackend, CellBackend
from support.timing import within

LONG_S = 20.0


class Process:
    """A driver as if in a process of its own."""

    def __init__(self, backend, pid, timeout_s=5.0):
        node = LocalNode()
        node.pid = -pid
        self.node = node
        self.register = BlockingRegister(backend, "register://test", timeout_s=timeout_s)
        self.driver = RegisterDriver(self.register, node, timeout_s=timeout_s)

    async def __aenter__(self):
        self.session = await self.driver.connect()
        return self.session

    async def __aexit__(self, *_):
        await self.session.close()
        await self.driver.close()


# ---- states


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a state was executed",))


SOUND = first_document("instance", "writer")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (b"", "it is not rdzv's: it begins with b''"),
        (b"hello world, here I am", "it is not rdzv's: it begins with b'hello world, her'"),
        (b"rdzv register x\n", "it is not rdzv's: it begins with b'rdzv register x\\n'"),
        (pickle.dumps(Evil()), "it begins with a pickle, as torch's own handler writes it: give the two groups"),
        (b"rdzv register 2\nxx", "it is of version 2, this is version 1: all members of a run need one version"),
        (MAGIC + b"\xc1", "it is damaged: MessagePack data is malformed"),
        (MAGIC + msgspec.msgpack.encode(["i", 1]), "it is damaged: Expected `array` of at least length 8"),
        (MAGIC + msgspec.msgpack.encode([1, 2, 3, 4, [], {}, [], 0]), "it is damaged: Expected `str`"),
        (encode(SOUND)[:-1], "it is damaged"),
        (encode(SOUND) + b"x", "it is damaged"),
        (MAGIC + b"x" * STATE_MAX, f"it has {STATE_MAX + len(MAGIC)} bytes, at most {STATE_MAX} are allowed"),
        ("text", "its backend gives str instead of bytes"),
        (encode(msgspec.structs.replace(SOUND, items=[("k", b"", 5, 4, 0)])), "damaged: its parts do not agree"),
        (encode(msgspec.structs.replace(SOUND, log=[(1, "k", True)])), "damaged: its parts do not agree"),
        (encode(msgspec.structs.replace(SOUND, log=[(9, "k", False)])), "damaged: its parts do not agree"),
    ],
)
def test_a_state_that_is_not_ours_is_refused_with_a_sentence(state, problem):
    with pytest.raises(Incompatible) as caught:
        decode(state)
    assert str(caught.value).startswith("the state in the register cannot be read: ")
    assert problem in str(caught.value)


async def test_connecting_to_a_bad_state_fails_and_leaves_it():
    backend = CellBackend()
    backend.set_state(pickle.dumps(Evil()))
    with pytest.raises(Incompatible, match="pickle"):
        await Process(backend, 1).driver.connect()
    assert backend.swaps == [0, 1]


async def test_a_state_that_is_overwritten_ends_the_session_with_the_reason():
    backend = CellBackend()
    async with Process(backend, 1) as session:
        waiting = asyncio.ensure_future(anext(aiter(session.watch(["k/"], 1))))
        await asyncio.sleep(0)
        backend.clear()
        backend.set_state(b"something else")
        with pytest.raises(Incompatible, match="something else"):
            await waiting
        with pytest.raises(Incompatible):
            await session.txn()


@pytest.mark.parametrize("change", [lambda _: encode(first_document("another", "w")), lambda old: old])
async def test_a_state_of_another_instance_or_an_older_one_is_a_reset(change):
    backend = CellBackend()
    async with Process(backend, 1) as session:
        await session.txn(then=[Put("k", b"1")])
        old = backend.state
        await session.txn(then=[Put("k", b"2")])
        backend.clear()
        backend.set_state(change(old))
        with pytest.raises(EngineReset):
            await session.txn()


def test_the_log_of_changes_is_bounded_and_keeps_whole_transactions():
    draft = Draft(SOUND)
    for number in range(LOG_EVENTS_MAX):
        draft.txn([], [Put(f"a/{number}", b""), Put(f"b/{number}", b""), Put("same", b"%d" % number)], [], {})
    document = decode(encode(draft.finish("w")))
    events = read_log(document, document.forgotten)
    assert LOG_EVENTS_MAX - 3 < len(document.log) <= LOG_EVENTS_MAX
    revisions = range(document.forgotten + 1, document.revision + 1)
    assert [event.revision for event in events] == [revision for revision in revisions for _ in range(3)]
    values = [event.item.value for event in events if event.key == "same"]
    assert values == [b"%d" % number for number in range(LOG_EVENTS_MAX)][-len(values) :]
    large = Draft(document)
    large.txn([], [Put(f"c/{number}", b"") for number in range(2 * LOG_EVENTS_MAX)], [], {})
    assert len(large.finish("w").log) == 2 * LOG_EVENTS_MAX


async def test_only_the_request_that_would_make_the_state_too_large_is_refused():
    backend = CellBackend()
    async with Process(backend, 1) as session:
        small = session.txn(then=[Put("small", b"1")])
        large = session.txn(then=[Put("large", b"x" * STATE_MAX)])
        other = session.txn(then=[Put("other", b"1")])
        results = await asyncio.gather(small, large, other, return_exceptions=True)
        assert isinstance(results[1], LimitExceeded)
        listed = await session.txn(then=[List("")])
        assert [item.key for item in listed.reads[0]] == ["other", "small"]


async def test_a_full_store_leaves_room_for_the_records_of_its_run():
    async with Process(CellBackend(), 1) as session:
        await session.txn(then=[Put("/kv/most", b"x" * (STORED_MAX - 1000))])
        with pytest.raises(LimitExceeded, match=f"the run's state in the register has .* bytes, at most {STORED_MAX}"):
            await session.txn(then=[Put("/kv/more", b"x" * 1000)])
        await session.txn(then=[Put("record", b"x" * 1000)])
        with pytest.raises(LimitExceeded, match=f"at most {STORED_MAX}"):
            await session.txn(then=[Put("/kv/small", b"x")])
        await session.txn(then=[Put("other", b"x" * 1000)])


# ---- what it costs


async def test_all_that_a_process_wants_at_once_is_one_swap():
    backend = CellBackend()
    async with Process(backend, 1) as session, Process(backend, 1) as other:
        assert session._loop is other._loop
        wishes = [one.txn(then=[Put(f"k/{n}", b"")]) for n in range(50) for one in (session, other)]
        outcomes = await asyncio.gather(*wishes)
        assert len({outcome.revision for outcome in outcomes}) == 100
    assert backend.swaps == [0, 2], "one made the engine"


async def test_a_lease_and_its_first_key_are_one_swap_and_reads_are_none():
    backend = CellBackend()
    async with Process(backend, 1) as session:
        lease = await session.grant(60, presence=True)
        await session.renew(lease)
        await session.txn([Created("k", 0)], [Put("k", b"", lease)])
        await session.txn(then=[Get("k")])
        await session.txn([Created("k", 0)], [Put("k", b"", lease)], [Get("k")])
    assert backend.swaps == [0, 2]


async def test_where_there_are_counters_a_renewal_is_no_swap():
    backend = AbleBackend()
    async with Process(backend, 1) as session:
        lease = await session.grant(60)
        await session.txn(then=[Put("k", b"", lease)])
        for _ in range(5):
            await session.renew(lease)
        assert list(backend.counters.values()) == [5]
        await session.revoke(lease)
        await session.txn()
        assert not backend.counters
    assert backend.swaps[1] == 3, "made, put, revoked"


def form(backend, count):
    """Form a run, each member as if in a process of its own. However slow the machine is, none renews a lease or gives up."""
    settings = Settings.make(
        "memory://", run_id="crowd", min_nodes=count, max_nodes=count, local_addr="127.0.0.1", lease=300
    )

    async def main():
        processes = [Process(backend, 1 + n, timeout_s=60.0) for n in range(count)]
        members = [Member(process.driver, settings, process.node) for process in processes]
        worlds = await asyncio.gather(*(member.join() for member in members))
        assert sorted(world.rank for world in worlds) == list(range(count))
        await asyncio.gather(*(member.leave() for member in members))

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("backend", [CellBackend, AbleBackend])
def test_64_nodes_that_come_at_once_take_turns(backend):
    """The pauses bound how many swaps are lost."""
    backend = backend()
    form(backend, 64)
    lost, _ = backend.swaps
    assert lost < 64 * 25


# ---- backends that fail


class Moody(CellBackend):
    """Fails when told to, before or after the swap."""

    mood = ""

    def set_state(self, state, token=None):
        if self.mood == "before":
            raise OSError("no route to host")
        answer = super().set_state(state, token)
        if self.mood == "after":
            raise OSError("no route to host")
        return None if self.mood == "silent" else answer

    def get_state(self):
        if self.mood == "mute":
            raise OSError("no route to host")
        return super().get_state()


async def test_a_backend_that_fails_is_an_outage_and_says_what_it_knows():
    backend = Moody()
    async with Process(backend, 1) as session:
        for mood, applied, there in (("before", None, False), ("after", None, True), ("mute", False, False)):
            backend.mood = mood
            with pytest.raises(Unreachable, match="OSError: no route to host") as caught:
                await session.txn(then=[Put(mood, b"")] if mood != "mute" else [Get("x")])
            assert caught.value.applied is applied
            backend.mood = ""
            assert bool((await session.txn(then=[Get(mood)])).reads[0]) is there


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_register_that_keeps_nothing_is_refused_after_a_few_writes(says_so):
    class Forgetful(CellBackend):
        def set_state(self, state, token=None):
            self.swaps[1] += 1
            return (state, 1, True) if says_so else None

    backend = Forgetful()
    with pytest.raises(Incompatible, match="still empty after 5 writes: its set_state does not store the state"):
        await Process(backend, 1).driver.connect()
    assert backend.swaps == [0, 5]


async def test_a_backend_that_does_not_say_what_it_did_is_asked():
    backend = Moody()
    async with Process(backend, 1) as session:
        backend.mood = "silent"
        assert (await session.txn([Created("k", 0)], [Put("k", b"1")])).succeeded
        assert (await session.txn(then=[Get("k")])).item(0).value == b"1"


async def test_a_lease_whose_birth_is_unknown_is_not_born_twice():
    backend = Moody()
    async with Process(backend, 1) as session:
        lease = await session.grant(60)
        backend.mood = "before"
        with pytest.raises(Unreachable):
            await session.txn(then=[Put("k", b"", lease)])
        backend.mood = ""
        with pytest.raises(LeaseGone):
            await session.txn(then=[Put("k", b"", lease)])


async def test_a_thread_that_cannot_be_started_fails_one_call_and_not_the_later_ones(monkeypatch):
    """Every later call was given to the thread that had never run, and waited for its whole timeout."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    register = BlockingRegister(CellBackend(), "register://test", timeout_s=LONG_S)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Unreachable, match="can't start new thread"):
            await register.read()
    assert await register.read() is None
    await register.close()


async def test_a_backend_that_hangs_holds_nobody_up_longer_than_told():
    hang = threading.Event()

    class Hanging(CellBackend):
        def get_state(self):
            if threading.current_thread() is not threading.main_thread() and self.version > 1:
                hang.wait(LONG_S)
            return super().get_state()

    backend = Hanging()
    async with Process(backend, 1, timeout_s=0.2) as session:
        await session.txn(then=[Put("k", b"")])
        began_at = time.monotonic()
        with pytest.raises(Unreachable, match="no answer"):
            await session.txn(then=[Get("k")])
        within(time.monotonic() - began_at, 5)
        hang.set()
        backend.version = 1
        while True:
            try:
                await session.txn(then=[Get("k")])
            except Unreachable:
                continue
            break


async def test_sessions_of_one_process_go_on_by_the_connection_of_another():
    cell = CellBackend()

    class Way:
        """A breakable connection to the cell."""

        def __init__(self):
            self.broken = False

        def get_state(self):
            if self.broken:
                raise OSError("cable")
            return cell.get_state()

        def set_state(self, state, token=None):
            if self.broken:
                raise OSError("cable")
            return cell.set_state(state, token)

    first, second = Way(), Way()
    async with Process(first, 1) as session, Process(second, 1) as other:
        first.broken = True
        with pytest.raises(Unreachable, match="cable"):
            await session.txn(then=[Put("k", b"")])
        assert (await session.txn(then=[Put("k", b"")])).succeeded
        assert (await other.txn(then=[Get("k")])).item(0) is not None


# ---- leases by one's own clock


def test_a_lease_ends_after_its_time_as_seen_by_the_observer():
    observer, leases = ExpiryObserver(), {1: StoredLease(10.0, 0)}
    silent = [at for at in range(100, 130, 2) if observer.look(leases, {}, float(at))]
    assert silent[0] == 110
    observer = ExpiryObserver()
    assert not [at for at in range(100, 160, 2) if observer.look({1: StoredLease(10.0, at // 9)}, {}, float(at))]


def test_beats_that_are_counted_elsewhere_count():
    observer, leases = ExpiryObserver(), {1: StoredLease(10.0, -1), 2: StoredLease(10.0, -1)}
    silent = [observer.look(leases, {1: at // 5, 2: 7}, float(at)) for at in range(100, 112, 2)]
    assert silent == [[], [], [], [], [], [2]]


def test_an_observer_that_stalled_starts_anew():
    observer, leases = ExpiryObserver(), {1: StoredLease(10.0, 0), 2: StoredLease(100.0, 0)}
    for at in (100.0, 102.0, 104.0, 106.0, 108.0):
        assert observer.look(leases, {}, at) == []
    assert observer.look(leases, {}, 112.0) == [], "nobody knows what happened in these four seconds"
    for at in (114.0, 116.0, 118.0, 120.0):
        assert observer.look(leases, {}, at) == []
    assert observer.look(leases, {}, 122.0) == [1]


def ended_at(leases, interval_s, swap_s):
    """Return when an observer that reads at that interval ends lease 1."""
    observer, at = ExpiryObserver(), 100.0
    while 1 not in observer.look(leases, {}, at, swap_s):
        at += interval_s
        assert at < 1000, "a dead member must be noticed"
    return at - 100.0


def test_a_lease_lasts_at_least_three_swaps_per_lease_in_the_register():
    five = {id: StoredLease(10.0, 0) for id in range(1, 6)}
    assert ended_at(five, 2.0, swap_s=0.5) == 10.0
    assert 30.0 <= ended_at(five, 2.0, swap_s=2.0) <= 32.0
    assert ended_at({id: StoredLease(10.0, -1) for id in five}, 2.0, swap_s=2.0) == 10.0, "counters need no turn"


def test_a_register_that_is_always_slow_hides_no_dead_member():
    assert ended_at({id: StoredLease(4.0, 0) for id in range(1, 6)}, 3.0, swap_s=2.0) < 40.0
    assert ended_at({1: StoredLease(4.0, 0)}, 2.5, swap_s=2.0) < 30.0


def test_leases_are_in_the_order_of_their_last_renewal():
    document = msgspec.structs.replace(SOUND, leases={id: StoredLease(9.0, 0) for id in (3, 1, 2)})
    draft = Draft(decode(encode(document)))
    draft.renew(1)
    draft.renew(3)
    assert list(decode(encode(draft.finish("w"))).leases) == [2, 1, 3]


async def test_a_lease_that_a_slow_register_lengthens_is_told_once(caplog):
    class Slow(CellBackend):
        def get_state(self):
            time.sleep(0.1)
            return super().get_state()

    async with Process(Slow(), 1) as session:
        watch = aiter(session.watch(["k"], 2))
        await session.txn(then=[Put("k", b"", await session.grant(0.2, presence=True))])
        assert (await anext(watch)).events[0].item is None
    assert [record.name for record in caplog.records] == ["rdzv.register"]
    assert "1 leases are renewed in it" in caplog.text
    assert "A lease of 0.2 s therefore ends after 1" in caplog.text


async def test_without_anybody_who_looks_no_lease_ends():
    """A limit of registers, as the driver's docstring says."""
    backend = CellBackend()
    async with Process(backend, 1) as session:
        await session.txn(then=[Put("k", b"", await session.grant(0.2))])
    await asyncio.sleep(0.5)
    async with Process(backend, 2) as session:
        watch = aiter(session.watch(["k"], (await session.txn()).revision))
        assert (await session.txn(then=[Get("k")])).item(0) is not None
        assert (await anext(watch)).events[0].item is None


def test_a_document_is_what_it_was_after_a_trip():
    draft = Draft(SOUND)
    unstored = {7: StoredLease(3.5, 0)}
    draft.txn([], [Put("a", b"\x00\xff", 7), Put("b", b"2")], [], unstored)
    draft.txn([], [Put("b", b"3")], [], {})
    document = draft.finish("writer")
    assert decode(encode(document)) == document
    assert isinstance(document, Document)
    assert [event.item.value for event in read_log(document, 1)] == [b"\x00\xff", b"2", b"3"]
