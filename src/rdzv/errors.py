"""Every exception that a caller of rdzv can meet.

    RdzvError
    ├── SettingsError (ValueError)     a setting or endpoint is wrong, or differs from the run's
    ├── Unreachable (ConnectionError)  the engine did not answer: trying again is reasonable
    ├── Untrusted                      this side and the server do not trust each other; trying again does not help
    ├── EngineMoved                    another engine answers than the one that knew this run
    ├── JoinTimeout (TimeoutError)     no round was sealed in time: lists the members present and what is missing
    ├── StoreTimeout (TimeoutError)    a key of the round's store was not set in time
    ├── Closed                         the run is over: by whom and why
    ├── Evicted                        the others went on without this member: stop the workers, join again
    ├── Drained                        an operator asked this member to go: leave, do not join again
    ├── Banned                         an operator banned this host
    ├── RoundOver                      the round of this store is over
    ├── NotFound                       no such run, or no such member in it
    ├── NotJoined                      a call for members, before join()
    ├── LeftAlready                    a call after leave()
    ├── ForkedChild                    a call in a forked child, on an object of its parent process
    ├── NotStarted (RuntimeError)      a server that this process was to start does not run
    ├── WrongArgument (TypeError)      a call was given an argument of a wrong type
    ├── LimitExceeded (ValueError)     a value is larger than the wire format allows
    └── Incompatible                   bytes that are not rdzv's, or of another version

A class below is a row of a table: its `code`, its fields (the annotations, in the order of the constructor's arguments)
and its sentence, a template over the fields or a property. `RdzvError` does the rest. Programs read the fields; people
read the sentence with the code, which docs/errors.md explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .printable import shown

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Tells type checkers that a constructor's arguments are the annotated fields. In `typing` since Python 3.11.
    dataclass_transform = lambda: lambda kind: kind  # noqa: E731

__all__ = [
    "Banned",
    "Closed",
    "Drained",
    "EngineMoved",
    "Evicted",
    "ForkedChild",
    "Incompatible",
    "JoinTimeout",
    "LeftAlready",
    "LimitExceeded",
    "NotFound",
    "NotJoined",
    "NotStarted",
    "RdzvError",
    "RoundOver",
    "SettingsError",
    "StoreTimeout",
    "Unreachable",
    "Untrusted",
    "WrongArgument",
]

TEXT_MAX = 4000
"""Characters of one field of an error. The longest of ours is a list of all settings."""


def _seconds(value: float) -> str:
    if value < 0.001:
        return "0 s"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


@dataclass_transform()
class RdzvError(Exception):
    """The base class of all errors of rdzv."""

    code: ClassVar[str] = "RDZV-E00"
    """The error's name in docs/errors.md. A code is never given to another error."""
    template: ClassVar[str] = ""
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *cls.__annotations__)

    def __init__(self, *args: Any, **named: Any) -> None:
        fields = self._fields
        if fields:
            named = {**dict(zip(fields, args)), **named}  # noqa: B905  The lengths are compared below.
            missing = [name for name in fields if name not in named and not hasattr(type(self), name)]
            if missing or len(args) > len(fields) or not named.keys() <= set(fields):
                raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}")
            for name in fields:
                value = named.get(name, getattr(type(self), name, None))
                if isinstance(value, str):
                    # Messages quote what peers, engines and servers wrote, and go to terminals and logs.
                    value = shown(value, TEXT_MAX)
                # A copy, so that the error stays as it was when the caller changes its list.
                self.__dict__[name] = tuple(value) if isinstance(value, list) else value
            args = tuple(self.__dict__[name] for name in fields)
        # OSError.__init__, which comes first for some, would take the fields for an errno and a file name.
        BaseException.__init__(self, *args)

    @property
    def sentence(self) -> str:
        """The message without the code, to be part of another sentence."""
        return self.template.format_map(self.__dict__) if self.template else BaseException.__str__(self)

    def __str__(self) -> str:
        return f"{self.sentence} [{self.code}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes. OSError's own __reduce__ keeps only some of the arguments.
        return type(self), self.args, self.__dict__


class SettingsError(RdzvError, ValueError):
    """A setting is wrong, or differs from what the run agreed on."""

    code = "RDZV-E01"
    template = "{problem}"
    problem: str


class Unreachable(RdzvError, ConnectionError):
    """The engine did not answer: try again. `applied`: False if the request surely had no effect, None if unknown.

    `other_run`: an engine answered, but it keeps another run only.
    """

    code = "RDZV-E02"
    endpoint: str
    problem: str
    waited_s: float = 0.0
    applied: bool | None = None
    remedy: str = ""
    other_run: bool = False

    @property
    def sentence(self) -> str:
        tried = f" after {_seconds(self.waited_s)}" if self.waited_s >= 0.1 else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"engine {self.endpoint} is unreachable{tried}: {self.problem}{remedy}"


class Untrusted(RdzvError):
    """Secrets, certificates or TLS settings of client and server do not fit; trying again does not help."""

    code = "RDZV-E03"
    template = "engine {endpoint} and this side do not trust each other: {problem}"
    endpoint: str
    problem: str


class EngineMoved(RdzvError):
    """Another engine answers under the endpoint; following it could split the world."""

    code = "RDZV-E04"
    template = "run {run_id!r} was kept by the engine at {old_place}, but {new_place} answers now; {why}"
    run_id: str
    old_place: str
    new_place: str
    why: str = (
        "the old one may still be serving others: bring it back, or, if it is surely gone, run `rdzv adopt --force` against "
        "the new one"
    )


class JoinTimeout(RdzvError, TimeoutError):
    """No world in time. `reason` is the text of the rules, the same as in logs and `rdzv status`."""

    code = "RDZV-E05"
    run_id: str
    waited_s: float
    reason: str
    present: Sequence[str] = ()
    settings: str = ""
    remedy: str = ""

    @property
    def sentence(self) -> str:
        shown = ", ".join(self.present[:16])
        if len(self.present) > 16:
            shown += f" and {len(self.present) - 16} more"
        here = f" (here: {shown})" if shown else " (nobody is here)"
        under = f" [{self.settings}]" if self.settings else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"run {self.run_id!r} gave no world in {_seconds(self.waited_s)}: {self.reason}{here}{under}{remedy}"


class StoreTimeout(RdzvError, TimeoutError):
    """Keys that other members should have set did not come."""

    code = "RDZV-E06"
    keys: Sequence[str]
    waited_s: float
    round_number: int

    @property
    def sentence(self) -> str:
        names = ", ".join(repr(key) for key in self.keys[:5])
        more = f" and {len(self.keys) - 5} more" if len(self.keys) > 5 else ""
        return (
            f"store of round {self.round_number}: {names}{more} not set within {_seconds(self.waited_s)}; "
            "the member that should set it is slow, or waits for something else"
        )


class Closed(RdzvError):
    """The run is over and stays so for this incarnation."""

    code = "RDZV-E07"
    run_id: str
    reason: str
    success: bool = False
    closed_for_s: float = 0.0

    @property
    def sentence(self) -> str:
        text = f"run {self.run_id!r} is closed: {self.reason}"
        if not self.closed_for_s:
            return text
        again = f"{_seconds(self.closed_for_s)} after the close, or at once with a higher incarnation"
        return f"{text}; the id can be used again {again}"


class Evicted(RdzvError):
    """The others gave up this member's place, so nothing it does counts until it joins again."""

    code = "RDZV-E08"
    template = "member {member} was evicted from run {run_id!r}: {reason}; stop its workers, then join again"
    run_id: str
    member: str
    reason: str


class Drained(RdzvError):
    """An operator wants this member gone; the run goes on without it."""

    code = "RDZV-E09"
    template = "member {member} is drained from run {run_id!r}: {reason}; leave, do not join again"
    run_id: str
    member: str
    reason: str


class Banned(RdzvError):
    """An operator does not want this host in the run."""

    code = "RDZV-E10"
    template = "host {host!r} is banned from run {run_id!r}: {reason}; `rdzv unban` lets it in again"
    run_id: str
    host: str
    reason: str


class RoundOver(RdzvError):
    """The store's round is over; its keys are gone or about to go."""

    code = "RDZV-E11"
    template = "round {round_number} is over: {reason}; call join() for the next one"
    round_number: int
    reason: str


class NotFound(RdzvError):
    """The run or the member that an operator asks for does not exist."""

    code = "RDZV-E12"
    run_id: str
    """Empty: any run would have done, and there is none."""
    problem: str

    @property
    def sentence(self) -> str:
        return f"run {self.run_id!r}: {self.problem}" if self.run_id else self.problem


class NotJoined(RdzvError):
    """The call is for members that have joined."""

    code = "RDZV-E13"
    template = "{call}: this member has not joined run {run_id!r}; call join() first"
    run_id: str
    call: str


class LeftAlready(RdzvError):
    """The rendezvous was left; a new object is needed to come back."""

    code = "RDZV-E14"
    template = "{call}: this member has left run {run_id!r}; make a new Rendezvous to come back"
    run_id: str
    call: str


class ForkedChild(RdzvError):
    """The member lives on in the process that this one was forked from, and only there."""

    code = "RDZV-E15"
    template = (
        "{call}: this member of run {run_id!r} belongs to the process that this one was forked from; "
        "make a new Rendezvous here to take part"
    )
    run_id: str
    call: str


class NotStarted(RdzvError, RuntimeError):
    """A server that this process was to start does not run."""

    code = "RDZV-E18"
    template = "{what} was not started: {problem}"
    what: str
    problem: str


class WrongArgument(RdzvError, TypeError):
    """An argument of a call has a wrong type. Nothing was done."""

    code = "RDZV-E19"
    template = "{call}: {problem}"
    call: str
    problem: str


class LimitExceeded(RdzvError, ValueError):
    """A value to be sent is larger than every engine can carry."""

    code = "RDZV-E16"
    template = "{what} has {size} bytes, at most {size_max} are allowed"
    what: str
    size: int
    size_max: int


class Incompatible(RdzvError):
    """Bytes that this version cannot read: not rdzv's, damaged, or of another version."""

    code = "RDZV-E17"
    template = "{what} cannot be read: {problem}"
    what: str
    problem: str
