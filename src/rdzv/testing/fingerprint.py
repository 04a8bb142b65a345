"""A fingerprint of everything that a simulated run can still depend on, so that equal states are recognised.

The walk follows every reference from the roots: objects, containers, closures, and the suspended frames of coroutines with
their local variables. Nothing has to be listed, so a new attribute of the product cannot be forgotten. Two kinds of
value differ between states that behave alike, and are put in a common form:

- An instant becomes its distance from the present, and everything longer ago than `AGE_MAX_S` is equally long ago. Clocks of
  explored nodes and servers start at round numbers far apart (`CLOCKS`), by which an instant is recognised.
- Random ids, leases, revisions and ports become their rank among those of their kind in this state. The order is kept,
  because the product compares revisions and sorts by id.
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
from typing import Any, Final

import msgspec

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
PORT: Final = 20_000
"""Ports of bootstrap addresses begin here and end below 30,000."""

_RENAMED = re.compile(r"(\be[0-9a-f]{15}\b|\b[1-9]\d{17,18}\b|\b7\d{6}\b|:2\d{4}\b)")
_SKIPPED_ATTRIBUTES = frozenset({
    "_nonce", "_asked", "rings", "number", "_log", "callbacks", "serial", "_endpoint", "progress", "_news", "_news_of",
    "_news_body", "_sizes", "bytes", "queue", "_began_at", "_trained_s",
})  # fmt: skip
"""Counters, caches and chance, which decide nothing, and queues that the world shows itself."""


class _Word(str):
    """An id, lease, revision or port. Its first character tells which."""

    __slots__ = ()


def fingerprint(roots: Iterable[object], clocks: Mapping[int, float]) -> bytes:
    """Return 8 bytes that are equal for states that behave alike. `clocks`: the present of each clock, by its number."""
    text = describe(roots, clocks).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()


def describe(roots: Iterable[object], clocks: Mapping[int, float]) -> str:
    """Return the state as text."""
    walk = Walk(clocks)
    for root in roots:
        walk.visit(root)
    words = sorted({part for part in walk.out if type(part) is _Word}, key=_order)
    kinds = itertools.groupby(words, key=lambda word: word[0])
    ranks = {word: f"{kind}{rank}" for kind, group in kinds for rank, word in enumerate(group)}
    return " ".join([ranks[part] if type(part) is _Word else part for part in walk.out])


def _order(word: str) -> tuple[str, int, str]:
    return word[0], len(word), word


@functools.lru_cache(maxsize=100_000)
def _parts(text: str) -> tuple[str, ...]:
    """Split a text into words that are renamed and what is between them."""
    return tuple(_Word(part) if _RENAMED.fullmatch(part) else part for part in _RENAMED.split(text) if part)


class Walk:
    """One walk. Objects are numbered as they are met, so that the text shows which references lead to the same one."""

    def __init__(self, clocks: Mapping[int, float]) -> None:
        self.out: list[str] = []
        self._clocks = clocks
        self._met: dict[int, int] = {}
        self._kept: list[object] = []

    def visit(self, thing: object) -> None:
        visitor = VISITORS.get(type(thing))
        if visitor is None:
            visitor = VISITORS[type(thing)] = _visitor_for(type(thing))
        visitor(self, thing)

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

    def number(self, value: float) -> None:
        if value >= CLOCK_STEP and value != float("inf"):
            clock = int(value // CLOCK_STEP)
            value = round(max(min(value - self._clocks.get(clock, 0.0), FAR_S), -AGE_MAX_S) / GRAIN_S)
        self.out.append(f"{value:.3f}")

    def items(self, things: Iterable[object]) -> None:
        self.out.append("[")
        for thing in things:
            self.visit(thing)
        self.out.append("]")

    def mapping(self, things: Mapping[Any, object]) -> None:
        self.out.append("{")
        for key, thing in things.items():
            self.visit(key)
            self.visit(thing)
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
        self.out.append(type(thing).__name__)
        for name in _slots(type(thing)):
            if name not in _SKIPPED_ATTRIBUTES and hasattr(thing, name):
                self.out.append(name)
                self.visit(getattr(thing, name))
        attributes = getattr(thing, "__dict__", None)
        if attributes is not None:
            for name in sorted(attributes):
                if name not in _SKIPPED_ATTRIBUTES:
                    self.out.append(name)
                    value = attributes[name]
                    is_numbered = name == "_waiters" and any(type(one) is int for one in value)
                    self.visit(list(value.values()) if is_numbered else value)  # The numbers of requests decide nothing.

    def struct(self, thing: msgspec.Struct) -> None:
        self.out.append(type(thing).__name__)
        for name in thing.__struct_fields__:
            if name not in _SKIPPED_ATTRIBUTES:
                self.visit(getattr(thing, name))

    def text(self, text: str) -> None:
        self.out += _parts(text)

    def whole(self, value: int) -> None:
        text = str(value)
        is_word = value >= 10**17 or REVISION <= value < REVISION + 10**6
        self.out.append(_Word(f"l{text}" if value >= 10**17 else text) if is_word else text)

    def frozen(self, thing: msgspec.Struct) -> None:
        """Remember the text: a frozen record says the same in every state, since no instant is ever in one (G10)."""
        known = _FROZEN.get(id(thing))
        if known is None or known[0] is not thing:
            start = len(self.out)
            self.struct(thing)
            known = _FROZEN[id(thing)] = (thing, self.out[start:])
            return
        self.out += known[1]

    def suspended(self, code: types.CodeType, frame: types.FrameType | None, awaited: object) -> None:
        """A coroutine: where it stands, its local variables, and what it awaits."""
        self.out.append(code.co_name)
        if frame is not None:
            self.out.append(str(frame.f_lasti))
            variables = frame.f_locals
            for name, value in variables.items():
                if name == "rings":  # A count of wake-ups: what matters is whether there were any since it was read.
                    self.out.append(str(variables["self"].bell.rings != value))
                elif name not in _SKIPPED_ATTRIBUTES and not (name == "since" and code.co_name == "wait"):
                    self.visit(value)
        self.visit(awaited)

    def coroutine(self, thing: Any) -> None:
        if not self.is_met(thing):
            self.suspended(thing.cr_code, thing.cr_frame, thing.cr_await)

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


def _slots(kind: type) -> list[str]:
    names = _SLOTS.get(kind)
    if names is None:
        found = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
        names = _SLOTS[kind] = [name for name in found if name not in ("__weakref__", "__dict__")]
    return names


_SLOTS: dict[type, list[str]] = {}
_FROZEN: dict[int, tuple[object, list[str]]] = {}
VISITORS: dict[type, Callable[[Walk, Any], None]] = {}


def _nothing(_walk: Walk, _thing: object) -> None:
    pass


def _plain(walk: Walk, thing: object) -> None:
    walk.out.append(repr(thing))


IGNORED: list[type] = [
    asyncio.AbstractEventLoop, random.Random, contextvars.Context, contextvars.ContextVar, types.ModuleType, itertools.count,
    logging.Logger,
]  # fmt: skip
"""Kinds that decide nothing that is not seen elsewhere. The explorer adds its own."""

_BY_KIND: tuple[tuple[type | tuple[type, ...], Callable[[Walk, Any], None]], ...] = (
    ((type(None), bool), _plain),
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
        return Walk.frozen if kind.__struct_config__.frozen else Walk.struct
    for kinds, visitor in _BY_KIND:
        if issubclass(kind, kinds):
            return visitor
    if inspect.isawaitable(kind) or kind.__name__ in ("FutureIter", "coroutine_wrapper"):
        return lambda walk, thing: walk.out.append(type(thing).__name__)
    return Walk.instance
