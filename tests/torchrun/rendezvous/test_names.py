"""torch's names, here: each behaves as torch documents it, or as docs/torch-names.md says it differs."""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

import torch.distributed.elastic.rendezvous as torchs
from torch.distributed import HashStore, TCPStore

import rdzv.torchrun.rendezvous as ours
from rdzv.torchrun.rendezvous import (
    C10dRendezvousBackend,
    DynamicRendezvousHandler,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousSettings,
    RendezvousStoreInfo,
    RendezvousTimeout,
    StaticTCPRendezvous,
    create_handler,
    get_rendezvous_handler,
    parse_rendezvous_endpoint,
    rendezvous_handler_registry,
)
from rdzv.torchrun.rendezvous import create_rdzv_handler as create_static

MODULES = ("api", "dynamic_rendezvous", "c10d_rendezvous_backend", "static_tcp_rendezvous", "registry", "utils")
ERRORS = ("Error", "ClosedError", "ConnectionError", "GracefulExitError", "StateError", "TimeoutError")


def public(module):
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
        ]  # fmt: skip
    return set(names)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_of_a_module_is_in_ours_of_the_same_name(name):
    theirs = importlib.import_module(f"{torchs.__name__}.{name}")
    mine = importlib.import_module(f"{ours.__name__}.{name}")
    assert [one for one in sorted(public(theirs)) if not hasattr(mine, one)] == []


def test_every_public_name_can_be_imported_from_one_place():
    assert [name for name in torchs.__all__ if name not in ours.__all__] == []
    for name in ours.__all__:
        assert getattr(ours, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ours.nothing


def test_the_table_of_names_is_complete():
    text = (Path(__file__).parents[3] / "docs" / "torch-names.md").read_text()
    told = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", text))
    names = {one for name in MODULES for one in public(importlib.import_module(f"{torchs.__name__}.{name}"))}
    assert names | set(torchs.__all__) | set(ours.__all__) <= told


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("dynamic_rendezvous.DynamicRendezvousHandler.from_backend",) * 2,
        ("dynamic_rendezvous.create_handler",) * 2,
        ("c10d_rendezvous_backend.C10dRendezvousBackend.__init__",) * 2,
        ("c10d_rendezvous_backend.C10dRendezvousBackend.get_state",) * 2,
        ("c10d_rendezvous_backend.C10dRendezvousBackend.set_state",) * 2,
        ("c10d_rendezvous_backend.create_backend",) * 2,
        ("static_tcp_rendezvous.StaticTCPRendezvous.__init__",) * 2,
        ("static_tcp_rendezvous.create_rdzv_handler",) * 2,
        ("registry.get_rendezvous_handler",) * 2,
        ("utils.parse_rendezvous_endpoint",) * 2,
    ],
)
def test_arguments_are_called_the_same_and_have_the_same_defaults(ours, theirs):
    def find(package, path):
        module, _, names = path.partition(".")
        found = importlib.import_module(f"{package}.{module}")
        for name in names.split("."):
            found = getattr(found, name)
        return [(one.name, one.default, one.kind) for one in inspect.signature(found).parameters.values()]

    assert find("rdzv.torchrun.rendezvous", ours) == find("torch.distributed.elastic.rendezvous", theirs)


@pytest.mark.parametrize("name", ERRORS)
def test_the_errors_are_torchs_own(name):
    assert getattr(ours, f"Rendezvous{name}") is getattr(torchs, f"Rendezvous{name}")


# ---- parameters


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(("", "e", "id", 1, 1), "backend"), (("b", "e", "id", 0, 1), "min"), (("b", "e", "id", 2, 1), "max")],
)
def test_parameters_are_checked(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        RendezvousParameters(*arguments)


def params(backend="dummy", endpoint="", run_id="run", low=1, high=1, **config):
    return RendezvousParameters(backend, endpoint, run_id, low, high, **config)


@pytest.mark.parametrize("value", ["1", "True", "tRue", "T", "t", "Yes", "yEs", "Y", 1, True])
def test_what_means_true(value):
    assert params(flag=value).get_as_bool("flag") is True


@pytest.mark.parametrize("value", ["0", "False", "faLse", "F", "f", "No", "nO", "N", 0, False])
def test_what_means_false(value):
    assert params(flag=value).get_as_bool("flag") is False


@pytest.mark.parametrize("value", ["01", "Flse", "Ture", "g", "4", "_", "tr", 2, -1])
def test_what_means_neither_true_nor_false(value):
    with pytest.raises(ValueError, match="flag"):
        params(flag=value).get_as_bool("flag")


@pytest.mark.parametrize("value", ["0", "-10", "5", "  4", "4  ", " 4 ", 0, -4, 3])
def test_what_is_a_whole_number(value):
    assert params(number=value).get_as_int("number") == int(value)


@pytest.mark.parametrize("value", ["a", "0a", "3b", "abc", "1.5"])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match="number"):
        params(number=value).get_as_int("number")


def test_what_is_not_given_has_its_default():
    given = params(key="value")
    assert given.get("key") == "value"
    assert (given.get("other"), given.get("other", 5)) == (None, 5)
    assert (given.get_as_bool("other"), given.get_as_bool("other", True)) == (None, True)
    assert (given.get_as_int("other"), given.get_as_int("other", 5)) == (None, 5)


# ---- registry


class Dummy(StaticTCPRendezvous):
    def __init__(self, name):
        self._name = name

    def get_backend(self):
        return self._name


def make(given):
    return Dummy(given.get("says", given.backend))


def test_a_backend_is_registered_once_and_twice_only_by_the_same_creator():
    registry = RendezvousHandlerRegistry()
    registry.register("dummy", make)
    registry.register("dummy", make)
    with pytest.raises(ValueError, match="dummy"):
        registry.register("dummy", lambda _: Dummy("dummy"))
    with pytest.raises(ValueError, match="empty"):
        registry.register("", make)


def test_a_handler_is_created_by_its_name():
    registry = RendezvousHandlerRegistry()
    registry.register("dummy", make)
    assert registry.create_handler(params("dummy")).get_backend() == "dummy"
    with pytest.raises(ValueError, match="unknown"):
        registry.create_handler(params("unknown"))
    with pytest.raises(RuntimeError, match="another"):
        registry.create_handler(params("dummy", says="another"))


def test_our_registry_has_torchs_names_and_the_plug_ins():
    static = get_rendezvous_handler(params("static", "127.0.0.1:1", rank="0"))
    assert isinstance(static, StaticTCPRendezvous)
    assert isinstance(static, RendezvousHandler)
    dynamic = get_rendezvous_handler(params("c10d", "localhost:0"))
    assert isinstance(dynamic, DynamicRendezvousHandler)
    assert dynamic.get_backend() == "c10d"
    with pytest.raises(ValueError, match="nothing"):
        get_rendezvous_handler(params("nothing"))
    assert rendezvous_handler_registry is not torchs.rendezvous_handler_registry


@pytest.mark.parametrize("name", ["etcd", "etcd-v2"])
def test_torchs_names_for_etcd_mean_an_etcd_v3(name):
    pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")
    handler = get_rendezvous_handler(params(name, "127.0.0.1:1", timeout=900, last_call_timeout=5))
    assert handler.get_backend() == name
    assert handler.shutdown()


def test_a_broken_plug_in_does_not_break_the_others(monkeypatch, caplog):
    from rdzv.torchrun.rendezvous import api, registry

    class Entry:
        def __init__(self, name, load):
            self.name, self.value, self.load = name, "somewhere:x", load

    def broken():
        raise ImportError("no such thing")

    monkeypatch.setattr(registry, "rendezvous_handler_registry", api.RendezvousHandlerRegistry())
    entries = [Entry("broken", broken), Entry("c10d", lambda: lambda: make), Entry("good", lambda: lambda: make)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry._register()
    assert registry.get_rendezvous_handler(params("good")).get_backend() == "good"
    assert isinstance(registry.get_rendezvous_handler(params("static", "h:1", rank=0)), StaticTCPRendezvous)
    assert [one.args[0] for one in caplog.records] == ["broken", "c10d"]


# ---- endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("localhost", 123)),
        ("", ("localhost", 123)),
        ("  ", ("localhost", 123)),
        ("node", ("node", 123)),
        ("dummy.com", ("dummy.com", 123)),
        (" node_1-x.org:0 ", ("node_1-x.org", 0)),
        ("node:65535", ("node", 65535)),
        ("1.2.3.4:7", ("1.2.3.4", 7)),
        ("[2001:db8::1]", ("2001:db8::1", 123)),
        ("[2001:db8::1]:99", ("2001:db8::1", 99)),
        ("2001:db8::1", ("2001:db8::1", 123)),
        ("::1", ("::1", 123)),
    ],
)
def test_endpoints_that_can_be_read(text, expected):
    assert parse_rendezvous_endpoint(text, 123) == expected


@pytest.mark.parametrize("text", ["~", "a b", "/etc", "[::1", "[::1]x", ":", ":1", "[]:1", "a,b:1"])
def test_endpoints_without_a_host(text):
    with pytest.raises(ValueError, match=f"endpoint {re.escape(repr(text))}"):
        parse_rendezvous_endpoint(text, 123)


@pytest.mark.parametrize("text", ["node:", "node:x", "node:65536", "node:100000", "node:-1", "node:1.5", "[::1]:"])
def test_endpoints_with_a_wrong_port(text):
    with pytest.raises(ValueError, match="its port must be a number from 0 to 65535"):
        parse_rendezvous_endpoint(text, 123)


# ---- static


@pytest.mark.parametrize(
    ("endpoint", "config", "problem"),
    [
        ("h:1", {}, "the rank of this node is missing"),
        ("", {"rank": 0}, "the endpoint is missing"),
        ("h", {"rank": 0}, "endpoint 'h' has no port"),
        ("h:1", {"rank": 2}, "rank is 2, of 2 nodes the last has 1"),
        ("h:1", {"rank": -1}, "rank is -1"),
        ("h:1", {"rank": 0, "timeout": "x"}, "timeout"),
    ],
)
def test_static_says_what_is_missing(endpoint, config, problem):
    with pytest.raises(ValueError, match=problem):
        create_static(params("static", endpoint, high=2, **config))


def test_static_gives_out_what_it_was_told(free_port):
    one, two = (create_static(params("static", f"127.0.0.1:{free_port}", high=2, rank=rank, timeout=30)) for rank in "01")
    infos = {}
    threads = [threading.Thread(target=lambda h=h: infos.__setitem__(h.rank, h.next_rendezvous())) for h in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [(infos[rank].rank, infos[rank].world_size) for rank in (0, 1)] == [(0, 2), (1, 2)]
    infos[0].store.set("k", b"v")
    assert infos[1].store.get("k") == b"v"
    assert isinstance(infos[0], RendezvousInfo)
    assert infos[1].bootstrap_store_info == RendezvousStoreInfo("127.0.0.1", free_port)
    assert one.next_rendezvous().store.get("k") == b"v"
    one.set_closed()
    facts = (one.get_backend(), one.get_run_id(), one.is_closed(), one.num_nodes_waiting(), one.use_agent_store)
    assert facts == ("static", "run", False, 0, True)
    assert one.timeout == timedelta(seconds=30)
    assert one.shutdown() is True


def test_static_says_where_it_could_not_connect():
    with pytest.raises(RendezvousConnectionError, match=r"rank 1 of run 'run' could not reach rank 0 at 127\.0\.0\.1:1: "):
        StaticTCPRendezvous("127.0.0.1", 1, 1, 2, "run", 1).next_rendezvous()


# ---- settings of the dynamic one


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
@pytest.mark.parametrize("seconds", [0, -1])
def test_timeouts_are_positive(name, seconds):
    with pytest.raises(ValueError, match=name):
        RendezvousTimeout(**{name: timedelta(seconds=seconds)})


def handler_for(**config):
    store = HashStore()
    return create_handler(store, C10dRendezvousBackend(store, "run"), params("c10d", low=2, high=4, **config))


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
    assert [record.args[0] for record in caplog.records if "not known" in record.msg] == ["lifetime"]


@pytest.mark.parametrize("config", [{"join_timeout": "-1"}, {"last_call_timeout": "x"}, {"grow": "sometimes"}])
def test_create_handler_refuses_what_is_wrong(config):
    with pytest.raises(ValueError, match=r"join|last_call|grow"):
        handler_for(**config)


def test_a_store_info_is_built_by_rank_0_and_read_by_all():
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    built = RendezvousStoreInfo.build(0, store, local_addr="10.0.0.1", server_port=77)
    assert RendezvousStoreInfo.build(1, store, local_addr="10.0.0.2") == built == RendezvousStoreInfo("10.0.0.1", 77)
