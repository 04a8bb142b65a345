"""Figures of processes, from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def starved_s(pid: int) -> float:
    """Return how long the main thread of a process could have run and had no CPU; 0 where the kernel does not count that."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def memory(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return the bytes of memory that the process has, or ever had (`VmHWM`)."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


def is_alive(pid: int) -> bool:
    """Whether the process has not ended. One that nobody has asked for has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
