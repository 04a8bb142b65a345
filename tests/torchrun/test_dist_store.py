"""Our torch stores, over a round and over etcd, answer as torch's own do, from Python and from C++."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

import rdzv
from support import torchrun_jobs

dist = pytest.importorskip("torch.distributed", reason="torch is not installed: the extra `torch` brings it")

from rdzv.errors import RoundOver, StoreTimeout, Unreachable  # noqa: E402
from rdzv.torchrun.dist_store import NO_LIMIT_S, DistStore  # noqa: E402
from rdzv.torchrun.rendezvous import EtcdStore  # noqa: E402

LONG_S = 60.0
SHORT = timedelta(seconds=0.05)


@pytest.fixture(scope="module")
def world():
    options = {"run_id": "job", "min_nodes": 1, "max_nodes": 1}
    with rdzv.Rendezvous("memory://dist-store", **options) as rendezvous:
        yield rendezvous.join(timeout_s=LONG_S)


@pytest.fixture(params=["torch's own", "ours, from Python", "ours, through C++", "etcd"])
def store(request, world):
    """Stores that must be alike. A prefix store is C++ code that calls the store under it."""
    if request.param == "torch's own":
        return dist.HashStore()
    if request.param == "etcd":
        return EtcdStore(request.getfixturevalue("etcd_client"), request.node.name)
    for key in ("a", "b", "n", "list"):
        world.store.delete(key)
        world.store.delete(f"p/{key}")
    ours = DistStore(world.store)
    return ours if request.param == "ours, from Python" else dist.PrefixStore("p", ours)


# ---- as torch's own


def test_it_sets_and_gets_text_and_bytes(store):
    store.set("a", "text")
    store.set("b", b"\x00\xff")
    assert store.get("a") == b"text"
    assert store.get("b") == b"\x00\xff"
    store.set("a", "")
    assert store.get("a") == b""


def test_it_counts_together(store):
    assert [store.add("n", 2), store.add("n", -3), store.add("n", 0)] == [2, -1, -1]
    assert store.get("n") == b"-1"


def test_it_compares_and_sets(store):
    assert store.compare_set("a", "old", "new") == b"old", "torch's answer for a key that is not there"
    assert not store.check(["a"])
    assert store.compare_set("a", "", "first") == b"first"
    assert store.compare_set("a", "other", "second") == b"first"
    assert store.compare_set("a", "first", "second") == b"second"
    assert store.get("a") == b"second"


def test_it_appends_bytes(store):
    store.append("list", "a,")
    store.append("list", "b,")
    assert store.get("list") == b"a,b,"


def test_it_takes_many_at_once(store):
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert store.has_extended_api()
    names = [f"many{n}" for n in range(250)]
    store.multi_set(names, names)
    assert store.multi_get(names) == [name.encode() for name in names]


def test_it_writes_no_more_at_once_than_every_engine_takes():
    batches = []
    DistStore(SimpleNamespace(multi_set=batches.append)).multi_set([f"{n}" for n in range(250)], ["v"] * 250)
    assert [len(batch) for batch in batches] == [100, 100, 50]


def test_it_checks_and_deletes_and_knows_how_many_there_are(store):
    before = store.num_keys()
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.num_keys() == before + 2
    assert store.check(["a", "b"])
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a", "b"])
    assert store.num_keys() == before + 1


def test_a_key_that_does_not_come_is_an_error_that_torchs_callers_catch(store):
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    for call in (lambda: store.get("never"), lambda: store.wait(["never"]), lambda: store.wait(["never"], 2 * SHORT)):
        with pytest.raises(dist.DistStoreError):
            call()


def test_a_waiting_call_is_woken(store):
    threading.Timer(0.05, store.set, ["a", "here"]).start()
    store.wait(["a"], timedelta(seconds=LONG_S))
    assert store.get("a") == b"here"


def test_a_clone_shows_the_same_keys(store):
    other = store.clone()
    gc.collect()
    store.set("a", "1")
    assert other.get("a") == b"1"
    other.set("b", "2")
    assert store.get("b") == b"2"


def test_a_barrier_lets_all_pass_together(store):
    key = f"barrier-{type(store).__name__}"
    threads = [threading.Thread(target=store.barrier, args=(key, 3, timedelta(seconds=LONG_S))) for _ in range(2)]
    for thread in threads:
        thread.start()
    store.barrier(key, 3, timedelta(seconds=LONG_S))
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(dist.DistStoreError):
        store.barrier(f"{key}-alone", 2, SHORT)


# ---- what is ours


def test_a_prefix_may_outlive_the_last_reference_to_the_store(world):
    prefixed = dist.PrefixStore("kept", DistStore(world.store))
    gc.collect()
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"


def test_both_spellings_are_there(world):
    store = DistStore(world.store)
    store.set("both", "1")
    assert store.getNumKeys() == store.num_keys()
    assert store.deleteKey("both")
    assert not store.delete_key("both")


def test_as_many_values_as_keys_are_wanted(world):
    with pytest.raises(ValueError, match=r"^multi_set: 2 keys, but 1 values$"):
        DistStore(world.store).multi_set(["a", "b"], ["1"])


class Broken:
    """A space in which all calls fail alike, and which keeps how long they were told to wait."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.waits: list[float | None] = []

    def multi_get(self, keys, timeout_s=None):
        self.waits.append(timeout_s)
        raise self.error

    wait = multi_get

    def fail(self, *_):
        raise self.error

    multi_set = check = add = append = compare_set = delete = num_keys = fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreTimeout(["a"], 1.0, 3), dist.DistStoreError),
        (RoundOver(3, "node2 was lost"), dist.DistStoreError),
        (Unreachable("head:29400", "connection refused"), dist.DistNetworkError),
    ],
)
def test_every_call_fails_with_torchs_error_and_our_sentence(error, kind):
    store = DistStore(Broken(error))
    calls = {
        "set": ("a", "b"), "multi_set": (["a"], ["b"]), "get": ("a",), "multi_get": (["a"],), "add": ("a", 1),
        "append": ("a", "b"), "compare_set": ("a", "b", "c"), "delete_key": ("a",), "check": (["a"],), "wait": (["a"],),
        "num_keys": (),
    }  # fmt: skip
    for name, arguments in calls.items():
        with pytest.raises(kind) as caught:
            getattr(store, name)(*arguments)
        assert str(caught.value) == str(error), name
        assert caught.value.__cause__ is error, name


def test_the_timeout_in_force_is_the_one_that_torch_keeps():
    space = Broken(StoreTimeout(["a"], 1.0, 3))
    store = DistStore(space, timedelta(seconds=7))
    for ask in (
        lambda: store.get("a"),
        lambda: dist.PrefixStore("p", store).get("a"),
        lambda: store.wait(["a"], timedelta(seconds=2)),
        lambda: store.clone().get("a"),
        lambda: store.wait(["a"], timedelta(0)),
    ):
        with pytest.raises(dist.DistStoreError):
            ask()
    assert space.waits == [7.0, 7.0, 2.0, 7.0, NO_LIMIT_S]


@pytest.mark.parametrize("kind", ["round", "etcd"])
def test_process_groups_are_made_over_it_by_two_processes(kind, free_port, request):
    """`init_process_group(store=...)`, `new_group`, collectives, torch's barrier after init; no TCPStore anywhere."""
    command = [sys.executable, str(torchrun_jobs.PROGRAMS / "groups_over_store.py"), f"127.0.0.1:{free_port}"]
    if kind == "etcd":
        command.append(request.getfixturevalue("etcd_server").url)
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=LONG_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert sorted(output.splitlines()[-1] for output in outputs) == ["rank 0: 3.0 [0, 1] 1", "rank 1: 3.0 [0, 1] 1"], outputs
