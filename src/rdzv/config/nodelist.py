"""Slurm's lists of nodes, such as `n[0-3,7],login1`. Containers have no scontrol that could expand them."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MARK = re.compile(r"[][,]")
_BRACKETS = re.compile(r"([^][]*)\[([^][]*)\](.*)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(nodelist: str) -> Iterator[str]:
    """Yield the names in Slurm's order, one at a time, since a list may stand for very many.

    ValueError says what is wrong with the list. It is raised when the wrong part is reached.
    """
    begin, inside = 0, False
    for mark in _MARK.finditer(nodelist):
        if mark[0] != ",":
            inside = mark[0] == "["
        elif not inside:
            yield from _names(nodelist[begin : mark.start()].strip())
            begin = mark.end()
    yield from _names(nodelist[begin:].strip())


def _names(part: str) -> Iterator[str]:
    """Yield the names of one part. The first brackets change slowest."""
    if not part:
        raise ValueError("a name is empty")
    found = _BRACKETS.fullmatch(part)
    if found is None:
        if "[" in part or "]" in part:
            raise ValueError(f"the brackets of {part!r} do not match")
        yield part
        return
    before, inside, after = found.groups()
    for text in inside.split(","):
        for number in _numbers(text.strip()):
            if after:
                yield from (f"{before}{number}{rest}" for rest in _names(after))
            else:
                yield f"{before}{number}"


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of `7` or `08-11`, as wide as the first one is written."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is neither a number nor a range such as 0-3")
    low, high = found[1], found[2] or found[1]
    if int(low) > int(high):
        raise ValueError(f"the range {text!r} ends before it begins")
    yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
