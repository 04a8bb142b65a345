"""A fingerprint of everything that a simulated run can still depend on, so that equal states are recognised.

The walk follows every reference from the roots: objects, containers, closures, and the suspended frames of coroutines with
what they can still read (`liveness.py`). Nothing has to be listed, so a new attribute of the product cannot be forgotten.
Three kinds of value differ between states that behave alike, and are put in a common form:

- An instant becomes its distance from the present, and everything longer ago than `AGE_MAX_S` is equally long ago. Clocks of
  explored nodes and servers start at round numbers far apart (`CLOCKS`), by which an instant is recognised.
- Random ids, leases, revisions and ports become their rank among those of their kind in this state. The order is kept,
  because the product compares revisions and sorts by id.
- Digests of member lists are made of such ids. They are numbered as they are met, because the product only asks whether two
  are equal.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import hashlib
import inspect
import itertools
import logging
import random
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from .liveness import readable

CLOCK_STEP: Final = 1e8
"""Clocks start at multiples of this: an instant tells which clock it is of. No duration is so long."""
AGE_MAX_S = 4.0
"""Longer than every time that a member or server of an explored world counts from an event: what is older has run out."""
FAR_S = 12.0
"""A timer that is due later does not fire before the world is at rest."""
GRAIN_S = 0.5
"""Instants are told apart to this much."""
REVISION: Final = 7_000_000
"""First revision of an explored engine: numbers from here to a million above are revisions."""
LEASE: Final = 10**17
"""Numbers from here on are leases."""
PORT: Final = 20_000
"""Ports of bootstrap addresses begin here and end below 30,000."""

_RENAMED = re.compile(r"(\be[0-9a-f]{15}\b|\b[1-9]\d{17,18}\b|\b7\d{6}\b|:2\d{4}\b|\b[0-9a-f]{32}\b)")
_DIGEST_SIZE = 32
"""Length of the digests of member lists. No other word that is renamed is so long."""
_TOLD = re.compile(r'"lasted_s":[0-9.]+')
"""A duration that is only told: that of a head, in the journal."""
_SKIPPED_ATTRIBUTES = frozenset({
    "_nonce", "_asked", "rings", "number", "_log", "callbacks", "serial", "_endpoint", "progress", "_news", "_news_of",
    "_news_body", "_news_size", "_sizes", "bytes", "queue", "_began_at", "_trained_s", "steps", "steps_end", "share", "turns",
    "_owed", "_owing", "taken", "room", "meter", "_remembered", "said_at", "_sealed_at", "_grown_at", "_head_at", "_swept_s",
    "_emptied_s", "heard_at", "_heard_at", "began_at", "_run_renewed_at", "renewed_at", "look_again_s", "alarm",
})  # fmt: skip
"""Counters, caches and chance, which decide nothing, and queues that the world shows itself.

And instants that are only told, or are compared with longer times than an explored world lasts: when a round was sealed
(60 s, core/flaps.py), a head was written, the run grew (`grow_every` is 0), a lease was renewed (30 s, and the heartbeat's
timer tells when), the server swept (60 s for silent clients), the server heard the run (30 s) or the client the server (10 s,
and then it asks). A client's alarm comes before any answer is overdue and is set again for that time, so the
instants of its requests decide."""

_READ_FOR_S = {"_away_asked_at": 0.25, "_listed_at": 1.0}
"""Instants that no rule reads when they are older: between two questions whether a straggler is away there is a quarter of
`linger` (core/evictions.py), so one that was asked before that is as good as none. A listing is fresh for `OUT_OF_TOUCH_S`
(member/leader.py)."""
NEVER = float("-inf")
LONG_S = 1_000.0
"""Durations above this one are never over while a world is explored, so they are alike."""


def fingerprint(roots: Iterable[object], clocks: Mapping[int, float], *, exact: bool = False) -> bytes:
    """Return 8 bytes that are equal for states that behave alike. `clocks`: the present of each clock, by its number.

    `exact`: instants are told apart to 10 us, and revisions keep their numbers. A member may remember one of an engine that
    is gone, and a new engine comes to the same number sooner or later.
    """
    text = describe(roots, clocks, exact=exact).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


def describe(roots: Iterable[object], clocks: Mapping[int, float], *, exact: bool = False) -> str:
    """Return the state as text."""
    walk = Walk(clocks, 1e-5 if exact else GRAIN_S)
    for root in roots:
        if not walk.knows(root):
            walk.visit(root)
    digests = dict.fromkeys(word for word in walk.out if len(word) == _DIGEST_SIZE and word in walk.words)
    kinds = itertools.groupby(sorted(walk.words - digests.keys(), key=_order), key=lambda word: word[0])
    ranks = {word: f"{kind}{rank}" for kind, group in kinds for rank, word in enumerate(group)}
    ranks.update((word, f"digest{number}") for number, word in enumerate(digests))
    if exact:
        ranks.update((word, word) for word in walk.words - digests.keys() if word[0] == "7")
    return " ".join(map(ranks.get, walk.out, walk.out))  # What has no rank stays as it is.


def _order(word: str) -> tuple[str, int, str]:
    return word[0], len(word), word


@functools.lru_cache(maxsize=100_000)
def _parts(text: str) -> tuple[list[str], list[str]]:
    """Split a text at words that are renamed. Return all parts, and these words."""
    parts = [part for part in _RENAMED.split(_TOLD.sub("", text)) if part]
    return parts, [part for part in parts if _RENAMED.fullmatch(part)]


class Walk:
    """One walk. Objects are numbered as they are met, so that the text shows which references lead to the same one."""

    def __init__(self, clocks: Mapping[int, float], grain_s: float) -> None:
        self.out: list[str] = []
        self.words: set[str] = set()
        """Ids, leases, revisions and ports that were met. The first character of each tells which it is."""
        self._clocks = clocks
        self._grain_s = grain_s
        self._met: dict[int, int] = {}
        self._kept: list[object] = []

    def visit(self, thing: object) -> None:
        VISITORS[type(thing)](self, thing)

    def knows(self, thing: object) -> bool:
        """Whether the object was met before."""
        return id(thing) in self._met

    def is_met(self, thing: object) -> bool:
        """Whether the object was met before. Its number is written in any case."""
        number = self._met.get(id(thing))
        if number is None:
            self._met[id(thing)] = number = len(self._met)
            self._kept.append(thing)  # Else another object could get its id.
            self.out.append(f"@{number}")
            return False
        self.out.append(f"#{number}")
        return True

    def age_s(self, instant: float) -> float:
        """Return how long ago the instant is, by the clock it is of."""
        return self._clocks.get(int(instant // CLOCK_STEP), 0.0) - instant

    def number(self, value: float) -> None:
        if value >= CLOCK_STEP and value != float("inf"):
            value = round(max(min(-self.age_s(value), FAR_S), -AGE_MAX_S) / self._grain_s)
        elif LONG_S < value < CLOCK_STEP:
            value = LONG_S
        self.out.append(f"{value:.3f}")

    def items(self, things: Iterable[object]) -> None:
        self.out.append("[")
        for thing in things:
            VISITORS[type(thing)](self, thing)
        self.out.append("]")

    def mapping(self, things: Mapping[Any, object]) -> None:
        self.out.append("{")
        for key, thing in things.items():
            VISITORS[type(key)](self, key)
            VISITORS[type(thing)](self, thing)
        self.out.append("}")

    def unordered(self, things: Iterable[object]) -> None:
        parts = []
        for thing in things:
            start = len(self.out)
            self.visit(thing)
            parts.append(self.out[start:])
            del self.out[start:]
        self.out += ["<", *itertools.chain(*sorted(parts)), ">"]

    def instance(self, thing: object) -> None:
        if self.is_met(thing):
            return
        out, kind = self.out, cast("Any", type(thing))
        out.append(kind.__name__)
        for name in _slots(kind):
            if hasattr(thing, name):
                out.append(name)
                value = getattr(thing, name)
                if name == "heard_s" and getattr(thing, "run", None) is not None:
                    value = NEVER  # Only a client that has not said hello is dropped within the time of a world.
                VISITORS[type(value)](self, value)
        attributes: dict[str, Any] | None = getattr(thing, "__dict__", None)
        if attributes:
            for name in _names(tuple(attributes)):
                out.append(name)
                value = attributes[name]
                if name == "_waiters" and any(type(one) is int for one in value):
                    value = list(value.values())  # The numbers of requests decide nothing.
                elif name in _READ_FOR_S and value != NEVER and self.age_s(value) > _READ_FOR_S[name]:
                    value = NEVER
                elif name == "_of_host":
                    value = dict(sorted(value.items()))  # A count for each host, in the order in which they came.
                VISITORS[type(value)](self, value)

    def struct(self, thing: msgspec.Struct) -> None:
        self.out.append(type(thing).__name__)
        for name in _names(thing.__struct_fields__):
            value = getattr(thing, name)
            VISITORS[type(value)](self, value)

    def mutable(self, thing: msgspec.Struct) -> None:
        if not self.is_met(thing):
            self.struct(thing)

    def text(self, text: str) -> None:
        parts, words = _parts(text)
        self.out += parts
        if words:
            self.words.update(words)

    def whole(self, value: int) -> None:
        text = f"l{value}" if value >= LEASE else str(value)
        self.out.append(text)
        if value >= LEASE or REVISION <= value < REVISION + 10**6:
            self.words.add(text)

    def frozen(self, thing: msgspec.Struct) -> None:
        """Remember the text: a frozen record says the same in every state, since no instant is ever in one (G10)."""
        known = _FROZEN.get(id(thing))
        if known is None or known[0] is not thing:
            out, words = self.out, self.words
            self.out, self.words = [], set()
            self.struct(thing)
            known = _FROZEN[id(thing)] = (thing, self.out, self.words)
            self.out, self.words = out, words
        self.out += known[1]
        self.words |= known[2]

    def suspended(self, thing: Any, code: types.CodeType, frame: types.FrameType | None, awaited: object) -> None:
        """A coroutine: where it stands, what it can still read, and what it awaits."""
        if self.is_met(thing):
            return
        self.out.append(code.co_name)
        if frame is not None:
            self.out.append(str(frame.f_lasti))
            variables, stack = readable(thing, code, frame)
            for name, value in variables.items():
                if name == "rings":  # A count of wake-ups: what matters is whether there were any since it was read.
                    self.out.append(str(variables["self"].bell.rings != value))
                elif name not in _SKIPPED_ATTRIBUTES and not (name == "since" and code.co_name == "wait"):
                    self.visit(value)
            self.items(stack)
        self.visit(awaited)

    def coroutine(self, thing: Any) -> None:
        self.suspended(thing, thing.cr_code, thing.cr_frame, thing.cr_await)

    def generator(self, thing: Any) -> None:
        self.suspended(thing, thing.gi_code, thing.gi_frame, thing.gi_yieldfrom)

    def async_generator(self, thing: Any) -> None:
        self.suspended(thing, thing.ag_code, thing.ag_frame, thing.ag_await)

    def iterator(self, thing: Any) -> None:
        """An iterator of Python's own: what it is over, and how far it is."""
        _, *what = thing.__reduce__()
        self.items(what)

    def task(self, thing: asyncio.Task[Any]) -> None:
        if not self.is_met(thing):
            self.outcome(thing)
            self.visit(thing.get_coro())

    def future(self, thing: asyncio.Future[Any]) -> None:
        if not self.is_met(thing):
            self.outcome(thing)

    def outcome(self, thing: asyncio.Future[Any]) -> None:
        self.out.append(getattr(thing, "_state", ""))
        if thing.done() and not thing.cancelled():
            self.visit(getattr(thing, "_exception", None))
            self.visit(getattr(thing, "_result", None))

    def function(self, thing: types.FunctionType) -> None:
        self.out.append(thing.__qualname__)
        for cell in thing.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:
                self.out.append("empty")

    def method(self, thing: types.MethodType) -> None:
        self.out.append(thing.__func__.__qualname__)
        self.visit(thing.__self__)

    def partial(self, thing: functools.partial[Any]) -> None:
        self.visit(thing.func)
        self.items(thing.args)


@functools.cache
def _slots(kind: type) -> list[str]:
    found = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
    return [name for name in found if name not in ("__weakref__", "__dict__", *_SKIPPED_ATTRIBUTES)]


@functools.cache
def _names(attributes: tuple[str, ...]) -> list[str]:
    return sorted(set(attributes) - _SKIPPED_ATTRIBUTES)


class _Visitors(dict[type, Callable[["Walk", Any], None]]):
    """The visitor for each type, found when the type is met first."""

    def __missing__(self, kind: type) -> Callable[[Walk, Any], None]:
        self[kind] = _visitor_for(kind)
        return self[kind]


_FROZEN: dict[int, tuple[object, list[str], set[str]]] = {}
VISITORS = _Visitors()


def _nothing(_walk: Walk, _thing: object) -> None:
    pass


def _plain(walk: Walk, thing: object) -> None:
    walk.out.append(repr(thing))


def _nil(walk: Walk, _thing: None) -> None:
    walk.out.append("-")


def _flag(walk: Walk, thing: bool) -> None:
    walk.out.append("yes" if thing else "no")


IGNORED: list[type] = [
    asyncio.AbstractEventLoop, random.Random, contextvars.Context, contextvars.ContextVar, types.ModuleType, itertools.count,
    logging.Logger,
]  # fmt: skip
"""Kinds that decide nothing that is not seen elsewhere. The explorer adds its own."""

_ITERATED: tuple[Iterable[object], ...] = ([], (), {}, {}.values(), {}.items(), set(), range(0))
_ITERATORS = tuple(type(iter(one)) for one in _ITERATED)
_BY_KIND: tuple[tuple[type | tuple[type, ...], Callable[[Walk, Any], None]], ...] = (
    (type(None), _nil),
    (bool, _flag),
    (int, Walk.whole),
    (str, Walk.text),
    (float, Walk.number),
    (enum.Enum, _plain),
    ((bytes, bytearray, memoryview), lambda walk, thing: walk.text(bytes(thing).decode("latin-1"))),
    ((list, tuple, deque), Walk.items),
    ((dict, types.MappingProxyType), Walk.mapping),
    ((set, frozenset), Walk.unordered),
    (asyncio.Task, Walk.task),
    (asyncio.Future, Walk.future),
    (types.CoroutineType, Walk.coroutine),
    (types.GeneratorType, Walk.generator),
    (types.AsyncGeneratorType, Walk.async_generator),
    ((*_ITERATORS, enumerate, zip, reversed), Walk.iterator),
    (types.FunctionType, Walk.function),
    (types.MethodType, Walk.method),
    (functools.partial, Walk.partial),
    (types.BuiltinFunctionType, lambda walk, thing: walk.out.append(thing.__name__)),
    (type, lambda walk, thing: walk.out.append(thing.__name__)),
    (BaseException, lambda walk, thing: walk.text(f"{type(thing).__name__} {thing}")),
)


def _visitor_for(kind: type) -> Callable[[Walk, Any], None]:
    if issubclass(kind, enum.Enum):
        return _plain
    if issubclass(kind, tuple(IGNORED)):
        return _nothing
    if issubclass(kind, msgspec.Struct):
        return Walk.frozen if kind.__struct_config__.frozen else Walk.mutable
    for kinds, visitor in _BY_KIND:
        if issubclass(kind, kinds):
            return visitor
    if inspect.isawaitable(kind) or kind.__name__ in ("FutureIter", "coroutine_wrapper"):
        return lambda walk, thing: walk.out.append(type(thing).__name__)
    return Walk.instance
