"""The end of a process group with NCCL, by its seams: no GPU is needed, and none has been used."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from torch.distributed import distributed_c10d

from rdzv.torch.group import ProcessGroup


class FakeBackend:
    """NCCL's backend as far as `abort` uses it."""

    def __init__(self, calls):
        self._calls = calls

    def _group_start(self):
        self._calls.append("start")

    def _group_end(self):
        self._calls.append("end")


class FakeGroup:
    def __init__(self, name, calls, backend=None, error=None):
        self._name, self._calls, self._backend, self._error = name, calls, backend, error

    def _get_backend(self, _device):
        if self._backend is None:
            raise RuntimeError("no backend for that device")
        return self._backend

    def abort(self):
        self._calls.append(self._name)
        if self._error is not None:
            raise self._error


@pytest.fixture
def calls(monkeypatch):
    return []


def abort(monkeypatch, *groups):
    monkeypatch.setattr(distributed_c10d, "_pg_map", dict.fromkeys(groups))
    ProcessGroup("gloo", 1.0, 1.0).abort()


def test_all_communicators_of_nccl_are_aborted_as_one_group(monkeypatch, calls):
    """One by one they would wait for each other."""
    nccl = FakeBackend(calls)
    abort(monkeypatch, FakeGroup("gloo", calls), FakeGroup("world", calls, nccl), FakeGroup("half", calls, nccl))
    assert calls == ["start", "gloo", "world", "half", "end"]


def test_a_group_that_cannot_be_aborted_keeps_no_other_from_it(monkeypatch, calls):
    broken = FakeGroup("broken", calls, FakeBackend(calls), RuntimeError("CUDA error: unspecified launch failure"))
    abort(monkeypatch, broken, FakeGroup("other", calls))
    assert calls == ["start", "broken", "other", "end"]


def test_without_nccl_each_group_is_aborted_by_itself(monkeypatch, calls):
    abort(monkeypatch, FakeGroup("a", calls), FakeGroup("b", calls))
    assert calls == ["a", "b"]


def test_nccl_does_not_end_a_process_that_stays_unless_the_user_wants_it(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1")
    ProcessGroup("cpu:gloo,cuda:nccl", 1.0, 1.0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "1"
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
