"""Texts that others wrote, made fit for a terminal and a log. Every package may use it, and it needs none."""

from __future__ import annotations

SHOWN_MAX = 1000
"""Characters of a text that a stranger sent."""


def clean(text: str) -> str:
    """Replace all that is not printable by spaces: line breaks, NULs, terminal escapes, marks that reverse the text."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else " " for sign in text)


def shown(text: str, size_max: int = SHOWN_MAX) -> str:
    """Return the text clean, and cut to so many characters."""
    return clean(text if len(text) <= size_max else text[: size_max - 1] + "…")
