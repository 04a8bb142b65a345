"""Figures of processes, from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def memory(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return the bytes of memory that the process has, or ever had (`VmHWM`)."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def is_alive(pid: int) -> bool:
    """Whether the process has not ended. One that nobody has asked for has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
