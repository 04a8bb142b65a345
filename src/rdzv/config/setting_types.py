"""The types of settings: which values are allowed, how a text is read, and how a wrong value is shown.

Each name in lower case at the end makes a `Setting` of one type. A type knows neither names nor other settings;
`settings.py` writes the error message. A reader takes the proper Python value as well as text, since the command line
and the environment hold nothing else. It raises ValueError or TypeError.
"""

from __future__ import annotations

import ipaddress
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import msgspec

from ..core.duration import read_duration
from ..core.model import QuarantineLimit
from ..core.quarantine import QUARANTINE_MAX_S, STRIKES_MAX
from ..core.topology import PARTS_MAX
from .endpoint import Endpoint, parse_bind, parse_host
from .secret import SIZE_MAX, Secret

TIME_MAX_S = 1e9  # Thirty years stand for "for ever". Infinity is refused: not every engine can count it.
INFO_MAX = 8 * 1024  # Bytes of `info` as JSON: half of what a member's record may have.
INFOS_MAX = 8 * 1024 * 1024
"""Bytes of the `info` of `max_nodes` nodes: half of what one answer of the embedded server may have.

A new leader lists the run in one answer. The other half is for all else in the records, and for spares. etcd answers with more,
and a register refuses members that it has no room for; the bound is the same for all, so that a job can change its engine.
"""
_PORT_MAX = 65535
_SHOWN_MAX = 60

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,15}\s*")
_RANGE = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")
_UNIT = re.compile(r"unit=([0-9]{1,9})")
_SWITCH = dict.fromkeys(("true", "t", "yes", "y", "1"), True) | dict.fromkeys(("false", "f", "no", "n", "0"), False)
"""The texts that torch takes for true and false."""


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


class Setting(msgspec.Struct, frozen=True):
    """One setting: its help texts and its type."""

    meaning: str
    raised: str = ""  # The cost of raising, or setting, it; empty: none worth naming.
    allowed: str = ""  # The end of the sentence "it must be ...".
    read: Callable[[Any], object] = str  # Returns the value in its proper type.
    show: Callable[[object], str] = _show  # Returns a wrong value as the error message repeats it.
    words: tuple[str, ...] = ()  # The words to choose from, if the type has any: a misspelt one gets a hint.


def _check(holds: object) -> None:
    if not holds:
        raise ValueError


def seconds(meaning: str, raised: str = "", *, zero: bool = False) -> Setting:
    """Make a duration. `zero`: 0 is allowed and means not to wait at all."""

    def read(value: Any) -> float:
        if isinstance(value, str):
            _check(_NUMBER.fullmatch(value))
            value = float(value)
        _check(isinstance(value, Real) and not isinstance(value, bool))
        # Compared before it is converted: a huge int has no float. NaN fails every comparison. abs: -0.0 becomes 0.0.
        _check(0 <= value <= TIME_MAX_S and (value or zero))
        return abs(float(value))

    allowed = f"a number of seconds, {'0 or more' if zero else 'more than 0'} and at most {TIME_MAX_S:.0f}"
    return Setting(meaning, raised, allowed, read)


def whole(meaning: str, raised: str = "", *, low: int, high: int) -> Setting:
    """Make a count, both ends included."""

    def read(value: Any) -> int:
        if isinstance(value, str):
            _check(_WHOLE.fullmatch(value))
            value = int(value)
        _check(hasattr(value, "__index__") and not isinstance(value, bool))  # 2.0 is a mistake, not a count.
        count = operator.index(value)
        _check(low <= count <= high)
        return count

    return Setting(meaning, raised, f"a whole number from {low} to {high}", read)


def choice(meaning: str, raised: str = "", *, words: tuple[str, ...], or_unit: bool = False) -> Setting:
    """Make a choice of words. `or_unit`: or of `unit=n`, which `Settings.make` splits into two settings."""

    def read(value: Any) -> str:
        match = _UNIT.fullmatch(value) if or_unit and isinstance(value, str) else None
        if match and int(match[1]) > 0:
            return f"unit={int(match[1])}"
        _check(value in words)
        return str(value)

    allowed = (", " if or_unit else " or ").join(map(repr, words))
    if or_unit:
        allowed += " or 'unit=n' with n of 1 or more"
    return Setting(meaning, raised, allowed, read, words=words)


def text(meaning: str, raised: str = "", *, size_max: int = 256, empty: bool = True, or_number: bool = False) -> Setting:
    """Make a name. Logs show it, so it stays on one line."""

    def read(value: Any) -> str:
        if or_number and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        _check(isinstance(value, str))
        name: str = value.strip()
        # Printable also excludes lone surrogates, which have no bytes in UTF-8.
        _check(name.isprintable() and len(name) <= size_max and (name or empty))
        return name

    allowed = f"text of {'at most' if empty else '1 to'} {size_max} characters on one line"
    return Setting(meaning, raised, allowed, read)


def command(meaning: str, raised: str = "", *, size_max: int) -> Setting:
    """Make a command line, which is split into words as a shell does."""
    line = text(meaning, raised, size_max=size_max)

    def read(value: Any) -> object:
        read = line.read(value)
        shlex.split(str(read))  # ValueError: a quotation mark is missing.
        return read

    return Setting(meaning, raised, f"a command, {line.allowed}", read)


def _read_switch(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    _check(isinstance(value, str) and value.strip().lower() in _SWITCH)
    return _SWITCH[value.strip().lower()]


def _read_path(value: Any) -> str:
    # The file is opened when it is needed: it may be mounted late, or renewed.
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    _check(isinstance(path, str) and path.isprintable() and len(path) <= 4096)
    return str(path)


def _read_folder(value: Any) -> str:
    # torchrun refuses an empty value in --rdzv-conf, so there is a word for it.
    path = _read_path(value)
    try:
        Path(path).expanduser()
    except RuntimeError:  # No user has that name, or this one has no home.
        raise ValueError from None
    return "" if path.strip() == "off" else path


def _read_secret(value: Any) -> Secret | None:
    if value is None or isinstance(value, Secret):
        return value
    _check(isinstance(value, str))
    return Secret(value)


def _read_ports(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        value = "-".join(str(port) for port in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    low = int(match[1])
    high = low if match[2] is None else int(match[2])
    _check(low <= high <= _PORT_MAX and (low > 0 or high == 0))
    return low, high


def _read_address(value: Any) -> str:
    """Return the address in canonical form, IPv6 without brackets."""
    _check(isinstance(value, str))
    name = value.strip()
    if not name:
        return ""
    host = parse_host(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    _check(not (address.is_link_local or address.is_unspecified or address.is_multicast))
    return host


def _read_bind(value: Any) -> str:
    _check(isinstance(value, str))
    if value.strip():
        parse_bind(value)
    return str(value.strip())


def _read_mapping(value: Any) -> dict[str, str]:
    _check(isinstance(value, Mapping))
    info = dict(value)  # A copy: the caller may change its own later.
    _check(all(isinstance(one, str) for one in (*info.keys(), *info.values())))
    _check(info_size(info) <= INFO_MAX)
    return info


def info_size(info: Mapping[str, str]) -> int:
    """Return the bytes of `info` as JSON, as it is in a member's record."""
    return len(msgspec.json.encode(info))


def _read_endpoint(value: Any) -> Endpoint:
    if isinstance(value, Endpoint):
        return value
    _check(isinstance(value, str))
    return Endpoint.parse(value)


def _read_way(value: Any) -> str:
    """Return a path in the network without empty parts."""
    _check(isinstance(value, str) and value.isprintable())
    parts = [part.strip() for part in value.split("/") if part.strip()]
    path = "/".join(parts)
    _check(len(parts) < PARTS_MAX and len(path) <= 256)
    return path


def _read_limit(value: Any) -> QuarantineLimit | None:
    """Return the limit in a text such as 3/1h or 3/1h/10m."""
    if value is None or isinstance(value, QuarantineLimit):
        return value
    _check(isinstance(value, str))
    if value.strip() in ("", "off"):
        return None
    strikes, within, *rest = value.strip().split("/")
    _check(_WHOLE.fullmatch(strikes) and 1 <= int(strikes) <= STRIKES_MAX and len(rest) <= 1)
    limit = QuarantineLimit(int(strikes), read_duration(within), *map(read_duration, rest))
    _check(1.0 <= limit.within_s <= QUARANTINE_MAX_S and 1.0 <= limit.for_s <= QUARANTINE_MAX_S)
    return limit


def _hide(kind: str, value: object) -> str:
    # A value of a wrong type given for a secret or its file is likely to be the secret itself.
    return f"not a {kind} (a value of type {type(value).__name__})"


# None, where a reader takes it, means "unset" and comes from Python only.
switch = partial(Setting, allowed="true or false", read=_read_switch)
file = partial(Setting, allowed="the path of a file", read=_read_path, show=partial(_hide, "path"))
folder = partial(Setting, allowed="the path of a folder, or 'off' (or empty) for none", read=_read_folder)
secret = partial(Setting, allowed=f"text of 1 to {SIZE_MAX} bytes", read=_read_secret, show=partial(_hide, "secret"))
ports = partial(Setting, read=_read_ports,
    allowed=f"a port from 1 to {_PORT_MAX}, a range such as '29500-29600', or 0 for any free port")  # fmt: skip
address = partial(Setting, read=_read_address,
    allowed="a host name or an IP address that others can reach (not link-local, 0.0.0.0 or ::)")  # fmt: skip
mapping = partial(Setting, allowed=f"a dict of str to str of at most {INFO_MAX} bytes as JSON", read=_read_mapping)
way = partial(Setting, read=_read_way,
    allowed=f"a path of less than {PARTS_MAX} parts such as 'block/rack', at most 256 characters on one line")  # fmt: skip
bind = partial(Setting, allowed="HOST:PORT such as '127.0.0.1:29480', or '*:29480' for all interfaces", read=_read_bind)
limit = partial(Setting, read=_read_limit,
    allowed=f"ROUNDS/TIME such as '3/1h', or ROUNDS/TIME/LENGTH such as '3/1h/10m', with at most {STRIKES_MAX} rounds and "
    "times from 1s to 1d, or 'off' (or empty) for none")  # fmt: skip
location = partial(Setting, allowed="text such as 'host:29400', 'etcd://host:2379', 'memory://' or 'auto'", read=_read_endpoint)
