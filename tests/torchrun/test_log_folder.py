"""The folder for an agent's journal."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from rdzv.torchrun.log_folder import journal_folder, log_folder_of_caller
from support.ports import free_port


def launch(folder):
    """Ask as torch's launcher does, with its configuration in a variable."""
    config = SimpleNamespace(logs_specs=SimpleNamespace(root_log_dir=folder))
    return log_folder_of_caller(sys._getframe()), config


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ("/logs/job", "/logs/job"),
        ("logs", str(Path("logs").absolute())),
        (os.devnull, ""),
        (f"{tempfile.gettempdir()}/torchelastic_abc", ""),
        (None, ""),
    ],
)
def test_torchruns_log_folder_is_used_if_it_was_given(given, folder):
    assert launch(given)[0] == folder


def test_otherwise_it_is_the_users_state_folder(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert journal_folder(sys._getframe()) == "/state/rdzv"


@pytest.mark.parametrize(("conf", "count"), [({}, 1), ({"journal_dir": ""}, 0), ({"journal_dir": "off"}, 0)])
def test_an_agent_keeps_a_journal_unless_it_is_told_not_to(conf, count, tmp_path, monkeypatch):
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rdzv.torchrun import plugin

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    handler = plugin.create_rdzv(RendezvousParameters("rdzv", f"127.0.0.1:{free_port()}", "job", 1, 1, **conf))
    handler.next_rendezvous()
    handler.shutdown()
    assert len(list(tmp_path.glob("rdzv/job_*.rdzv.jsonl"))) == count
