"""Endpoints: the address of the engine that keeps a run, `scheme://host:port,host:port/path?name=value`.

    memory://  memory://name           inside this process; each name is an engine of its own
    host:port  host  [v6]:port         the embedded server, also written rdzv://host:port
    ''  rdzv://  localhost:0           the embedded server for one node, on any free port
    auto  '' with several nodes        the embedded server on the first node of the job (auto_endpoint.py)
    etcd://a,b:2379/prefix  etcds://   an etcd v3 cluster; etcds with TLS
    quorum://a,b,c:29400               an etcd cluster that the job runs by itself on three or five hosts
    c10d://host:port                   torch's TCPStore as a register
    file:///path                       a file that all members see, as a register

This module judges the text only. Names are resolved at every attempt to connect, since a name may not resolve yet.

Logs and process lists show endpoints, so no secret may be in one. The error for an endpoint with credentials does not
repeat it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from ..errors import SettingsError

PORT = 29400
PORT_ETCD = 2379
_ENDPOINT_MAX = 4096  # Characters: room for a hundred long host names.
_HOST_MAX = 253  # Longest DNS name.
_SHOWN_MAX = 120

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_DIGITS = re.compile(r"[0-9]{1,5}")
SECRET_NAME = re.compile(r"token|passw|secret|credential|auth|api_?key", re.IGNORECASE)

_SCHEMES = {
    "memory": (0, 0), "rdzv": (PORT, 1), "etcd": (PORT_ETCD, 100), "etcds": (PORT_ETCD, 100), "c10d": (PORT, 1),
    "file": (0, 0), "quorum": (PORT, 5),
}  # fmt: skip
"""Every scheme: its default port and the most hosts it may name."""
_ALSO_CALLED = {"http": "etcd", "https": "etcds", "etcd-v2": "etcd", "etcd-v3": "etcd", "tcp": "rdzv"}
"""Schemes of etcd's own tools and of torch."""


class Endpoint(msgspec.Struct, frozen=True):
    """The address of an engine. Make it with `parse`, which checks it; `str()` gives the canonical text."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    """Names or addresses (IPv6 without brackets) with ports, in the given order."""
    path: str = ""  # The engine's name (memory), the prefix of all keys (etcd), the absolute path (file); unquoted.
    query: tuple[tuple[str, str], ...] = ()  # Options for the scheme's driver, read by `options`.

    @staticmethod
    def parse(text: str) -> Endpoint:
        """Read an endpoint, or raise SettingsError with what is wrong with it."""
        text = text.strip()
        _refuse_secrets(text)
        try:
            return _read(text)
        except ValueError as error:
            raise SettingsError(f"endpoint {_show(text)}: {error}") from None

    @property
    def is_one_machine(self) -> bool:
        """Whether only this node can find the engine: an embedded server on an unannounced port."""
        return self.scheme == "rdzv" and not self.hosts

    @property
    def is_loopback(self) -> bool:
        """Whether all its hosts are loopback: members on two nodes would never meet."""
        return bool(self.hosts) and all(_is_loopback(host) for host, _ in self.hosts)

    def options(self, *known: str) -> dict[str, str]:
        """Return the query as a mapping; SettingsError if it has a name that the driver does not know."""
        for name, _ in self.query:
            if name not in known:
                raise SettingsError(f"endpoint {str(self)!r} has an unknown option {name!r}{_hint(name, known)}")
        return dict(self.query)

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        path = ("/" if self.hosts and self.path else "") + quote(self.path)
        query = "?" + urlencode(self.query) if self.query else ""
        return f"{self.scheme}://{hosts}{path}{query}"


def parse_host(text: str) -> str:
    """Return a host name or address in canonical form, IPv6 without brackets. ValueError says what is wrong with it."""
    if ":" in text or re.fullmatch(r"[0-9.]+", text):
        try:
            return str(ipaddress.ip_address(text))
        except ValueError:
            wanted = "not an IPv6 address" if ":" in text else "neither a host name nor an IPv4 address"
            raise ValueError(f"{_show(text)} is {wanted}") from None
    if not text:
        raise ValueError("it names no host")
    if not _HOST.fullmatch(text) or len(text) > _HOST_MAX:
        raise ValueError(f"{_show(text)} is not a host name (letters, digits, '.', '-' and '_', at most {_HOST_MAX})")
    return text.lower()


def parse_bind(text: str) -> tuple[str, int]:
    """Return host ('' for all interfaces) and port (0: any free one) of HOST:PORT. ValueError says what is wrong with it."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not _DIGITS.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{_show(text)} is not HOST:PORT")
    return ("" if host == "*" else parse_host(host[1:-1] if host.startswith("[") and host.endswith("]") else host)), int(port)


def _refuse_secrets(text: str) -> None:
    """Raise SettingsError for credentials. Must run first: the messages of all other checks repeat the text."""
    scheme, _, rest = text.rpartition("://") if text.count("://") == 1 else ("", "", text)
    is_path = scheme.lower() == "file" and rest.startswith("/")
    if "@" in text and not is_path:
        raise SettingsError(
            "endpoint has credentials in it (a part before '@'), which would end up in logs: "
            "leave them out and name a token_file or tls_cert instead"
        )
    for name in re.findall(r"[?&]([^=&]*)", text):
        if found := SECRET_NAME.search(unquote(name)):
            raise SettingsError(
                f"endpoint has a secret in its query ({found[0].lower()!r}), which would end up in logs: "
                "leave it out and name a token_file instead"
            )


def _read(text: str) -> Endpoint:
    """Read all parts. ValueError says what is wrong."""
    if len(text) > _ENDPOINT_MAX:
        raise ValueError(f"it has {len(text)} characters, at most {_ENDPOINT_MAX} are allowed")
    if not text.isprintable() or " " in text:
        raise ValueError("it has spaces or control characters in it; write them as %20 and the like")
    if "#" in text:
        raise ValueError("it has a '#' in it; write that as %23")
    name, mark, rest = text.partition("://")
    if not mark:
        if text in _SCHEMES and text != "rdzv":
            # More likely a forgotten "://" than a host of that name, which can be written rdzv://<name>.
            raise ValueError(f"did you mean '{text}://'?")
        name, rest = "rdzv", text
    scheme = _known_scheme(name)
    rest, _, query = rest.partition("?")
    options = _read_query(query)
    if scheme == "memory":
        engine = rest.rstrip("/")
        if engine and not _HOST.fullmatch(engine):
            allowed = "letters, digits, '.', '-' and '_'"
            raise ValueError(f"{_show(engine)} is not a name for an engine in memory ({allowed})")
        return Endpoint(scheme, path=engine, query=options)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError(f"a file is named by its whole path, as in 'file:///{rest or 'path'}'")
        path = _unquote(rest)
        if path.endswith("/"):
            raise ValueError("it names a directory; name a file in it")
        return Endpoint(scheme, path=path, query=options)
    where, _, path = rest.partition("/")
    path = _unquote(path).strip("/")
    if path and scheme not in {"etcd", "etcds"}:
        raise ValueError(f"an endpoint of scheme {scheme!r} has no path, this one has {_show(path)}")
    hosts = _read_hosts(scheme, where) if where else ()
    if scheme == "quorum":
        _check_quorum(hosts)
    if not hosts and scheme != "rdzv":
        raise ValueError(f"it names no host, as in '{scheme}://host:{_SCHEMES[scheme][0]}'")
    return Endpoint(scheme, hosts, path, options)


def _known_scheme(name: str) -> str:
    scheme = name.lower()
    if scheme in _SCHEMES:
        return scheme
    if not _SCHEME.fullmatch(name):
        raise ValueError(f"{_show(name)} is not a scheme; the schemes are {', '.join(_SCHEMES)}")
    if scheme in _ALSO_CALLED:
        raise ValueError(f"unknown scheme {name!r}: did you mean {_ALSO_CALLED[scheme]!r}?")
    raise ValueError(f"unknown scheme {name!r}{_hint(scheme, tuple(_SCHEMES))}")


def _read_hosts(scheme: str, text: str) -> tuple[tuple[str, int], ...]:
    hosts_max = _SCHEMES[scheme][1]
    parts = text.split(",")
    if len(parts) > hosts_max:
        raise ValueError(
            "several hosts are for etcd:// only, where they are one cluster; name the one that serves"
            if hosts_max == 1
            else f"it names {len(parts)} hosts, at most {hosts_max} are allowed"
        )
    hosts = [_read_host_port(scheme, part) for part in parts]
    if len(set(hosts)) < len(hosts):
        raise ValueError("it names one host twice")
    return tuple(hosts) if hosts[0][1] else ()  # Port 0 is `localhost:0`: no host at all.


def _check_quorum(hosts: tuple[tuple[str, int], ...]) -> None:
    """Refuse a list that cannot be a quorum. Each host has two ports: the one that is named, and the next one for its peers."""
    if len(hosts) not in (3, 5):
        raise ValueError(f"it names {len(hosts)} hosts, and a quorum has three (one of them may be lost) or five (two)")
    if len({_is_loopback(host) for host, _ in hosts}) > 1:
        raise ValueError("some of its hosts are loopback, which no other machine reaches: name real hosts")
    taken = [(host, port + more) for host, port in hosts for more in (0, 1)]
    if len(set(taken)) < len(taken) or max(port for _, port in taken) > 65535:
        raise ValueError("each host also needs the port after the one that is named")


def _read_host_port(scheme: str, text: str) -> tuple[str, int]:
    default = _SCHEMES[scheme][0]
    if text.startswith("["):
        address, end, port = text[1:].partition("]")
        if not end or ":" not in address or (port and not port.startswith(":")):
            raise ValueError(f"brackets are for an IPv6 address, as in '[::1]:{default}'")
        port = port[1:] if port else str(default)
    elif text.count(":") > 1:
        raise ValueError(f"write an IPv6 address in brackets, as in '[::1]:{default}'")
    else:
        address, mark, port = text.partition(":")
        port = port if mark else str(default)
    host = parse_host(address)
    if not _DIGITS.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"port {_show(port)} is not a number from 1 to 65535")
    if int(port) == 0 and not (scheme == "rdzv" and _is_loopback(host)):
        # torch's `localhost:0` is the one exception: it means "this node only", where any port will do.
        raise ValueError("port 0 means any port, which other machines cannot find; give one from 1 to 65535")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _unquote(text: str) -> str:
    try:
        plain = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ValueError(f"its path {_show(text)} is not UTF-8") from None
    if not plain.isprintable():
        raise ValueError(f"its path {_show(text)} has control characters in it")
    return plain


def _read_query(text: str) -> tuple[tuple[str, str], ...]:
    if not text:
        return ()
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError:
        raise ValueError(f"its query {_show(text)} is not of the form name=value&name=value") from None
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"its query gives {name!r} twice")
    return tuple(pairs)


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that a misspelt one is most like, or none."""
    import difflib  # noqa: PLC0415  Only who misspells a name waits for it.

    return difflib.get_close_matches(name, list(known), n=1)


def _hint(name: str, known: tuple[str, ...]) -> str:
    """Return the end of a message about an unknown name: the likely one, or all known ones."""
    close = similar(name, known)
    if close:
        return f": did you mean {close[0]!r}?"
    return f"; there is {', '.join(known)}" if known else "; there is none"


def _show(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "...")
