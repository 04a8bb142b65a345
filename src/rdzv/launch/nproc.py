"""The number of workers per node: a number, or a word that stands for the CPUs or GPUs of this node.

`count` and `visible` are pure. GPUs are counted without a driver's library, so that a launcher needs neither torch nor
JAX.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..errors import SettingsError

NPROC_MAX = 1024
VISIBLE_ENV = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that name the GPUs which a program may use, as NVIDIA's and AMD's drivers read them. The first one counts."""
_NVIDIA_FILE = re.compile(r"nvidia[0-9]+")
_AMD_NODES = "sys/class/kfd/kfd/topology/nodes"


class Devices(msgspec.Struct, frozen=True):
    """The CPUs and GPUs that this process may use, and where the number of GPUs comes from."""

    cpus: int
    gpus: int
    gpus_from: str

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Devices:
        """Look at this machine. In a container, NVIDIA's files are there only for the GPUs that it was given."""
        usable = getattr(os, "sched_getaffinity", None)  # Not on every system.
        cpus = len(usable(0)) if usable is not None else os.cpu_count() or 1
        given = visible(environ)
        if given is not None:
            return cls(cpus, *given)
        nvidia = sum(_NVIDIA_FILE.fullmatch(file.name) is not None for file in (root / "dev").glob("nvidia*"))
        if nvidia:
            return cls(cpus, nvidia, "/dev/nvidia*")
        amd = sum(_computes(file) for file in (root / _AMD_NODES).glob("*/properties"))
        if amd:
            return cls(cpus, amd, f"/{_AMD_NODES}")
        return cls(cpus, 0, f"{', '.join(VISIBLE_ENV)}, /dev/nvidia* and /{_AMD_NODES}")


def visible(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the number of GPUs that a variable names, and the variable; None: no variable does."""
    for name in VISIBLE_ENV:
        if name in environ:
            ids = [one.strip() for one in environ[name].split(",")]
            # The drivers stop at the first id that is none: `-1` and the empty text mean no GPU at all.
            return _before(ids, {"", "-1"}), name
    return None


def _before(ids: Iterable[str], ends: set[str]) -> int:
    count = 0
    for one in ids:
        if one in ends:
            break
        count += 1
    return count


def _computes(properties: Path) -> bool:
    """Whether a node of AMD's topology is a GPU. The CPUs are nodes too, without compute units."""
    try:
        found = re.search(r"^simd_count ([0-9]+)$", properties.read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found[1]) > 0


def count(text: str, devices: Devices) -> int:
    """Return the number of workers that `--nproc-per-node` asks for. Raises SettingsError."""
    word = text.strip().lower()
    if word == "cpu" or (word == "auto" and not devices.gpus):
        return devices.cpus
    if word in ("gpu", "auto"):
        if not devices.gpus:
            raise SettingsError(
                f"--nproc-per-node is {text!r}, and this node shows no GPU (looked at {devices.gpus_from}): "
                "give a number, or cpu"
            )
        return devices.gpus
    if re.fullmatch(r"[0-9]{1,9}", word) and 1 <= int(word) <= NPROC_MAX:
        return int(word)
    raise SettingsError(f"--nproc-per-node is {text!r}: it must be a number from 1 to {NPROC_MAX}, or auto, gpu or cpu")
