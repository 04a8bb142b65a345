"""What can go wrong with a request, told apart by what the caller may do about it."""

from __future__ import annotations

import grpc


class EtcdError(Exception):
    """The base. `problem` is what etcd or gRPC said."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Unanswered(EtcdError):
    """No answer. `applied` is False if the request surely had no effect, None if that is unknown."""

    def __init__(self, problem: str, applied: bool | None = None) -> None:
        super().__init__(problem)
        self.applied = applied


class LeaderChanged(Unanswered):
    """The member is well, but etcd's leader changed while the request was under way, and may have taken it along."""


class Forked(Unanswered):
    """gRPC's threads and connections stayed in the process that this one was forked from."""

    def __init__(self) -> None:
        super().__init__(
            "gRPC was used in the process that this one was forked from and does not work here; "
            "start it by 'spawn' or 'forkserver', or fork before joining",
            applied=False,
        )


class RequestRefused(EtcdError):
    """etcd's answer is no, and nothing happened. `code` is gRPC's name for the kind of refusal."""

    def __init__(self, problem: str, code: str = "") -> None:
        super().__init__(problem)
        self.code = code


class LeaseNotFound(RequestRefused):
    """The lease has ended, or never was."""


class LeaseExists(RequestRefused):
    """A lease with that id was granted before."""


class Compacted(RequestRefused):
    """The revision is older than what etcd keeps."""


class Denied(RequestRefused):
    """The user may not do that."""


class WrongLogin(RequestRefused):
    """The name or the password is wrong."""


class TokenInvalid(RequestRefused):
    """The token has expired, or the rights have changed since: a new one is needed."""


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
_NEVER_SENT = ("failed to connect to all", "connections to all backends failing", "DNS resolution failed", "no leader")
"""gRPC's words when it had no connection to send a request on, and etcd's when it did not look at it."""
_MAYBE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
}


def error_of(code: grpc.StatusCode, text: str) -> EtcdError:
    """The error for a status."""
    refusal = refusal_of(text, code.name)
    if type(refusal) is not RequestRefused:
        return refusal
    if code in _MAYBE or (code is grpc.StatusCode.UNKNOWN and not text.startswith("etcdserver:")):
        if "etcdserver: leader changed" in text:
            return LeaderChanged(text)
        never = any(words in text for words in _NEVER_SENT)
        return Unanswered(text or code.name, applied=False if never else None)
    return refusal


def refusal_of(text: str, code: str = "") -> RequestRefused:
    """The refusal that etcd expresses by these words."""
    kind = next((kind for words, kind in _BY_TEXT if words in text), RequestRefused)
    return kind(text, code)
