"""torchrun's options as settings of rdzv: the endpoint, the run id, and `--rdzv-conf` with torch's keys and ours.

This module says what torch's own keys mean, and which keys `--rdzv-conf` refuses. `config.settings` checks the values.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ..blocking import Rendezvous
from ..config import auto_endpoint
from ..config.endpoint import SECRET_NAME, Endpoint, similar
from ..config.setting_types import Setting, choice, seconds, whole
from ..config.settings import TABLE, UNNAMED
from ..engines.port import Driver
from ..errors import SettingsError
from ..member.member import CALL_S
from ..member.notices import Observer

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

KEEP_ALIVE_INTERVAL_S = 5.0
KEEP_ALIVE_MAX_ATTEMPT = 3  # torch's defaults, used if only one of the two is given.

SYNONYMS = {"rank": "order", "ssl_cert": "tls_cert", "ssl_cert_key": "tls_key", "ca_cert": "tls_ca"}
"""torch's names for settings of ours."""

TORCH: dict[str, Setting] = {
    "timeout": seconds("join_timeout, if that is not given; torchrun always gives it, 900 unless told otherwise"),
    "last_call_timeout": seconds("last_call, and also replace_wait: torch waits this long in every round", zero=True),
    "keep_alive_interval": seconds(f"times keep_alive_max_attempt: lease (alone: {KEEP_ALIVE_MAX_ATTEMPT} times it)"),
    "keep_alive_max_attempt": whole(
        f"times keep_alive_interval: lease (alone: {KEEP_ALIVE_INTERVAL_S:.0f} s times it)", low=1, high=10_000
    ),
    "heartbeat_timeout": seconds("accepted and not needed: a renewal has the lease's time"),
    "close_timeout": seconds(f"how long set_closed tries while the engine is away ({CALL_S:.0f} s)"),
}  # torch's keys that are no synonym of one setting.

OWN: dict[str, Setting] = {
    "spare_exit": choice(
        "how an agent leaves that is not needed any more: 'exit' ends its program with code 0, 'error' raises torch's "
        "RendezvousGracefulExitError; 'auto' exits where torch does not handle that error yet",
        words=("auto", "exit", "error"),
    )
}  # Settings of the torchrun handler only.

_OPTIONS = {
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}
KEYS = (*(name for name in TABLE if name not in {*_OPTIONS, "info", "token"}), *SYNONYMS, *TORCH, *OWN)
"""All keys of `--rdzv-conf`. `info` is not text, and torch would log `token`."""

_HINTS = {
    "store_type": "the endpoint says it: 'host:port', or 'file:///path' for a file that all nodes see",
    "protocol": "the endpoint says it: 'etcd://' or, with TLS, 'etcds://'",
    "etcd_prefix": "it is the endpoint's path: 'etcd://host:2379/prefix'",
    "heartbeat": "torch's documents call it so, but its key is 'heartbeat_timeout', which is not needed here",
    "cert": "it is 'tls_cert'",
    "key": "it is 'tls_key'",
    "cacert": "it is 'tls_ca'",
}


class Conf(msgspec.Struct, frozen=True):
    """The arguments of a handler."""

    endpoint: Endpoint
    run_id: str
    min_nodes: int
    max_nodes: int
    settings: dict[str, Any]  # The other arguments of a Rendezvous.
    spare_exit: str = "auto"
    close_timeout_s: float = CALL_S

    def member(self, observer: Observer | None = None, driver: Driver | None = None) -> Rendezvous:
        nodes = {"min_nodes": self.min_nodes, "max_nodes": self.max_nodes}
        own: dict[str, Any] = {"observer": observer, "driver": driver, **nodes, **self.settings}
        return Rendezvous(self.endpoint, run_id=self.run_id, **own)


def read(parameters: RendezvousParameters) -> Conf:
    """Read the parameters of the backend `rdzv`. Raises SettingsError."""
    several = parameters.max_nodes > 1
    where, run_id = auto_endpoint.resolve(parameters.endpoint or "", parameters.run_id, os.environ, several=several)
    endpoint = where if isinstance(where, Endpoint) else Endpoint.parse(where)
    return _read(parameters, endpoint, run_id, parameters.config)


def read_etcd(parameters: RendezvousParameters) -> Conf:
    """Read the parameters of the backend `etcd-v3`, whose endpoint needs no scheme. Raises SettingsError."""
    config = dict(parameters.config)
    endpoint = etcd_endpoint(parameters.endpoint or "", config.pop("protocol", "http"), "--rdzv-conf protocol")
    if endpoint.scheme not in ("etcd", "etcds"):
        raise SettingsError(
            f"endpoint {str(endpoint)!r} is not an etcd's: --rdzv-backend=etcd-v3 needs one such as "
            "'etcd://host:2379', or use --rdzv-backend=rdzv"
        )
    return _read(parameters, endpoint, parameters.run_id, config)


def etcd_endpoint(text: str, protocol: object, key: str) -> Endpoint:
    """Parse an endpoint of etcd, whose scheme follows from torch's `protocol` if it has none. Raises SettingsError."""
    if protocol not in ("http", "https"):
        raise SettingsError(f"{key} is {protocol!r}: it must be 'http' or 'https'")
    if text and "://" not in text:
        text = f"{'etcds' if protocol == 'https' else 'etcd'}://{text}"
    return Endpoint.parse(text)


def _read(parameters: RendezvousParameters, endpoint: Endpoint, run_id: str, config: Mapping[str, object]) -> Conf:
    for key in config:
        _check_key(key)
    own = read_own(config)
    if "close_timeout" in config:
        own["close_timeout_s"] = _value("close_timeout", config["close_timeout"], TORCH["close_timeout"])
    settings = translate({key: value for key, value in config.items() if key not in OWN})
    if parameters.local_addr:
        settings["local_addr"] = parameters.local_addr
    return Conf(endpoint, _run_id(run_id, endpoint), parameters.min_nodes, parameters.max_nodes, settings, **own)


def read_own(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings of the torchrun handler only. Raises SettingsError."""
    return {key: _value(key, config[key], OWN[key]) for key in OWN if key in config}


def _run_id(given: str, endpoint: Endpoint) -> str:
    """Return the run id, or a random one for a job on one machine: two such jobs without an id must not meet."""
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
    """Translate torch's keys, and keep ours. Raises SettingsError."""
    torch = {key: _value(key, config[key], TORCH[key]) for key in TORCH if key in config}
    settings: dict[str, Any] = {key: value for key, value in config.items() if key not in TORCH}
    for key, name in SYNONYMS.items():
        if key in settings:
            _set_once(settings, name, settings.pop(key), key)
    # torchrun always passes `timeout`, so `timeout` and `join_timeout` together are no contradiction.
    if "timeout" in torch:
        settings.setdefault("join_timeout", torch["timeout"])
    if "last_call_timeout" in torch:
        _set_once(settings, "last_call", torch["last_call_timeout"], "last_call_timeout")
        settings.setdefault("replace_wait", torch["last_call_timeout"])
    given = [key for key in ("keep_alive_interval", "keep_alive_max_attempt") if key in torch]
    if given:
        interval_s = torch.get("keep_alive_interval", KEEP_ALIVE_INTERVAL_S)
        lease_s = interval_s * torch.get("keep_alive_max_attempt", KEEP_ALIVE_MAX_ATTEMPT)
        _set_once(settings, "lease", lease_s, " and ".join(given))
    return settings


def _set_once(settings: dict[str, Any], name: str, value: object, key: str) -> None:
    if name in settings:
        raise SettingsError(f"--rdzv-conf has {name} and torch's {key}, which mean the same: give one of them")
    settings[name] = value


def _check_key(key: str) -> None:
    if key in KEYS:
        return
    if SECRET_NAME.search(key):
        # The message does not repeat the value. The secret may be in torch's log already, so the user needs a new one.
        raise SettingsError(
            f"--rdzv-conf has a secret in it ({key!r}), and torch writes --rdzv-conf to its log: "
            "give it in the environment variable RDZV_TOKEN or in a file (token_file), and use another one now"
        )
    if key in _OPTIONS:
        raise SettingsError(f"--rdzv-conf has {key!r}, which is given with {_OPTIONS[key]}")
    if key in _HINTS:
        raise SettingsError(f"--rdzv-conf has {key!r}: {_HINTS[key]}")
    close = similar(key, KEYS)
    hint = f": did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(KEYS)}"
    raise SettingsError(f"--rdzv-conf has an unknown key {key!r}{hint}")


def _value(key: str, value: object, setting: Setting) -> Any:
    try:
        return setting.read(value)
    except (ValueError, TypeError):
        raise SettingsError(f"{key} is {setting.show(value)}: it must be {setting.allowed}") from None
