"""The secret that members and server share: where it comes from, and how it is used.

The setting `token`, the setting `token_file`, or RDZV_TOKEN in the environment gives it. A setting beats the
environment. A `token` and a `token_file` that differ are refused, since it is unclear which one is meant. RDZV_TOKEN is
removed from the environment, so that workers do not inherit it, and is remembered for this process.

The secret itself leaves its object only as a proof: a keyed hash of two fresh random numbers.
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
GUESSED_MAX = 16  # Bytes. A recorded handshake lets an attacker try all shorter secrets offline.

_put_aside: dict[str, Secret] = {}
_warned: set[str] = set()


class Secret:
    """A key that no text shows. Comparison takes constant time."""

    __slots__ = ("_key",)

    def __init__(self, key: str | bytes) -> None:
        """Take the key without the newline at its end, if any. Raises ValueError for an empty or very long one."""
        data = (key.encode() if isinstance(key, str) else key).rstrip(b"\r\n")
        if not data or len(data) > SIZE_MAX:
            raise ValueError(f"it has {len(data)} bytes")
        self._key = data

    def prove(self, *words: bytes) -> bytes:
        """Return a hash of the words that only a holder of the secret can compute."""
        # Each word is preceded by its length, so that no two lists of words are hashed as the same bytes.
        return hmac.digest(self._key, b"".join(len(word).to_bytes(4, "big") + word for word in words), "sha256")

    @property
    def can_be_guessed(self) -> bool:
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
    """Move the secret from the environment to this process's memory, for `find`. The latest one counts."""
    text = environ.pop(TOKEN_ENV, None)
    if text is None:
        return
    try:
        _put_aside[TOKEN_ENV] = Secret(os.fsencode(text))
    except ValueError as error:
        raise SettingsError(f"{TOKEN_ENV} cannot be a secret: {error}, it must have 1 to {SIZE_MAX}") from None


def find(token: Secret | None, token_file: str) -> Secret | None:
    """Return the secret of one member or server, or None, by the precedence in the module's docstring."""
    from_file = _read_file(token_file) if token_file else None
    if token is not None and from_file is not None and token != from_file:
        raise SettingsError(f"token and token_file {token_file!r} are two different secrets: give one of them")
    secret = token or from_file or _put_aside.get(TOKEN_ENV)
    if secret is not None and secret.can_be_guessed:
        warn_once(f"the secret has fewer than {GUESSED_MAX} bytes and can be guessed: make one with `openssl rand -hex 32`")
    return secret


def _read_file(path: str) -> Secret:
    try:
        # Non-blocking: opening a pipe without a writer would never return.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(number, "rb") as file:  # noqa: PTH123  A descriptor, not a path.
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise SettingsError(f"token_file {path!r} is no ordinary file")
            warn_if_shown("token_file", path, number)
            data = file.read(SIZE_MAX + 3)  # Room for a line's end, and one byte more to notice a longer file.
    except OSError as error:
        raise SettingsError(f"token_file {path!r} cannot be read: {(error.strerror or str(error)).lower()}") from None
    try:
        return Secret(data)
    except ValueError:
        much = f"more than {SIZE_MAX} bytes" if len(data) > SIZE_MAX else "nothing"
        raise SettingsError(f"token_file {path!r} has {much} in it: it must hold a secret of 1 to {SIZE_MAX} bytes") from None


def warn_if_shown(setting: str, path: str, number: int | None = None) -> None:
    """Warn if every user of the node can read the file."""
    if os.stat(path if number is None else number).st_mode & stat.S_IROTH:  # noqa: PTH116  Or a number.
        warn_once(f"{setting} {path!r} can be read by every user of this machine: take that right away (chmod o-r)")


def warn_once(text: str) -> None:
    """Log a warning once per process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
