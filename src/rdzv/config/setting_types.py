"""The kinds of values a setting can have: what is allowed, and how a text becomes one.

A kind knows nothing of names or of other settings; `settings.py` puts the sentence together. Each takes the proper
Python value as well as what a command line or the environment can hold, which is text.
"""

from __future__ import annotations

import ipaddress
import math
import operator
import os
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec

from .endpoint import Endpoint, parse_host
from .secret import SIZE_MAX, Secret

TIME_MAX_S = 1e9
"""Thirty years: whoever means "for ever" is served, and every engine can still count it."""
INFO_MAX = 8 * 1024
"""Bytes of `info` as JSON: half of what a member's record may have."""
_LABEL_MAX = 256
_PATH_MAX = 4096
_PORT_MAX = 65535
_SHOWN_MAX = 60

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,15}\s*")
_RANGE = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")
_UNIT = re.compile(r"unit=([0-9]{1,9})")
_SWITCH = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)
"""All that torch takes for one, too."""


class Setting(msgspec.Struct, frozen=True):
    """What is known of one setting; its subclasses are the kinds. `read` raises ValueError or TypeError."""

    meaning: str
    """What it is for."""
    raised: str = ""
    """What gets worse if it is raised, or set; empty: nothing to weigh."""

    @property
    def allowed(self) -> str:
        """What a value may be, as the end of "it must be"."""
        raise NotImplementedError

    def read(self, value: Any) -> object:
        """The value in its proper type."""
        raise NotImplementedError

    def show(self, value: object) -> str:
        """The wrong value, as far as it should be repeated."""
        text = repr(value)
        return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


class Seconds(Setting, frozen=True, kw_only=True):
    """A duration."""

    zero: bool = False
    """0 has a meaning: do not wait at all."""

    @property
    def allowed(self) -> str:
        """Never endless: a wait that cannot end cannot be explained either."""
        return f"a number of seconds, {'0 or more' if self.zero else 'more than 0'} and at most {TIME_MAX_S:.0f}"

    def read(self, value: Any) -> float:
        """From any real number or a text of one."""
        if isinstance(value, str):
            if not _NUMBER.fullmatch(value):
                raise ValueError(value)
        elif isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(value)
        try:
            seconds = float(value)
        except OverflowError as error:
            raise ValueError(value) from error
        if not math.isfinite(seconds) or seconds < 0 or seconds > TIME_MAX_S or (seconds == 0 and not self.zero):
            raise ValueError(value)
        return abs(seconds)


class Whole(Setting, frozen=True, kw_only=True):
    """A count."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        """Both ends are allowed."""
        return f"a whole number from {self.low} to {self.high}"

    def read(self, value: Any) -> int:
        """From whatever Python counts with, or a text of it; 2.0 is a mistake and not a count."""
        if isinstance(value, str):
            if not _WHOLE.fullmatch(value):
                raise ValueError(value)
            value = int(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(value)
        count = operator.index(value)
        if not self.low <= count <= self.high:
            raise ValueError(value)
        return count


class Choice(Setting, frozen=True, kw_only=True):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """All of them."""
        return " or ".join(repr(word) for word in self.words)

    def read(self, value: Any) -> str:
        """The word itself."""
        if value not in self.words:
            raise ValueError(value)
        return str(value)


class Growth(Choice, frozen=True, kw_only=True):
    """A word, or unit=n."""

    @property
    def allowed(self) -> str:
        """Here n is a number the user puts in."""
        return ", ".join(repr(word) for word in self.words) + " or 'unit=n' with n of 1 or more"

    def read(self, value: Any) -> str:
        """Still as written; `make` takes the unit out of it."""
        match = _UNIT.fullmatch(value) if isinstance(value, str) else None
        if match and int(match[1]) > 0:
            return f"unit={int(match[1])}"
        return Choice.read(self, value)


class Switch(Setting, frozen=True):
    """Yes, no, or left to us."""

    @property
    def allowed(self) -> str:
        """None is for Python only."""
        return "true or false"

    def read(self, value: Any) -> bool | None:
        """From a bool or one of the usual texts."""
        if value is None or isinstance(value, bool):
            return value
        if not isinstance(value, str) or value.strip().lower() not in _SWITCH:
            raise ValueError(value)
        return _SWITCH[value.strip().lower()]


class Text(Setting, frozen=True, kw_only=True):
    """A name that will be shown in logs, so it stays on one line."""

    size_max: int = _LABEL_MAX
    empty: bool = True
    or_number: bool = False

    @property
    def allowed(self) -> str:
        """Counted in characters."""
        return f"text of {'at most' if self.empty else '1 to'} {self.size_max} characters on one line"

    def read(self, value: Any) -> str:
        """Without the space around it."""
        if self.or_number and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise TypeError(value)
        text = value.strip()
        # Printable also keeps out what has no bytes in UTF-8 (lone surrogates).
        if not text.isprintable() or len(text) > self.size_max or not (text or self.empty):
            raise ValueError(value)
        return text


class File(Setting, frozen=True):
    """The path of a file. It is opened by whoever needs it, when needed: it may be mounted late, or renewed."""

    @property
    def allowed(self) -> str:
        """Text or a path object."""
        return "the path of a file"

    def read(self, value: Any) -> str:
        """As text."""
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str) or not path.isprintable() or len(path) > _PATH_MAX:
            raise ValueError(path)
        return path

    def show(self, value: object) -> str:
        """Not the value: what is not a path is likely to be the secret itself."""
        return f"not a path (a value of type {type(value).__name__})"


class Hidden(Setting, frozen=True):
    """A secret: never shown, not even where it is wrong."""

    @property
    def allowed(self) -> str:
        """Counted in bytes."""
        return f"text of 1 to {SIZE_MAX} bytes"

    def read(self, value: Any) -> Secret | None:
        """None is for Python only."""
        if value is None or isinstance(value, Secret):
            return value
        if not isinstance(value, str):
            raise TypeError(value)
        return Secret(value)

    def show(self, value: object) -> str:
        """Not the value."""
        return f"not a secret (a value of type {type(value).__name__})"


class Ports(Setting, frozen=True):
    """One port, or the lowest and highest of a range."""

    @property
    def allowed(self) -> str:
        """0 alone stands for any."""
        return f"a port from 1 to {_PORT_MAX}, a range such as '29500-29600', or 0 for any free port"

    def read(self, value: Any) -> tuple[int, int]:
        """As (lowest, highest)."""
        if isinstance(value, (tuple, list)):
            value = "-".join(str(port) for port in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(value)
        low = int(match[1])
        high = low if match[2] is None else int(match[2])
        if low > high or high > _PORT_MAX or (low == 0 and high > 0):
            raise ValueError(value)
        return low, high


class Address(Setting, frozen=True):
    """How others reach this machine."""

    @property
    def allowed(self) -> str:
        """Only what means the same on every machine."""
        return "a host name or an IP address that others can reach (not link-local, 0.0.0.0 or ::)"

    def read(self, value: Any) -> str:
        """In canonical form, IPv6 without brackets."""
        if not isinstance(value, str):
            raise TypeError(value)
        text = value.strip()
        if not text:
            return ""
        host = parse_host(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host
        if address.is_link_local or address.is_unspecified or address.is_multicast:
            raise ValueError(host)
        return host


class Info(Setting, frozen=True):
    """Whatever the user wants all members to know of each."""

    @property
    def allowed(self) -> str:
        """The limit is on what travels."""
        return f"a dict of str to str of at most {INFO_MAX} bytes as JSON"

    def read(self, value: Any) -> dict[str, str]:
        """A copy: the caller may go on changing its own."""
        if not isinstance(value, Mapping):
            raise TypeError(value)
        for text in (*value.keys(), *value.values()):
            if not isinstance(text, str):
                raise TypeError(text)
        info = dict(value)
        if len(msgspec.json.encode(info)) > INFO_MAX:
            raise ValueError(value)
        return info


class Place(Setting, frozen=True):
    """An endpoint; see `endpoint.py`."""

    @property
    def allowed(self) -> str:
        """Only for a value that is no text; a wrong text gets a sentence of its own."""
        return "text such as 'host:29400', 'etcd://host:2379' or 'memory://'"

    def read(self, value: Any) -> Endpoint:
        """Parsed."""
        if isinstance(value, Endpoint):
            return value
        if not isinstance(value, str):
            raise TypeError(value)
        return Endpoint.parse(value)
