"""Our registry has torch's backend names, with our handlers, and the plug-ins that torch would find."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

import torch.distributed.elastic.rendezvous as torchs

from rdzv.torchrun.rendezvous import (
    DynamicRendezvousHandler,
    RendezvousHandler,
    RendezvousParameters,
    StaticTCPRendezvous,
    api,
    get_rendezvous_handler,
    registry,
    rendezvous_handler_registry,
)


def params(backend, endpoint="", **config):
    return RendezvousParameters(backend, endpoint, "run", 1, 1, **config)


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


def test_the_import_of_the_package_fills_the_registry():
    program = (
        "import rdzv.torchrun.rendezvous as package\n"
        "given = package.RendezvousParameters('static', 'h:1', 'run', 1, 1, rank='0')\n"
        "print(package.rendezvous_handler_registry.create_handler(given).get_backend())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("static\n", 0), done.stderr


@pytest.mark.parametrize("name", ["etcd", "etcd-v2"])
def test_torchs_names_for_etcd_mean_an_etcd_v3(name):
    pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")
    handler = get_rendezvous_handler(params(name, "127.0.0.1:1", timeout=900, last_call_timeout=5))
    assert handler.get_backend() == name
    assert handler.shutdown()


def test_a_broken_plug_in_does_not_break_the_others(monkeypatch, caplog):
    class Dummy(StaticTCPRendezvous):
        def __init__(self, name):
            self._name = name

        def get_backend(self):
            return self._name

    class Entry:
        def __init__(self, name, load):
            self.name, self.value, self.load = name, "somewhere:x", load

    def make():
        return lambda given: Dummy(given.backend)

    def broken():
        raise ImportError("no such thing")

    monkeypatch.setattr(registry, "rendezvous_handler_registry", api.RendezvousHandlerRegistry())
    entries = [Entry("broken", broken), Entry("c10d", lambda: make), Entry("good", lambda: make)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry._register()
    assert registry.get_rendezvous_handler(params("good")).get_backend() == "good"
    assert isinstance(registry.get_rendezvous_handler(params("static", "h:1", rank=0)), StaticTCPRendezvous)
    assert [one.args[0] for one in caplog.records] == ["broken", "c10d"]
