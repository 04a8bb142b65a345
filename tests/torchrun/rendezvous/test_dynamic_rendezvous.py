"""`DynamicRendezvousHandler` as torch documents it, over backends that do not know rdzv; several nodes in one process."""

from __future__ import annotations

import base64
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed import FileStore, HashStore, TCPStore

import rdzv
from rdzv.engines.register.document import decode
from rdzv.errors import SettingsError
from rdzv.torchrun.agent_store import TERMINAL
from rdzv.torchrun.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousStateError,
    RendezvousTimeout,
    RendezvousTimeoutError,
    create_handler,
)
from support.sqlite_backend import SqliteBackend
from support.torchrun_jobs import wait_for

LONG_S = 30.0


class Nodes:
    """Handlers of one run, each with a backend of its own."""

    def __init__(self, make_backend, low, high, last_call_s=1, join_s=30, **options):
        self._make = make_backend
        self._sizes = (low, high)
        self._timeout = RendezvousTimeout(join=timedelta(seconds=join_s), last_call=timedelta(seconds=last_call_s))
        self._options = {"settle": "0.1", "grow_every": "0", **options}
        self.handlers = []
        self.pool = ThreadPoolExecutor(24)

    def add(self, address="127.0.0.1"):
        backend = self._make()
        config = {"last_call_timeout": int(self._timeout.last_call.total_seconds()), **self._options}
        config["join_timeout"] = int(self._timeout.join.total_seconds())
        given = RendezvousParameters(backend.name, "", "run", *self._sizes, address, **config)
        self.handlers.append(create_handler(HashStore(), backend, given))
        return self.handlers[-1]

    def join(self, *handlers):
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers or self.handlers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        list(self.pool.map(lambda handler: handler.shutdown(), self.handlers))
        self.pool.shutdown()


def ranks(futures):
    infos = [future.result(LONG_S) for future in futures]
    return [(info.rank, info.world_size) for info in infos]


@pytest.fixture
def sqlite(tmp_path):
    return lambda: SqliteBackend(str(tmp_path / "db"), "run")


@pytest.fixture
def tcp():
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def make():
        make.server = server
        return C10dRendezvousBackend(TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False), "run")

    return make


@pytest.fixture
def file(tmp_path):
    return lambda: C10dRendezvousBackend(FileStore(str(tmp_path / "store")), "run")


@pytest.mark.parametrize("kind", ["sqlite", "tcp", "file"])
def test_a_full_run_completes_at_once_and_ranks_follow_addresses(kind, request):
    with Nodes(request.getfixturevalue(kind), 3, 3, last_call_s=600) as nodes:
        for address in ("127.0.0.10", "127.0.0.2", "127.0.0.1"):
            nodes.add(address)
        assert ranks(nodes.join()) == [(2, 3), (1, 3), (0, 3)]


def test_a_late_node_waits_and_is_let_in_by_the_next_round(tcp):
    with Nodes(tcp, 2, 3) as nodes:
        first = [nodes.add("127.0.0.1"), nodes.add("127.0.0.2")]
        assert ranks(nodes.join(*first)) == [(0, 2), (1, 2)]
        assert [handler.num_nodes_waiting() for handler in first] == [0, 0]
        later = nodes.join(nodes.add("127.0.0.3"))
        wait_for(lambda: all(handler.num_nodes_waiting() > 0 for handler in first))
        assert ranks(nodes.join(*first) + later) == [(0, 3), (1, 3), (2, 3)]


def test_a_node_beyond_the_maximum_is_a_spare_and_exits_when_all_are_done(tcp):
    with Nodes(tcp, 2, 2) as nodes:
        first = [nodes.add("127.0.0.1"), nodes.add("127.0.0.2")]
        infos = [future.result(LONG_S) for future in nodes.join(*first)]
        (spare,) = nodes.join(nodes.add("127.0.0.3"))
        wait_for(lambda: len(first[0]._rendezvous.status().of("spare")) == 1)
        assert [handler.num_nodes_waiting() for handler in first] == [0, 0]
        for info in infos:
            info.store.add(TERMINAL, 1)
        with pytest.raises(RendezvousGracefulExitError, match="run 'run' is closed"):
            spare.result(LONG_S)


def test_a_spare_of_a_full_run_exits_gracefully_when_it_is_closed_and_a_waiting_node_does_not(tcp):
    """As in torch: a node beyond the maximum was not needed; a node that had room would have been."""
    for high, error in ((1, RendezvousGracefulExitError), (2, RendezvousClosedError)):
        with Nodes(tcp, 1, high, grow="never") as nodes:
            first = nodes.add("127.0.0.1")
            ranks(nodes.join(first))
            (waiting,) = nodes.join(nodes.add("127.0.0.2"))
            wait_for(lambda first=first: len(first._rendezvous.status().members) == 2)
            first.set_closed()
            with pytest.raises(error, match="closed by its program"):
                waiting.result(LONG_S)
        tcp.server.delete_key("torch.rendezvous.run")


@pytest.mark.parametrize("kind", ["sqlite", "tcp"])
def test_closing_ends_the_run_for_all_members(kind, request):
    with Nodes(request.getfixturevalue(kind), 2, 2) as nodes:
        one, two = nodes.add("127.0.0.1"), nodes.add("127.0.0.2")
        ranks(nodes.join(one, two))
        assert not one.is_closed()
        outside = nodes.add("127.0.0.3")
        assert not outside.is_closed()
        outside.set_closed()
        assert outside.is_closed()
        wait_for(lambda: one.is_closed() and two.is_closed())
        for handler in (one, outside, nodes.add("127.0.0.4")):
            with pytest.raises(RendezvousClosedError, match="run 'run' is closed: "):
                handler.next_rendezvous()


def test_a_member_closes_the_run(sqlite):
    with Nodes(sqlite, 1, 1) as nodes:
        handler = nodes.add()
        ranks(nodes.join())
        handler.set_closed()
        with pytest.raises(RendezvousClosedError, match=r"closed by its program|this handler closed it"):
            nodes.add().next_rendezvous()


def test_closing_a_run_that_has_no_member_closes_only_this_handler(sqlite):
    with Nodes(sqlite, 1, 1) as nodes:
        handler = nodes.add()
        handler.set_closed()
        assert handler.is_closed()
        with pytest.raises(RendezvousClosedError, match="this handler closed it"):
            handler.next_rendezvous()


def test_a_timeout_says_who_is_here_and_what_is_missing(sqlite):
    with Nodes(sqlite, 2, 2, join_s=1) as nodes:
        nodes.add("127.0.0.1")
        with pytest.raises(RendezvousTimeoutError, match=r"run 'run' gave no world in .*1 of 2.*min_nodes=2 max_nodes=2"):
            nodes.join()[0].result(LONG_S)


@pytest.mark.parametrize(
    ("state", "problem"),
    [(pickle.dumps({"a": 1}), "a pickle, as torch's own handler writes it"), (b"garbage", "it begins with b'garbage'")],
)
def test_a_foreign_state_is_a_state_error_and_never_unpickled(sqlite, state, problem):
    backend = sqlite()
    backend.set_state(state)
    with Nodes(sqlite, 1, 1) as nodes:
        with pytest.raises(RendezvousStateError, match=problem):
            nodes.add().next_rendezvous()
        with pytest.raises(RendezvousStateError, match=problem):
            nodes.add().is_closed()
    assert backend.get_state()[0] == state


def test_a_backend_that_cannot_be_reached_is_a_connection_error(tmp_path):
    class Gone(SqliteBackend):
        def get_state(self):
            raise RendezvousConnectionError("the cable is cut")

    with Nodes(lambda: Gone(str(tmp_path / "db"), "run"), 1, 1, join_s=1) as nodes:
        with pytest.raises(RendezvousConnectionError, match="the cable is cut"):
            nodes.add().is_closed()
        with pytest.raises(RendezvousTimeoutError, match="the cable is cut"):
            nodes.join()[0].result(LONG_S)


def test_the_barrier_at_the_end_asks_nothing_of_a_backend_that_is_away(tmp_path):
    class Going(SqliteBackend):
        gone = False

        def get_state(self):
            if self.gone:
                raise RendezvousConnectionError("the cable is cut")
            return super().get_state()

    with Nodes(lambda: Going(str(tmp_path / "db"), "run"), 1, 1) as nodes:
        store = nodes.add().next_rendezvous().store
        Going.gone = True
        store.wait([TERMINAL], timedelta(seconds=0.3))
        with pytest.raises(RendezvousConnectionError, match="the cable is cut"):
            nodes.handlers[0].is_closed()
        Going.gone = False


def test_from_backend_needs_no_parameters():
    store = HashStore()
    handler = DynamicRendezvousHandler.from_backend("run", store, C10dRendezvousBackend(store, "run"), 1, 1)
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert handler.settings.timeout.join == timedelta(seconds=600)
        info.store.set("k", "v")
        assert info.store.get("k") == b"v"
    finally:
        assert handler.shutdown()


def test_handlers_may_be_shut_down_in_any_order():
    """In the main thread each handler takes the wakeup descriptor from the one before."""
    handlers = []
    for run in ("a", "b"):
        store = HashStore()
        handlers.append(DynamicRendezvousHandler.from_backend(run, store, C10dRendezvousBackend(store, run), 1, 1))
        assert handlers[-1].next_rendezvous().rank == 0
    assert [handler.shutdown() for handler in handlers] == [True, True]


def test_a_crowd_in_one_process_forms_with_few_swaps_and_leaves_no_thread(tcp):
    """More than 24 would be slow for another reason: about every 25th connection to a TCPStore takes 5 s."""
    before = set(threading.enumerate())  # Other tests leave threads that try to reach a dead store.
    with Nodes(tcp, 24, 24, join_s=60) as nodes:
        for number in range(24):
            nodes.add(f"127.0.0.{number + 1}")
        assert ranks(nodes.join()) == [(number, 24) for number in range(24)]
        state = base64.b64decode(tcp.server.get("torch.rendezvous.run"))
        # Each member writes twice: its key, and that it is ready. How many writes one swap takes depends on how close together
        # the threads run: a loaded machine was seen to make 26 swaps. Without sharing there are 50.
        assert decode(state).serial < 2 * 24
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("rdzv waits")]


# ---- create_handler


def handler_for(**config):
    store = HashStore()
    return create_handler(store, C10dRendezvousBackend(store, "run"), RendezvousParameters("c10d", "", "run", 2, 4, **config))


def test_create_handler_reads_torchs_parameters():
    handler = handler_for(
        join_timeout="50", last_call_timeout="60", close_timeout="70", keep_alive_interval="4", keep_alive_max_attempt="5"
    )
    settings = handler.settings
    assert isinstance(settings, RendezvousSettings)
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("run", 2, 4)
    timeout = settings.timeout
    assert (timeout.join, timeout.last_call, timeout.close) == tuple(timedelta(seconds=n) for n in (50, 60, 70))
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=4), 5)
    given = handler._conf.settings
    assert (given["join_timeout"], given["last_call"], given["replace_wait"], given["lease"]) == (50, 60, 60, 20)
    assert (handler.get_run_id(), handler.get_backend(), handler.use_agent_store) == ("run", "c10d", True)


def test_create_handler_has_torchs_defaults():
    settings = handler_for().settings
    timeout = settings.timeout
    seconds = [one.total_seconds() for one in (timeout.join, timeout.last_call, timeout.close, timeout.heartbeat)]
    assert seconds == [600, 30, 30, 5]
    assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=5), 3)


def test_create_handler_takes_settings_of_ours_and_mentions_what_it_does_not_know(caplog):
    handler = handler_for(timeout=900, store_type="tcp", grow="never", rank=3, lifetime=5)
    assert (handler._conf.settings["grow"], handler._conf.settings["order"]) == ("never", 3)
    assert "join_timeout" in handler._conf.settings
    assert (handler._conf.spare_exit, handler_for(spare_exit="exit")._conf.spare_exit) == ("error", "exit")
    assert [record.args[0] for record in caplog.records if "not known" in record.msg] == ["lifetime"]


@pytest.mark.parametrize(
    "config", [{"join_timeout": "-1"}, {"last_call_timeout": "x"}, {"grow": "sometimes"}, {"spare_exit": "no"}]
)
def test_create_handler_refuses_what_is_wrong(config):
    with pytest.raises(ValueError, match=r"join|last_call|grow|spare_exit is 'no': it must be"):
        handler_for(**config)


# ---- endpoints


@pytest.mark.parametrize("scheme", ["c10d", "file"])
def test_the_library_takes_the_endpoint(scheme, free_port, tmp_path):
    endpoint = f"c10d://127.0.0.1:{free_port}" if scheme == "c10d" else f"file://{tmp_path}/state"

    def member(_):
        with rdzv.Rendezvous(endpoint, run_id="r", min_nodes=2, max_nodes=2, local_addr="127.0.0.1") as rendezvous:
            world = rendezvous.join()
            world.store.set(str(world.rank), b"x")
            world.store.wait(["0", "1"])
            return world.rank

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(member, range(2))) == [0, 1]


def test_an_endpoint_with_options_that_nobody_knows_is_refused():
    for endpoint in ("c10d://h:1?x=1", "file:///tmp/x?x=1"):
        with pytest.raises(SettingsError, match="unknown option 'x'"):
            rdzv.Rendezvous(endpoint, run_id="r", min_nodes=1, max_nodes=1)
