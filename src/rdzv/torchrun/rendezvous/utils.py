"""Endpoints in torch's notation. The module has the name of torch's."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

__all__ = ["parse_rendezvous_endpoint"]

_HOST = re.compile(r"[\w.:-]+")
_PORT = re.compile(r"[0-9]{1,5}")


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Parse `host`, `host:port`, `[v6]:port`, a bare IPv6 address, or nothing (localhost). Raises ValueError."""
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    host, port = _split(text)
    if port is None:
        number = default_port
    elif _PORT.fullmatch(port) and int(port) < 65536:
        number = int(port)
    else:
        raise ValueError(f"endpoint {text!r}: its port must be a number from 0 to 65535, not {port!r}")
    if not _HOST.fullmatch(host):
        raise ValueError(f"endpoint {text!r}: {host!r} is not a host name or address; write 'host:port' or '[v6]:port'")
    return host, number


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, end, rest = text[1:].partition("]")
        if not end or (rest and not rest.startswith(":")):
            return text, None  # The caller refuses it: a host has no brackets.
        return host, rest[1:] if rest else None
    with suppress(ValueError):
        ipaddress.IPv6Address(text)
        return text, None
    host, mark, port = text.rpartition(":")
    return (host, port) if mark else (text, None)
