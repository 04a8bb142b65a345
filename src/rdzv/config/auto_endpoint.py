"""The endpoint `auto`: the node that serves, and the run's id, as the platform's variables tell them.

The same command line then works on every node of a job. All nodes of a job must come to the same answer, so only
variables count that have the same value on all of them. `choose` is pure: the environment in, the choice and its reason
out. `resolve` says when there is anything to choose.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

import msgspec

from ..errors import SettingsError
from .endpoint import PORT, Endpoint
from .nodelist import expand
from .settings import RUN_ID_MAX, UNNAMED

logger = logging.getLogger("rdzv.endpoint")

AUTO = "auto"
_SHOWN_MAX = 120
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
SLURM_PORTS = 1000
"""Jobs of Slurm may share a node, and each embedded server needs a port of its own. The job's id spreads them."""

RUN_ID_ENV = ("SLURM_JOB_ID", "TORCHX_JOB_ID", "SKYPILOT_TASK_ID")
"""Variables that name the job. A requeued job of Slurm keeps its id, which is right: its former life is closed, or its
members' leases have ended, and SLURM_RESTART_COUNT makes the next one a higher incarnation."""


class ServingNode(msgspec.Struct, frozen=True):
    """An endpoint and a run id, and the variables that they come from."""

    endpoint: Endpoint
    because: str
    run_id: str = ""  # Empty: no variable names the job.
    run_id_from: str = ""


def _host(value: str) -> str:
    return value.strip()


def _first_of_list(value: str) -> str:
    return next(expand(value))


def _first_word(value: str) -> str:
    return value.split(maxsplit=1)[0]


_SOURCES: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("PET_MASTER_ADDR", "PET_MASTER_PORT", _host),  # Kubeflow Trainer, and torchrun's own variables.
    ("MASTER_ADDR", "MASTER_PORT", _host),
    ("SLURM_STEP_NODELIST", "", _first_of_list),
    ("SLURM_JOB_NODELIST", "", _first_of_list),
    ("TORCHX_RANK0_HOST", "", _host),
    ("LWS_LEADER_ADDRESS", "", _host),  # LeaderWorkerSet of Kubernetes.
    ("SKYPILOT_NODE_IPS", "", _first_word),
)
"""Variables with the first node, the variable with its port, and how the host is found in the value. The first counts."""
HOST_ENV = tuple(name for name, _, _ in _SOURCES)


def choose(environ: Mapping[str, str]) -> ServingNode | None:
    """Return the endpoint that the environment tells; None: it tells none. Raises SettingsError for a wrong value."""
    loopback = None
    for name, port_name, host_in in _SOURCES:
        if not environ.get(name, "").strip():
            continue
        endpoint, because = _endpoint(environ, name, port_name, host_in)
        run_id_from = next((one for one in RUN_ID_ENV if environ.get(one, "").strip()), "")
        choice = ServingNode(endpoint, because, _run_id(environ.get(run_id_from, "")), run_id_from)
        if not endpoint.is_loopback:
            return choice
        # An image may set MASTER_ADDR=localhost for all. Every node would serve itself, so any other host is better.
        loopback = loopback or choice
    return loopback


def _run_id(value: str) -> str:
    """Return the job's name as one that can be part of a path: torchrun makes a directory of that name for its logs."""
    return _UNFIT.sub("-", value).strip("-")[:RUN_ID_MAX]


def _endpoint(environ: Mapping[str, str], name: str, port_name: str, host_in: Callable[[str], str]) -> tuple[Endpoint, str]:
    """Return the endpoint of one source, and the variables it is made of as text."""
    value, port = environ[name].strip(), environ.get(port_name, "").strip()
    because = f"{name} is {value if len(value) <= _SHOWN_MAX else value[:_SHOWN_MAX] + '...'!r}"
    if port:
        because += f" and {port_name} is {port!r}"
    elif name.startswith("SLURM_"):
        port = _slurm_port(environ)
    try:
        host = host_in(value)
        # An address of IPv6 needs brackets; whatever stands in them is checked with the rest.
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return Endpoint.parse(f"rdzv://{host}:{port or PORT}"), because
    except (SettingsError, ValueError) as error:
        problem = error.sentence if isinstance(error, SettingsError) else str(error)
        raise SettingsError(f"{because}, which names no host that serves: {problem}; give the endpoint instead") from None


def _slurm_port(environ: Mapping[str, str]) -> str:
    job = environ.get("SLURM_JOB_ID", "").strip()
    return str(PORT + int(job[-9:]) % SLURM_PORTS) if job.isdecimal() else ""


def resolve(
    endpoint: str | Endpoint, run_id: str, environ: Mapping[str, str], *, several: bool
) -> tuple[str | Endpoint, str]:
    """Return endpoint and run id; where the endpoint is `auto` or empty, those that the environment tells.

    `several`: more than one node may take part. An empty endpoint for one node stays what it is, a server on any free
    port, because nobody else must find it. Raises SettingsError if several nodes cannot know where to meet.
    """
    text = endpoint.strip() if isinstance(endpoint, str) else str(endpoint)
    if text not in ("", AUTO) or (not text and not several):
        return endpoint, run_id
    choice = choose(environ)
    if choice is None and not several:
        return "", run_id
    if choice is None:
        given = f"endpoint is {text!r}" if text else "no endpoint is given"
        raise SettingsError(
            f"{given}, and no variable names the first node (looked for {', '.join(HOST_ENV)}): "
            f"give the host that serves, as in 'host:{PORT}'"
        )
    if run_id in ("", UNNAMED):
        run_id = choice.run_id or UNNAMED
    named = f" (from {choice.run_id_from})" if choice.run_id and run_id == choice.run_id else ""
    logger.info("endpoint %s, because %s; run id %r%s", choice.endpoint, choice.because, run_id, named)
    return choice.endpoint, run_id
