"""The errors of the client: each is recognized by etcd's message, and only a request that etcd never saw is not applied."""

from __future__ import annotations

import grpc
import pytest

from rdzv.engines.etcd.client import errors

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "text", "kind", "applied"),
    [
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: refused", errors.Unanswered, False),
        (CODE.UNAVAILABLE, "etcdserver: no leader", errors.Unanswered, False),
        (CODE.UNAVAILABLE, "Socket closed", errors.Unanswered, None),
        (CODE.UNAVAILABLE, "etcdserver: request timed out", errors.Unanswered, None),
        (CODE.UNAVAILABLE, "etcdserver: leader changed", errors.LeaderChanged, None),
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.Unanswered, None),
        (CODE.UNKNOWN, "Stream removed", errors.Unanswered, None),
        (CODE.CANCELLED, "", errors.Unanswered, None),
    ],
)
def test_only_a_request_that_etcd_never_saw_is_known_not_to_be_applied(code, text, kind, applied):
    fault = errors.error_of(code, text)
    assert isinstance(fault, kind)
    assert fault.applied is applied
    assert fault.problem


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (CODE.NOT_FOUND, "etcdserver: requested lease not found", errors.LeaseNotFound),
        (CODE.FAILED_PRECONDITION, "etcdserver: lease already exists", errors.LeaseExists),
        (CODE.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", errors.Compacted),
        (CODE.PERMISSION_DENIED, "etcdserver: permission denied", errors.Denied),
        (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token", errors.TokenInvalid),
        (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", errors.TokenInvalid),
        (CODE.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password", errors.WrongLogin),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", errors.RequestRefused),
        (CODE.UNKNOWN, "etcdserver: something new", errors.RequestRefused),
    ],
)
def test_a_refusal_is_recognized_by_etcds_message(code, text, kind):
    assert type(errors.error_of(code, text)) is kind
