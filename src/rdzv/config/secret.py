"""The secret that members and server share: where it comes from, and how it is used.

The setting `token`, the setting `token_file`, or RDZV_TOKEN in the environment gives it. A setting beats the
environment. A `token` and a `token_file` that differ are refused, since it is unclear which one is meant. RDZV_TOKEN is
removed from the environment, so that workers do not inherit it, and is remembered for this process. So is the password
for etcd, RDZV_ETCD_PASSWORD.

The secret itself leaves its object only as a proof: a keyed hash of two fresh random numbers. A rogue server gets such a
proof, and can try secrets on it. So the hash's key is not the secret but is derived from it, at a price that an attacker
pays for every guess and a process once.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import stat
from collections.abc import MutableMapping
from contextlib import suppress
from functools import lru_cache

from ..errors import SettingsError

logger = logging.getLogger("rdzv.secret")

TOKEN_ENV = "RDZV_TOKEN"  # noqa: S105  The name of a variable.
SIZE_MAX = 4096
PASSWORD_ENV = "RDZV_ETCD_PASSWORD"  # noqa: S105  The name of a variable.
BITS_MIN = 60
"""A secret of fewer bits can be guessed. Sixteen random hexadecimal digits have 64, less a few that look regular."""
COST = {"n": 2**15, "r": 8, "p": 1}
"""Parameters of scrypt: 32 MiB and about a tenth of a second of one core per guess."""

_SALT = b"shared secret of rdzv, handshake 2"
"""The same for all: server and members have nothing else in common before the handshake."""
_WORD_BITS = 2.0  # Per letter. English has between 1 and 2 bits, and a random letter 4.7.

_put_aside: dict[str, Secret] = {}
_passwords: dict[str, str] = {}
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
        return hmac.digest(self._proof_key(), b"".join(len(word).to_bytes(4, "big") + word for word in words), "sha256")

    def derive(self) -> None:
        """Pay the price of the first proof now, rather than when a client or a server waits for it."""
        self._proof_key()

    def _proof_key(self) -> bytes:
        return _derived(self._key)

    @property
    def can_be_guessed(self) -> bool:
        return entropy_bits(self._key) < BITS_MIN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret is not to be pickled: give the other process a token_file")


@lru_cache(maxsize=16)
def _derived(key: bytes) -> bytes:
    """Return the key of the proofs."""
    try:
        return hashlib.scrypt(key, salt=_SALT, maxmem=2**26, dklen=32, **COST)
    except (AttributeError, ValueError) as error:
        raise SettingsError(f"a shared secret needs scrypt, which this Python's OpenSSL does not have: {error}") from None


def entropy_bits(key: bytes) -> float:
    """Estimate the bits of a key that an attacker cannot know. A guess: no program can tell chance from a good disguise.

    A character counts by the size of its own kind, and a letter of a word less. A character that goes on with a
    repetition (aaaa, abcabc) or a row (1234) counts nothing.
    """
    is_hex = re.fullmatch(rb"[0-9a-f]*[a-f][0-9a-f]*|[0-9A-F]*[A-F][0-9A-F]*", key) is not None
    # A key with spaces is a sentence; in others, only several letters in a row look like a word.
    words = rb"[A-Za-z ]+" if key.isascii() and b" " in key else rb"[a-z]{4,}|[A-Z]{4,}|[A-Z][a-z]{3,}"
    in_words = set() if is_hex else {at for word in re.finditer(words, key) for at in range(*word.span())}
    bits = 0.0
    seen: set[bytes] = set()
    for at, sign in enumerate(key):
        three = key[max(at - 2, 0) : at + 1]
        steps = {three[1] - three[0], three[2] - three[1]} if len(three) == 3 else set()
        is_row = len(steps) == 1 and steps <= {-1, 0, 1}
        if not (is_row or three in seen):
            bits += _WORD_BITS if at in in_words else 4.0 if is_hex else math.log2(_kind_size(sign))
        if len(three) == 3:
            seen.add(three)
    return bits


def _kind_size(sign: int) -> int:
    """Return how many characters there are of the kind of this one."""
    if sign > 127:
        return 128
    return 10 if chr(sign).isdigit() else 26 if chr(sign).isalpha() else 32


def password_put_aside() -> str:
    """Return the password for etcd that was in the environment, or an empty text."""
    return _passwords.get(PASSWORD_ENV, "")


def is_put_aside() -> bool:
    """Whether the environment had a secret."""
    return TOKEN_ENV in _put_aside


def put_aside(environ: MutableMapping[str, str]) -> None:
    """Move secret and password from the environment to this process's memory. The latest ones count."""
    password = environ.pop(PASSWORD_ENV, None)
    if password is not None:
        _passwords[PASSWORD_ENV] = password
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
    if secret is not None:
        if secret.can_be_guessed:
            warn_once(
                "the secret is short, or regular, or made of words, and can be guessed: "
                "make one with `openssl rand -hex 32`"
            )
        secret.derive()
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
    """Warn if every user of the node can read the file. If it has just gone, whoever reads it next says so."""
    with suppress(OSError):
        if not os.stat(path if number is None else number).st_mode & stat.S_IROTH:  # noqa: PTH116  Or a number.
            return
        warn_once(f"{setting} {path!r} can be read by every user of this machine: take that right away (chmod o-r)")


def warn_once(text: str) -> None:
    """Log a warning once per process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
