"""Figures of processes, from /proc."""

from __future__ import annotations

from pathlib import Path


def memory(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Return the bytes of memory that the process has, or ever had (`VmHWM`)."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024
