"""Every public name of torch's package is in ours, in a module of the same name and with the same arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

import torch.distributed.elastic.rendezvous as torchs
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import rdzv.torchrun.rendezvous as ours

MODULES = ("api", "dynamic_rendezvous", "c10d_rendezvous_backend", "static_tcp_rendezvous", "registry", "utils")


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
