"""The secret that members and server share: where it comes from, and what may be done with it.

It is given by the setting `token`, by `token_file`, or by RDZV_TOKEN in the environment. What is said to one member counts
more than what its environment says; a `token` and a `token_file` that differ are refused, since nobody knows which is meant.
RDZV_TOKEN is taken out of the environment, so that workers do not inherit it, and is remembered for this process.

The secret itself leaves its object only as a proof: a keyed hash of two numbers that were never used before.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import MutableMapping

from ..errors import SettingsError

logger = logging.getLogger("rdzv.secret")

TOKEN_ENV = "RDZV_TOKEN"  # noqa: S105  The name of a variable.
SIZE_MAX = 4096
GUESSED_MAX = 16
"""Bytes: who records a handshake can try all secrets as short as this one, on its own machine and at its leisure."""

_put_aside: dict[str, Secret] = {}
_warned: set[str] = set()


class Secret:
    """Shown by nothing, and compared in constant time."""

    __slots__ = ("_key",)

    def __init__(self, key: str | bytes) -> None:
        """Without the newline that files and shells end with. ValueError: it is empty, or longer than anybody means."""
        data = (key.encode() if isinstance(key, str) else key).rstrip(b"\r\n")
        if not data or len(data) > SIZE_MAX:
            raise ValueError(f"it has {len(data)} bytes")
        self._key = data

    def prove(self, *words: bytes) -> bytes:
        """What only one who knows the secret can say of these words."""
        # Each with its length, so that no two lists of words are the same text.
        return hmac.digest(self._key, b"".join(len(word).to_bytes(4, "big") + word for word in words), "sha256")

    @property
    def can_be_guessed(self) -> bool:
        """It is so short that trying all of them is no work."""
        return len(self._key) < GUESSED_MAX

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret is not to be pickled: give the other process a token_file")


def put_aside(environ: MutableMapping[str, str]) -> None:
    """Take the secret out of the environment; `find` still knows it. The one seen last counts."""
    text = environ.pop(TOKEN_ENV, None)
    if text is None:
        return
    try:
        _put_aside[TOKEN_ENV] = Secret(os.fsencode(text))
    except ValueError as error:
        raise SettingsError(f"{TOKEN_ENV} cannot be a secret: {error}, it must have 1 to {SIZE_MAX}") from None


def find(token: Secret | None, token_file: str) -> Secret | None:
    """The secret of one member or server, by the order in the module's docstring; None: there is none."""
    from_file = _read_file(token_file) if token_file else None
    if token is not None and from_file is not None and token != from_file:
        raise SettingsError(f"token and token_file {token_file!r} are two different secrets: give one of them")
    secret = token or from_file or _put_aside.get(TOKEN_ENV)
    if secret is not None and secret.can_be_guessed:
        warn_once(f"the secret has fewer than {GUESSED_MAX} bytes and can be guessed: make one with `openssl rand -hex 32`")
    return secret


def _read_file(path: str) -> Secret:
    try:
        # Without waiting: a pipe that nobody writes to would keep us here for ever.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(number, "rb") as file:  # noqa: PTH123  A number, not a path.
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise SettingsError(f"token_file {path!r} is no ordinary file")
            warn_if_shown("token_file", path, number)
            data = file.read(SIZE_MAX + 3)  # With a line's end, and one more to see that it is too much.
    except OSError as error:
        raise SettingsError(f"token_file {path!r} cannot be read: {(error.strerror or str(error)).lower()}") from None
    try:
        return Secret(data)
    except ValueError:
        much = f"more than {SIZE_MAX} bytes" if len(data) > SIZE_MAX else "nothing"
        raise SettingsError(f"token_file {path!r} has {much} in it: it must hold a secret of 1 to {SIZE_MAX} bytes") from None


def warn_if_shown(setting: str, path: str, number: int | None = None) -> None:
    """What everybody on the machine can read is no secret."""
    if os.stat(path if number is None else number).st_mode & stat.S_IROTH:  # noqa: PTH116  Or a number.
        warn_once(f"{setting} {path!r} can be read by every user of this machine: take that right away (chmod o-r)")


def warn_once(text: str) -> None:
    """Once per process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
