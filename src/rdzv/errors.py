"""Every exception a caller of rdzv can meet.

    RdzvError
    ├── SettingsError (ValueError)     a setting or endpoint that cannot be right, or differs from the run's
    ├── Unreachable (ConnectionError)  the engine did not answer: trying again is reasonable
    ├── Untrusted                      this side and the server do not trust each other; trying again does not help
    ├── EngineMoved                    an engine answers at another place than the one that knew this run
    ├── JoinTimeout (TimeoutError)     no round was sealed in time; says who is here and what is missing
    ├── StoreTimeout (TimeoutError)    a key of the round's store did not come in time
    ├── Closed                         the run is over: by whom and why
    ├── Evicted                        the others went on without us: stop the workers, join again
    ├── Drained                        an operator asked this member to go: leave, do not join again
    ├── Banned                         an operator banned this host
    ├── RoundOver                      the round this store belonged to is over
    ├── NotFound                       no such run, or nobody of that name in it
    ├── NotJoined                      a call that is for members, before join()
    ├── LeftAlready                    a call after leave()
    ├── ForkedChild                    a call in a child process, on an object of the process it was forked from
    ├── NotStarted (RuntimeError)      a server that was to be started here does not run
    ├── LimitExceeded (ValueError)     a value larger than the wire format allows
    └── Incompatible                   bytes that are not ours, or of another version

Each has a short code, which docs/errors.md explains and with which its message ends, wherever that is read: in a traceback, a
log, the shell. Each is built from fields and makes its sentence from them, so that programs need not read prose. Their
arguments are passed to `Exception.__init__` in order, which is what makes them survive a trip between processes.
"""

from __future__ import annotations

from collections.abc import Sequence


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


class RdzvError(Exception):
    """The base of all of them."""

    code = "RDZV-E00"
    """Under which docs/errors.md says what it means and what to do. Never given to another error."""

    @property
    def sentence(self) -> str:
        """What happened, without the code: to be part of another sentence."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.sentence} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        # OSError, a base of some, keeps only part of its arguments when it is pickled.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[RdzvError], args: tuple[object, ...], fields: dict[str, object]) -> RdzvError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class SettingsError(RdzvError, ValueError):
    """A setting is wrong, or differs from what the run agreed on."""

    code = "RDZV-E01"

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Unreachable(RdzvError, ConnectionError):
    """The engine did not answer. `applied` is False if the request surely had no effect, None if that is unknown."""

    code = "RDZV-E02"

    def __init__(
        self, endpoint: str, problem: str, waited_s: float = 0.0, applied: bool | None = None, remedy: str = ""
    ) -> None:
        super().__init__(endpoint, problem, waited_s, applied, remedy)
        self.endpoint = endpoint
        self.problem = problem
        self.waited_s = waited_s
        self.applied = applied
        self.remedy = remedy

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        tried = f" after {_seconds(self.waited_s)}" if self.waited_s >= 0.1 else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"engine {self.endpoint} is unreachable{tried}: {self.problem}{remedy}"


class Untrusted(RdzvError):
    """Somebody is there, but one of us cannot prove who it is: secrets, certificates or TLS settings do not fit."""

    code = "RDZV-E03"

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(endpoint, problem)
        self.endpoint = endpoint
        self.problem = problem

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"engine {self.endpoint} and this side do not trust each other: {self.problem}"


class EngineMoved(RdzvError):
    """Another engine answers under the endpoint; following it could split the world."""

    code = "RDZV-E04"

    def __init__(self, run_id: str, old_place: str, new_place: str) -> None:
        super().__init__(run_id, old_place, new_place)
        self.run_id = run_id
        self.old_place = old_place
        self.new_place = new_place

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return (
            f"run {self.run_id!r} was kept by the engine at {self.old_place}, but {self.new_place} answers now; "
            "the old one may still be serving others: bring it back, or, if it is surely gone, "
            "run `rdzv adopt --force` against the new one"
        )


class JoinTimeout(RdzvError, TimeoutError):
    """No world in time. `reason` is the core's, as shown everywhere."""

    code = "RDZV-E05"

    def __init__(
        self,
        run_id: str,
        waited_s: float,
        reason: str,
        present: Sequence[str] = (),
        settings: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(run_id, waited_s, reason, present, settings, remedy)
        self.run_id = run_id
        self.waited_s = waited_s
        self.reason = reason
        self.present = tuple(present)
        self.settings = settings
        self.remedy = remedy

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        shown = ", ".join(self.present[:16])
        if len(self.present) > 16:
            shown += f" and {len(self.present) - 16} more"
        here = f" (here: {shown})" if shown else " (nobody is here)"
        under = f" [{self.settings}]" if self.settings else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"run {self.run_id!r} gave no world in {_seconds(self.waited_s)}: {self.reason}{here}{under}{remedy}"


class StoreTimeout(RdzvError, TimeoutError):
    """Keys that others should have set did not come."""

    code = "RDZV-E06"

    def __init__(self, keys: Sequence[str], waited_s: float, round_number: int) -> None:
        super().__init__(keys, waited_s, round_number)
        self.keys = tuple(keys)
        self.waited_s = waited_s
        self.round_number = round_number

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        names = ", ".join(repr(key) for key in self.keys[:5])
        more = f" and {len(self.keys) - 5} more" if len(self.keys) > 5 else ""
        return (
            f"store of round {self.round_number}: {names}{more} not set within {_seconds(self.waited_s)}; "
            "the member that should set it is slow, or waits for something else"
        )


class Closed(RdzvError):
    """The run is over and stays so for this incarnation."""

    code = "RDZV-E07"

    def __init__(self, run_id: str, reason: str, success: bool = False, closed_for_s: float = 0.0) -> None:
        super().__init__(run_id, reason, success, closed_for_s)
        self.run_id = run_id
        self.reason = reason
        self.success = success
        self.closed_for_s = closed_for_s

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        again = (
            f"; the id can be used again {_seconds(self.closed_for_s)} after the close, "
            "or at once with a higher incarnation"
            if self.closed_for_s
            else ""
        )
        return f"run {self.run_id!r} is closed: {self.reason}{again}"


class Evicted(RdzvError):
    """This member's place was given up by the others, so nothing it does counts until it joins again."""

    code = "RDZV-E08"

    def __init__(self, run_id: str, member: str, reason: str) -> None:
        super().__init__(run_id, member, reason)
        self.run_id = run_id
        self.member = member
        self.reason = reason

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return (
            f"member {self.member} was evicted from run {self.run_id!r}: {self.reason}; "
            "stop its workers, then join again"
        )


class Drained(RdzvError):
    """The operator wants this member gone; the run goes on without it."""

    code = "RDZV-E09"

    def __init__(self, run_id: str, member: str, reason: str) -> None:
        super().__init__(run_id, member, reason)
        self.run_id = run_id
        self.member = member
        self.reason = reason

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"member {self.member} is drained from run {self.run_id!r}: {self.reason}; leave, do not join again"


class Banned(RdzvError):
    """The operator does not want this host in the run."""

    code = "RDZV-E10"

    def __init__(self, run_id: str, host: str, reason: str) -> None:
        super().__init__(run_id, host, reason)
        self.run_id = run_id
        self.host = host
        self.reason = reason

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"host {self.host!r} is banned from run {self.run_id!r}: {self.reason}; `rdzv unban` lets it in again"


class RoundOver(RdzvError):
    """The store's round is over; its keys are gone or about to go."""

    code = "RDZV-E11"

    def __init__(self, round_number: int, reason: str) -> None:
        super().__init__(round_number, reason)
        self.round_number = round_number
        self.reason = reason

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"round {self.round_number} is over: {self.reason}; call join() for the next one"


class NotFound(RdzvError):
    """What an operator asks for is not there."""

    code = "RDZV-E12"

    def __init__(self, run_id: str, problem: str) -> None:
        super().__init__(run_id, problem)
        self.run_id = run_id
        self.problem = problem

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"run {self.run_id!r}: {self.problem}"


class NotJoined(RdzvError):
    """Only a member that has joined can say that."""

    code = "RDZV-E13"

    def __init__(self, run_id: str, call: str) -> None:
        super().__init__(run_id, call)
        self.run_id = run_id
        self.call = call

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"{self.call}: this member has not joined run {self.run_id!r}; call join() first"


class LeftAlready(RdzvError):
    """The rendezvous was left; a new object is needed to come back."""

    code = "RDZV-E14"

    def __init__(self, run_id: str, call: str) -> None:
        super().__init__(run_id, call)
        self.run_id = run_id
        self.call = call

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"{self.call}: this member has left run {self.run_id!r}; make a new Rendezvous to come back"


class ForkedChild(RdzvError):
    """The member lives on in the process that this one was forked from, and only there."""

    code = "RDZV-E15"

    def __init__(self, run_id: str, call: str) -> None:
        super().__init__(run_id, call)
        self.run_id = run_id
        self.call = call

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return (
            f"{self.call}: this member of run {self.run_id!r} belongs to the process that this one was forked from; "
            "make a new Rendezvous here to take part"
        )


class NotStarted(RdzvError, RuntimeError):
    """A server that this process was to start does not run."""

    code = "RDZV-E18"

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"{self.what} was not started: {self.problem}"


class LimitExceeded(RdzvError, ValueError):
    """Something to be sent is larger than every engine can carry."""

    code = "RDZV-E16"

    def __init__(self, what: str, size: int, size_max: int) -> None:
        super().__init__(what, size, size_max)
        self.what = what
        self.size = size
        self.size_max = size_max

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"{self.what} has {self.size} bytes, at most {self.size_max} are allowed"


class Incompatible(RdzvError):
    """Bytes that this version cannot read: not ours, damaged, or of another version."""

    code = "RDZV-E17"

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(what, problem)
        self.what = what
        self.problem = problem

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return f"{self.what} cannot be read: {self.problem}"
