"""Checks of the arguments of the public API's calls. Settings have their own checks (`settings.py`).

Python would take many a wrong type for something else: `bytes(5)` is five zero bytes, and the letters of a text are
texts. Each function returns the value in its proper type, or raises WrongArgument, which names call and argument.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from ..errors import WrongArgument

_SHOWN_MAX = 60


def refused(call: str, name: str, value: object, wanted: str) -> WrongArgument:
    """Return the error for a wrong value."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_MAX else shown[:_SHOWN_MAX] + "..."
    return WrongArgument(call, f"{name} is {shown}, of type {type(value).__name__}: it must be {wanted}")


def seconds(call: str, value: Any, name: str = "timeout_s") -> float:
    """Check a duration. A text is refused, and so is NaN, since no comparison with it ever holds."""
    if not isinstance(value, (float, int, Real)) or isinstance(value, bool) or math.isnan(value):
        raise refused(call, name, value, "a number of seconds")
    return float(value)


def seconds_or_none(call: str, value: Any, name: str = "timeout_s") -> float | None:
    return None if value is None else seconds(call, value, name)


def text(call: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(call, name, value, "text")
    return value


def flag(call: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(call, name, value, "True or False")
    return value


def function(call: str, name: str, value: Any) -> None:
    """Check an optional function."""
    if value is not None and not callable(value):
        raise refused(call, name, value, "a function")


def whole(call: str, name: str, value: Any) -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise refused(call, name, value, "a whole number")
    return operator.index(value)


def data(call: str, key: str, value: Any) -> bytes:
    """Return a value of the store as bytes; text becomes UTF-8."""
    if isinstance(value, str):
        return value.encode()
    try:
        return value if isinstance(value, bytes) else bytes(memoryview(value))
    except TypeError:
        raise refused(call, f"the value of {key[:40]!r}", value, "bytes or text") from None


def keys(call: str, value: Any) -> list[str]:
    """Return the keys as a list. A single text is refused: its letters would be taken for keys."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise refused(call, "keys", value, "a list of keys, such as ['a', 'b']")
    return [text(call, "a key", key) for key in value]


def pairs(call: str, value: Any) -> dict[str, bytes]:
    """Return keys and values to write."""
    if not isinstance(value, Mapping):
        raise refused(call, "values", value, "a dict of keys and values")
    return {text(call, "a key", key): data(call, key, one) for key, one in value.items()}
