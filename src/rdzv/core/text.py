"""Texts that people and programs send, made fit for a record: one line, and of bounded size however it is encoded."""

from __future__ import annotations

import msgspec

NAME_MAX = 128
REASON_MAX = 1000
"""Bytes. A head holds one reason and up to CAUSE_MEMBERS_MAX names, a journal entry two reasons and three times as many names:
both stay in their limits."""


def clip(text: str, size_max: int = REASON_MAX) -> str:
    """The text without line breaks and the like, cut so that it takes at most `size_max` bytes in a record.

    A record that is too large to be written would stop the leader that must write it, and then the next one: so whatever
    comes from outside is cut when it comes in.
    """
    clean = text[: 2 * size_max]
    if not clean.isprintable():
        clean = "".join(sign if sign.isprintable() else " " for sign in clean)
    cut = clean
    while len(msgspec.json.encode(cut)) - 2 > size_max - 3 * (len(cut) < len(clean)):
        cut = cut[: min(size_max, len(cut) * 9 // 10)]
    return cut if len(cut) == len(clean) and len(text) == len(clean) else cut + "…"
