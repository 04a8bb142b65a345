"""What torchrun hands over, as our settings: the endpoint, the run id, and `--rdzv-conf` with torch's keys and ours.

Values are checked in `settings.py`, like everybody's. Here is only what torch's own keys mean, and what must not be given this
way at all.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..config.endpoint import Endpoint
from ..config.setting_types import Setting, choice, seconds, whole
from ..config.settings import TABLE, UNNAMED
from ..errors import SettingsError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

KEEP_ALIVE_INTERVAL_S = 5.0
KEEP_ALIVE_MAX_ATTEMPT = 3
"""torch's defaults, for who gives only one of the two."""

SAME = {
    "rank": "order",
    "ssl_cert": "tls_cert",
    "ssl_cert_key": "tls_key",
    "ca_cert": "tls_ca",
}
"""torch's names for settings of ours."""

TORCH: dict[str, Setting] = {
    "timeout": seconds("join_timeout, if that is not given; torchrun always gives it, 900 unless told otherwise"),
    "last_call_timeout": seconds("last_call, and also replace_wait: torch waits this long in every round", zero=True),
    "keep_alive_interval": seconds(f"times keep_alive_max_attempt: lease (alone: {KEEP_ALIVE_MAX_ATTEMPT} times it)"),
    "keep_alive_max_attempt": whole(
        f"times keep_alive_interval: lease (alone: {KEEP_ALIVE_INTERVAL_S:.0f} s times it)", low=1, high=10_000
    ),
    "heartbeat_timeout": seconds("accepted and not needed: a renewal has the lease's time"),
    "close_timeout": seconds("accepted and not needed: leaving takes a few seconds at most"),
}
"""torch's keys that mean something else than one of our settings, or nothing here."""

OWN: dict[str, Setting] = {
    "spare_exit": choice(
        "how an agent leaves that is not needed any more: 'exit' ends its program with code 0, 'error' raises torch's "
        "RendezvousGracefulExitError; 'auto' exits where torch does not handle that error yet",
        words=("auto", "exit", "error"),
    ),
}
"""What only torchrun's agent has a use for."""

_GIVEN_OTHERWISE = {
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}
KEYS = (*(name for name in TABLE if name not in {*_GIVEN_OTHERWISE, "info", "token"}), *SAME, *TORCH, *OWN)
"""Everything that may be in `--rdzv-conf`. `info` is no text, and `token` would be logged by torch."""

_ELSEWHERE = {
    "store_type": "the endpoint says it: 'host:port', or 'file:///path' for a file that all nodes see",
    "protocol": "the endpoint says it: 'etcd://' or, with TLS, 'etcds://'",
    "etcd_prefix": "it is the endpoint's path: 'etcd://host:2379/prefix'",
    "heartbeat": "torch's documents call it so, but its key is 'heartbeat_timeout', which is not needed here",
    "cert": "it is 'tls_cert'",
    "key": "it is 'tls_key'",
    "cacert": "it is 'tls_ca'",
}
_SECRET = re.compile(r"token|passw|secret|credential|auth|api_?key", re.IGNORECASE)


class Conf(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler is made of."""

    endpoint: Endpoint
    run_id: str
    min_nodes: int
    max_nodes: int
    settings: dict[str, Any]
    """The other arguments of a Rendezvous."""
    spare_exit: str = "auto"


def read(parameters: RendezvousParameters) -> Conf:
    """What the backend `rdzv` was told. Raises SettingsError."""
    return _read(parameters, Endpoint.parse(parameters.endpoint or ""), dict(parameters.config))


def read_etcd(parameters: RendezvousParameters) -> Conf:
    """What the backend `etcd-v3` was told: for it an endpoint without a scheme is an etcd's. Raises SettingsError."""
    text, config = parameters.endpoint or "", dict(parameters.config)
    protocol = config.pop("protocol", "http")
    if protocol not in ("http", "https"):
        raise SettingsError(f"--rdzv-conf protocol is {protocol!r}: it must be 'http' or 'https'")
    if text and "://" not in text:
        text = f"{'etcds' if protocol == 'https' else 'etcd'}://{text}"
    endpoint = Endpoint.parse(text)
    if endpoint.scheme not in ("etcd", "etcds"):
        raise SettingsError(
            f"endpoint {str(endpoint)!r} is not an etcd's: --rdzv-backend=etcd-v3 needs one such as "
            "'etcd://host:2379', or use --rdzv-backend=rdzv"
        )
    return _read(parameters, endpoint, config)


def _read(parameters: RendezvousParameters, endpoint: Endpoint, config: dict[str, object]) -> Conf:
    for key in config:
        _check_key(key)
    own = {key: _value(key, config.pop(key), OWN[key]) for key in OWN if key in config}
    settings = translate(config)
    if parameters.local_addr:
        settings["local_addr"] = parameters.local_addr
    return Conf(
        endpoint=endpoint,
        run_id=_run_id(parameters.run_id, endpoint),
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        settings=settings,
        **own,
    )


def _run_id(given: str, endpoint: Endpoint) -> str:
    """On one machine nobody else could be meant, so two jobs without an id must not meet. Elsewhere members need one."""
    if given and given != UNNAMED:
        return given
    if endpoint.is_one_machine:
        return f"alone-{secrets.token_hex(4)}"
    if endpoint.scheme != "rdzv":
        raise SettingsError(
            f"--rdzv-id is not given, and {endpoint} may be shared: all jobs without an id would meet in one run; "
            "give one, such as --rdzv-id=$SLURM_JOB_ID"
        )
    return given or UNNAMED


def translate(config: Mapping[str, object]) -> dict[str, Any]:
    """Our settings for torch's keys and ours. Raises SettingsError."""
    torch = {key: _value(key, config[key], TORCH[key]) for key in TORCH if key in config}
    settings: dict[str, Any] = {key: value for key, value in config.items() if key not in TORCH}
    for theirs, ours in SAME.items():
        if theirs in settings:
            _give(settings, ours, settings.pop(theirs), theirs)
    # torchrun gives `timeout` whether the user did or not, so the two together are no contradiction.
    if "timeout" in torch:
        settings.setdefault("join_timeout", torch["timeout"])
    if "last_call_timeout" in torch:
        _give(settings, "last_call", torch["last_call_timeout"], "last_call_timeout")
        settings.setdefault("replace_wait", torch["last_call_timeout"])
    beats = [key for key in ("keep_alive_interval", "keep_alive_max_attempt") if key in torch]
    if beats:
        interval_s = torch.get("keep_alive_interval", KEEP_ALIVE_INTERVAL_S)
        lease_s = interval_s * torch.get("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT)
        _give(settings, "lease", lease_s, " and ".join(beats))
    return settings


def _give(settings: dict[str, Any], ours: str, value: object, theirs: str) -> None:
    if ours in settings:
        raise SettingsError(f"--rdzv-conf has {ours} and torch's {theirs}, which mean the same: give one of them")
    settings[ours] = value


def _check_key(key: str) -> None:
    if key in KEYS:
        return
    if _SECRET.search(key):
        # The value is not repeated, and could not be taken back: torch has logged it already if it logs at all.
        raise SettingsError(
            f"--rdzv-conf has a secret in it ({key!r}), and torch writes --rdzv-conf to its log: "
            "give it in the environment variable RDZV_TOKEN or in a file (token_file), and use another one now"
        )
    if key in _GIVEN_OTHERWISE:
        raise SettingsError(f"--rdzv-conf has {key!r}, which is given with {_GIVEN_OTHERWISE[key]}")
    if key in _ELSEWHERE:
        raise SettingsError(f"--rdzv-conf has {key!r}: {_ELSEWHERE[key]}")
    close = difflib.get_close_matches(key, KEYS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(KEYS)}"
    raise SettingsError(f"--rdzv-conf has an unknown key {key!r}{hint}")


def _value(key: str, value: object, setting: Setting) -> Any:
    try:
        return setting.read(value)
    except (ValueError, TypeError):
        raise SettingsError(f"{key} is {setting.show(value)}: it must be {setting.allowed}") from None
