"""Make texts from outside fit to be shown and stored: one line, printable, of bounded encoded size."""

from __future__ import annotations

import msgspec

from ..printable import clean

NAME_MAX = 128
REASON_MAX = 1000
"""Bytes of a reason. A head holds one reason and CAUSE_MEMBERS_MAX names, a journal entry two reasons and three times
as many names. With these bounds both stay below their limits in wire.py."""


def clip(text: str, size_max: int = REASON_MAX) -> str:
    """Clean the text, and cut it to at most `size_max` bytes of JSON."""
    if 4 * len(text) <= size_max and text.isprintable():
        return text  # No printable character takes more than four bytes.
    # A record that is too large to write would stop the leader that must write it, and then each of its successors. So
    # texts are cut when they come in.
    #
    # One character takes at least one byte, so a longer text is cut anyway; this bounds the work.
    cut = plain = clean(text[: 2 * size_max])
    # Escapes and multi-byte characters make the encoded size hard to predict, so cut and measure. The ellipsis takes
    # three bytes.
    while len(msgspec.json.encode(cut)) - 2 > size_max - 3 * (len(cut) < len(plain)):
        cut = cut[: min(size_max, len(cut) * 9 // 10)]
    return cut if len(cut) == len(plain) == len(text) else cut + "…"
