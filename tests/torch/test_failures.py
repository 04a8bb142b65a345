"""Telling the loss of a peer from a defect: by the error, and by rounds that come to nothing."""

from __future__ import annotations

import pytest

from rdzv.errors import RoundOver, StoreTimeout, Unreachable

failures = pytest.importorskip("rdzv.torch.failures")
Failures, is_loss, one_line = failures.Failures, failures.is_loss, failures.one_line


class DistError(RuntimeError):
    """The name of torch's base class."""


class DistBackendError(DistError):
    pass


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:35641"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("Gloo connectFullMesh failed with [...] Connection reset by peer"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete"),
        DistBackendError("NCCL communicator was aborted"),
        RoundOver(3, "lost b"),
        StoreTimeout(["a"], 1.0, 3),
        Unreachable("127.0.0.1:1", "no answer"),
    ],
    ids=str,
)
def test_errors_that_a_lost_peer_causes_lead_to_the_next_round(error):
    assert is_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(GLOO),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        SystemExit(3),
        None,
    ],
    ids=repr,
)
def test_other_errors_are_the_programs_own(error):
    assert not is_loss(error)


def test_an_error_raised_from_a_loss_is_a_loss_and_one_raised_beside_it_is_not():
    error = ValueError("the epoch failed")
    error.__context__ = RuntimeError(GLOO)
    assert not is_loss(error)
    error.__cause__ = error.__context__
    assert is_loss(error)


def test_rounds_in_a_row_without_a_step_close_the_run_with_the_first_reason():
    counted = Failures(3)
    assert counted.failed("first") == ""
    assert counted.failed("second") == ""
    assert counted.failed("third") == "3 rounds in a row failed before a step was completed; the first: first"


def test_a_completed_step_begins_the_count_again():
    counted = Failures(2)
    assert counted.failed("first") == ""
    counted.progressed()
    assert counted.failed("second") == ""
    assert counted.failed("third").endswith("the first: second")


def test_an_error_is_told_in_one_line():
    assert one_line(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert one_line(ValueError()) == "ValueError"
