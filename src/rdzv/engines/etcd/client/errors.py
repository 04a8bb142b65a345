"""Errors of requests to etcd, distinguished by what the caller may do about them."""

from __future__ import annotations

import grpc

from ....printable import shown


class EtcdError(Exception):
    """The base class. `problem` is the message of etcd or gRPC."""

    def __init__(self, problem: str) -> None:
        self.problem = shown(problem)  # It need not be etcd's own.
        super().__init__(self.problem)


class Unanswered(EtcdError):
    """No reply came. `applied` is False if the request certainly had no effect, None if that is unknown."""

    def __init__(self, problem: str, applied: bool | None = None) -> None:
        super().__init__(problem)
        self.applied = applied


class LeaderChanged(Unanswered):
    """The member is healthy, but etcd's leader changed while the request was pending. The request may be lost with it."""


class Forked(Unanswered):
    """The client belongs to the process that this one was forked from: gRPC's threads do not survive a fork."""

    def __init__(self) -> None:
        super().__init__(
            "this connection to etcd belongs to the process that this one was forked from; make a new one in this process",
            applied=False,
        )


class RequestRefused(EtcdError):
    """etcd refused the request, which had no effect."""


class LeaseNotFound(RequestRefused):
    """The lease has ended or never existed."""


class LeaseExists(RequestRefused):
    """A lease with this id exists already."""


class Compacted(RequestRefused):
    """The revision is older than the oldest that etcd keeps."""


class Denied(RequestRefused):
    """The user lacks the permission."""


class WrongLogin(RequestRefused):
    """The user name or the password is wrong."""


class TokenInvalid(RequestRefused):
    """The token has expired, or permissions have changed since it was issued. A new login helps."""


_BY_TEXT: tuple[tuple[str, type[RequestRefused]], ...] = (
    ("requested lease not found", LeaseNotFound),
    ("lease already exists", LeaseExists),
    ("required revision has been compacted", Compacted),
    ("permission denied", Denied),
    ("invalid auth token", TokenInvalid),
    ("revision of auth store is old", TokenInvalid),
    ("user name is empty", WrongLogin),
    ("invalid user ID or password", WrongLogin),
)
NO_HELPER = "the helper process for gRPC cannot be started"
_NEVER_SENT = (
    "failed to connect to all", "connections to all backends failing", "DNS resolution failed", "no leader", NO_HELPER,
)  # fmt: skip
"""Parts of messages that prove that etcd did not process the request: gRPC had no connection, or etcd no leader."""
_OUTCOME_UNKNOWN = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "ABORTED"}


def error_of(code: grpc.StatusCode, text: str) -> EtcdError:
    """Return the error for a gRPC status."""
    refusal = refusal_of(text)
    if type(refusal) is not RequestRefused:
        return refusal
    if code.name in _OUTCOME_UNKNOWN or (code is grpc.StatusCode.UNKNOWN and not text.startswith("etcdserver:")):
        if "etcdserver: leader changed" in text:
            return LeaderChanged(text)
        never = any(words in text for words in _NEVER_SENT)
        return Unanswered(text or code.name, applied=False if never else None)
    return refusal


def refusal_of(text: str) -> RequestRefused:
    """Return the refusal for a message of etcd. The message is more specific than the status code."""
    return next((kind for words, kind in _BY_TEXT if words in text), RequestRefused)(text)
