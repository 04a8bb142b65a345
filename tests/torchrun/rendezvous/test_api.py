"""Every public name of torch's package is in ours, in a module of the same name and with the same arguments."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

import torch.distributed.elastic.rendezvous as torchs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import rdzv.torchrun.rendezvous as ours

PAGE = Path(__file__).parents[3] / "docs" / "torch-names.md"
BEGIN, END = "<!-- names -->", "<!-- end of names -->"
MODULES = (
    "api", "registry", "dynamic_rendezvous", "c10d_rendezvous_backend", "static_tcp_rendezvous", "utils",
    "etcd_rendezvous", "etcd_rendezvous_backend", "etcd_store", "etcd_server",
)  # fmt: skip
LEFT_OUT = {
    "dynamic_rendezvous.get_method_name": "a helper for torch's own log lines",
    "etcd_rendezvous.EtcdRendezvous": "steps of torch's protocol on etcd v2, which rdzv's member does not take",
}
"""Why a name, or some attributes of it, are not here."""


def module(package, name):
    return importlib.import_module(f"{package.__name__}.{name}")


def public(module):
    """Return what the module declares, and what it defines without an underscore."""
    defined = {
        name for name, value in vars(module).items()
        if name[0] != "_" and (getattr(value, "__module__", "") == module.__name__ or isinstance(value, (int, str)))
    }  # fmt: skip
    return {*getattr(module, "__all__", ()), *defined}


@pytest.fixture(autouse=True)
def urllib3(monkeypatch):
    """Let torch's backend for etcd v2 be imported, which imports this package to name its exceptions."""
    package = types.ModuleType("urllib3")
    package.exceptions = types.ModuleType("urllib3.exceptions")
    for one in (package, package.exceptions):
        if one.__name__ not in sys.modules:
            monkeypatch.setitem(sys.modules, one.__name__, one)


def missing_attributes(theirs, mine):
    return [one for one in dir(theirs) if one[0] != "_" and not hasattr(mine, one)] if inspect.isclass(theirs) else []


def names_table():
    """Return the page's table of all public names of torch's package, made from both packages."""
    lines = ["| module | name | here | left out, and why |", "|---|---|---|---|"]
    for name in MODULES:
        theirs, mine = module(torchs, name), module(ours, name)
        for one in sorted(public(theirs)):
            value = getattr(theirs, one)
            here, left_out = "ours", ""
            if not hasattr(mine, one):
                here = "left out"
            elif getattr(mine, one) is value and not isinstance(value, (int, str)):
                here = "torch's"
            elif missing := missing_attributes(value, getattr(mine, one)):
                left_out = ", ".join(f"`{attribute}`" for attribute in missing)
            why = LEFT_OUT[f"{name}.{one}"] if left_out or here == "left out" else ""
            lines.append(f"| {name} | `{one}` | {here} | {': '.join(part for part in (left_out, why) if part)} |")
    return "\n".join(lines)


def test_the_page_lists_every_public_name_of_torchs_package(request):
    """The table is made from both packages: `pytest` with `--rewrite` makes it again."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{before}{BEGIN}\n\n{names_table()}\n\n{END}{after}"
    if request.config.getoption("--rewrite"):
        PAGE.write_text(made)
    else:
        assert made == text


def test_every_name_that_is_left_out_has_a_reason_and_every_reason_a_name():
    found = {
        f"{name}.{one}"
        for name in MODULES
        for one in public(module(torchs, name))
        if not hasattr(module(ours, name), one)
        or missing_attributes(getattr(module(torchs, name), one), getattr(module(ours, name), one))
    }
    assert found == set(LEFT_OUT)


def test_every_public_name_can_be_imported_from_one_place():
    assert [name for name in torchs.__all__ if name not in ours.__all__] == []
    for name in ours.__all__:
        assert getattr(ours, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ours.nothing


@pytest.mark.parametrize(
    "path",
    [
        "dynamic_rendezvous.DynamicRendezvousHandler.from_backend",
        "dynamic_rendezvous.create_handler",
        "c10d_rendezvous_backend.C10dRendezvousBackend.__init__",
        "c10d_rendezvous_backend.C10dRendezvousBackend.get_state",
        "c10d_rendezvous_backend.C10dRendezvousBackend.set_state",
        "c10d_rendezvous_backend.create_backend",
        "static_tcp_rendezvous.StaticTCPRendezvous.__init__",
        "static_tcp_rendezvous.create_rdzv_handler",
        "registry.get_rendezvous_handler",
        "etcd_rendezvous.EtcdRendezvous.__init__",
        "etcd_rendezvous.EtcdRendezvousHandler.__init__",
        "etcd_rendezvous.create_rdzv_handler",
        "etcd_rendezvous_backend.EtcdRendezvousBackend.__init__",
        "etcd_rendezvous_backend.EtcdRendezvousBackend.get_state",
        "etcd_rendezvous_backend.EtcdRendezvousBackend.set_state",
        "etcd_rendezvous_backend.create_backend",
        "etcd_store.EtcdStore.__init__",
        "etcd_store.cas_delay",
        "etcd_server.EtcdServer.__init__",
        "etcd_server.EtcdServer.start",
        "etcd_server.find_free_port",
        "etcd_server.stop_etcd",
        "utils.parse_rendezvous_endpoint",
    ],
)
def test_arguments_are_called_the_same_and_have_the_same_defaults(path):
    def find(package):
        module, _, names = path.partition(".")
        found = importlib.import_module(f"{package.__name__}.{module}")
        for name in names.split("."):
            found = getattr(found, name)
        return [(one.name, one.default, one.kind) for one in inspect.signature(found).parameters.values()]

    assert find(ours) == find(torchs)


def test_the_types_that_torchs_agent_must_recognise_are_torchs_own():
    own = {"rendezvous_handler_registry"}
    for name in {*importlib.import_module(f"{ours.__name__}.api").__all__} - own:
        assert getattr(ours, name) is getattr(torchs, name, None) or getattr(ours, name) is getattr(torchs.api, name), name
    for name in ("RendezvousBackend", "RendezvousSettings", "RendezvousTimeout", "Token"):
        assert getattr(ours, name) is getattr(dynamic_rendezvous, name), name
