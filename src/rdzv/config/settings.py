"""Every setting there is: what it means, what it may be, and the one place where that is checked.

`Settings` is the table. Each field carries a `Setting` that says what is allowed and what the setting is for, so that
the check, the sentence for a wrong value and the documentation have one source. Nobody takes a number from a user that
was not checked here, and nobody checks it again. The kinds of values are in `kinds.py`, endpoints in `endpoint.py`.

Values come from three sides: Python code (numbers), command lines and torchrun's `--rdzv-conf` (texts), and the batch
system's environment, which is passed in. All three mean the same thing here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import msgspec

from ..core.model import RunSettings
from ..errors import SettingsError
from .endpoint import Endpoint
from .secret import TOKEN_ENV, Secret
from .setting_types import (
    Address,
    Choice,
    File,
    Growth,
    Hidden,
    Info,
    Place,
    Ports,
    Seconds,
    Setting,
    Switch,
    Text,
    Whole,
)

NODES_MAX = 10_000
"""The largest run that is planned for and measured."""
RUN_ID_MAX = 200
UNNAMED = "none"
"""What torchrun calls a run that was given no id. Where many runs are kept, all of them would meet in it."""

ORDER_ENV = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Where batch systems say which node this is; the first that is set gives `order`."""
INCARNATION_ENV = "SLURM_RESTART_COUNT"
TOPOLOGY_ENV = "SLURM_TOPOLOGY_ADDR"

_ALSO_CALLED = {
    "rank": "order",
    "node_rank": "order",
    "timeout": "join_timeout",
    "last_call_timeout": "last_call",
    "close_timeout": "closed_for",
    "keep_alive_interval": "lease",
}
"""torch's words that no likeness of letters leads from."""

_NODES = {"low": 1, "high": NODES_MAX}
_COUNTS_MAX = 2**31 - 1


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one member, all checked. Times in seconds. Make it with `make`."""

    endpoint: Annotated[Endpoint, Place("where the run is kept")]
    run_id: Annotated[str, Text("names the run: members with one id meet", size_max=RUN_ID_MAX, empty=False)]
    min_nodes: Annotated[
        int,
        Whole("quorum: fewest nodes that make a round", "the run stands still after fewer losses", **_NODES),
    ]
    max_nodes: Annotated[
        int,
        Whole("most nodes in a round; those beyond are spares", "a run that is not full waits out last_call", **_NODES),
    ]
    join_timeout: Annotated[
        float,
        Seconds(
            "until join gives up, while the run has no sealed round; spares and waiting members do not time out",
            "a run that can never form is noticed later",
        ),
    ] = 600.0
    last_call: Annotated[
        float, Seconds("wait for more nodes after quorum", "a run that will not be full starts later", zero=True)
    ] = 30.0
    regroup: Annotated[
        float,
        Seconds(
            "longest wait for live members of a broken round to stop their workers; then they are evicted "
            "if the others suffice",
            "one stuck node holds up all others for longer",
        ),
    ] = 75.0
    lease: Annotated[
        float, Seconds("a member that does not renew for this long is lost", "a dead machine is noticed later")
    ] = 10.0
    linger: Annotated[
        float,
        Seconds(
            "embedded server: a member whose connection is gone for this long is lost",
            "a killed process is noticed later",
            zero=True,
        ),
    ] = 1.0
    serve_on: Annotated[
        float,
        Seconds(
            "embedded server: whoever serves and could go stays this long for others that are still there",
            "its process, and what it would tell the batch system by ending, stays for longer",
            zero=True,
        ),
    ] = 60.0
    outage_grace: Annotated[
        float,
        Seconds(
            "workers go on for this long while the engine is unreachable; then the member is told",
            "a member that is cut off trains for nothing, beside a newer round, for longer",
        ),
    ] = 900.0
    settle: Annotated[
        float, Seconds("gather newcomers for this long before growing", "a single newcomer waits longer", zero=True)
    ] = 2.0
    grow: Annotated[
        str,
        Growth(
            "let newcomers into a running round: after settling, at once, not at all, or by whole units",
            "'now' restarts the workers once for every newcomer",
            words=("settle", "now", "never"),
        ),
    ] = "settle"
    unit: Annotated[
        int,
        Whole("the size of a round is a multiple of this", "more nodes are left over as spares", **_NODES),
    ] = 1
    grow_every: Annotated[
        float,
        Seconds(
            "least time between two growths beyond a size the run already had",
            "newcomers stand idle for longer",
            zero=True,
        ),
    ] = 60.0
    replace_wait: Annotated[
        float,
        Seconds("wait for a replacement before shrinking", "a loss that is not replaced costs this long", zero=True),
    ] = 0.0
    drain_settle: Annotated[
        float,
        Seconds("gather members that drain, to break the round once", "less of their notice is left", zero=True),
    ] = 1.0
    on_failure: Annotated[
        str,
        Choice(
            "when a member that gave up puts quorum out of reach: close the run with its reason, or wait for others",
            "'wait' keeps idle nodes until join_timeout if nobody restarts agents",
            words=("close", "wait"),
        ),
    ] = "close"
    closed_for: Annotated[
        float,
        Seconds("a closed run id is refused for this long", "the id cannot be used again for longer"),
    ] = 60.0
    incarnation: Annotated[
        int,
        Whole(
            f"which life of the run id this is; a higher one may follow a close at once (default: {INCARNATION_ENV})",
            low=0,
            high=_COUNTS_MAX,
        ),
    ] = 0
    read_timeout: Annotated[
        float,
        Seconds("longest wait for one answer of the engine", "an engine that hangs is noticed later"),
    ] = 10.0
    is_host: Annotated[
        bool | None,
        Switch("serve here, or do not; unset: serve where the endpoint's address can be bound"),
    ] = None
    order: Annotated[
        str, Text(f"sort key for the first ranks (default: the first set of {', '.join(ORDER_ENV)})", or_number=True)
    ] = ""
    slot: Annotated[str, Text("tells members on one host apart, and keeps their ranks apart", or_number=True)] = ""
    topology: Annotated[
        str, Text(f"where the node is in the network, to put neighbours together (default: {TOPOLOGY_ENV})")
    ] = ""
    info: Annotated[dict[str, str], Info("told to all members of the round", "each fetches it from all others")] = {}
    bootstrap_port: Annotated[
        tuple[int, int], Ports("where rank 0 serves the workers' bootstrap; a range if a firewall wants one")
    ] = (0, 0)
    local_addr: Annotated[str, Address("how others reach this node; empty: found out from the connection")] = ""
    token: Annotated[
        Secret | None,
        Hidden(f"the secret that members and server share (default: {TOKEN_ENV}, which is taken out of the environment)"),
    ] = None
    token_file: Annotated[str, File("file with the secret that members and server share")] = ""
    tls: Annotated[
        bool | None, Switch("encrypt, and check the server's certificate; unset: if any other tls setting is given")
    ] = None
    tls_cert: Annotated[str, File("file with the certificate this node shows; who serves needs one")] = ""
    tls_key: Annotated[str, File("file with the key of tls_cert")] = ""
    tls_ca: Annotated[
        str, File("file with the certificates that others' are checked against; empty: those the system trusts")
    ] = ""
    tls_mutual: Annotated[
        bool | None,
        Switch("a server takes only members that show a certificate; unset: if tls_ca says whose to trust"),
    ] = None
    tls_server_name: Annotated[str, Text("the name in the server's certificate, if it is not the endpoint's host")] = ""

    @classmethod
    def make(
        cls,
        endpoint: str | Endpoint,
        *,
        run_id: str,
        min_nodes: int | str,
        max_nodes: int | str,
        environ: Mapping[str, str] = MappingProxyType({}),
        **options: object,
    ) -> Settings:
        """Check everything; the first thing wrong is said in a SettingsError. Numbers may come as text.

        `environ` is asked for what the batch system knows better than the user; a face passes `os.environ`.
        """
        for name in options:
            if name not in TABLE:
                raise SettingsError(f"unknown setting {name!r}{_likely(name)}")
        given: dict[str, object] = {
            "endpoint": endpoint, "run_id": run_id, "min_nodes": min_nodes, "max_nodes": max_nodes, **options
        }  # fmt: skip
        values: dict[str, Any] = {name: _read(name, value) for name, value in given.items()}
        for name, variables in _ENVIRON.items():
            for variable in variables:
                if name not in values and environ.get(variable):
                    values[name] = _read(name, environ[variable], f" (from {variable})")
        if str(values.get("grow", "")).startswith("unit="):
            _split_unit(values)
        settings = cls(**values)
        _check_together(settings)
        return settings

    def agreed(self) -> RunSettings:
        """The part that all members of a run must have in common."""
        return RunSettings(**{name: getattr(self, name) for name in RunSettings.__struct_fields__})

    @property
    def capacity(self) -> int:
        """The largest size a round can have: whole units."""
        return self.max_nodes // self.unit * self.unit

    @property
    def uses_tls(self) -> bool:
        """Said, or meant by naming what is needed for it."""
        if self.tls is not None:
            return self.tls
        return any((self.tls_cert, self.tls_ca, self.tls_mutual, self.tls_server_name))

    def summary(self) -> str:
        """What decides when a round is sealed, and all else that was set: the end of an error message."""
        names = [name for name in TABLE if name in _ALWAYS_SHOWN or getattr(self, name) != DEFAULTS.get(name)]
        return " ".join(f"{name}={_plain(getattr(self, name))}" for name in names if name not in _NEVER_SHOWN)


TABLE: dict[str, Setting] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Settings, include_extras=True).items()
}
"""All settings by name, in the order of the documentation."""

DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(Settings)
    if not field.required
}
"""What holds when nothing is said. The settings that are not here must be given."""

_ENVIRON = {"order": ORDER_ENV, "incarnation": (INCARNATION_ENV,), "topology": (TOPOLOGY_ENV,)}
_ALWAYS_SHOWN = frozenset({"min_nodes", "max_nodes", "join_timeout", "last_call", "regroup", "lease"})
_NEVER_SHOWN = frozenset({"endpoint", "run_id", "info", "token", "token_file", "tls_cert", "tls_key", "tls_ca"})
"""Said elsewhere in the same message, or nobody's business."""


def differences(mine: RunSettings, theirs: RunSettings) -> list[str]:
    """What this member was told otherwise than the run agreed on, one text each."""
    pairs = [(name, getattr(mine, name), getattr(theirs, name)) for name in RunSettings.__struct_fields__]
    return [f"{name} is {_plain(a)} here and {_plain(b)} in the run" for name, a, b in pairs if a != b]


def _read(name: str, value: object, source: str = "") -> object:
    setting = TABLE[name]
    try:
        return setting.read(value)
    except SettingsError:
        raise
    except (ValueError, TypeError):
        close = difflib.get_close_matches(str(value), setting.words, n=1) if isinstance(setting, Choice) else []
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        problem = f"{name} is {setting.show(value)}{source}: it must be {setting.allowed}{hint}"
        raise SettingsError(problem) from None


def _likely(name: str) -> str:
    """Which setting may be meant, or which there are."""
    close = [_ALSO_CALLED[name]] if name in _ALSO_CALLED else difflib.get_close_matches(name, TABLE, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; the settings are {', '.join(TABLE)}"


def _split_unit(values: dict[str, Any]) -> None:
    """`unit=n` is the user's short form of two settings."""
    unit = _read("unit", values["grow"].partition("=")[2], f" (from grow={values['grow']!r})")
    if values.setdefault("unit", unit) != unit:
        raise SettingsError(f"grow is {values['grow']!r} and unit is {values['unit']}: give one of them")
    values["grow"] = "settle"


def _check_together(settings: Settings) -> None:
    """What is wrong only beside another setting."""
    low, high, unit = settings.min_nodes, settings.max_nodes, settings.unit
    if low > high:
        raise SettingsError(f"min_nodes is {low} and max_nodes is {high}: min_nodes must not be more than max_nodes")
    if math.ceil(low / unit) * unit > high:
        raise SettingsError(f"unit is {unit}: it must have a multiple from min_nodes {low} to max_nodes {high}")
    if settings.endpoint.is_one_machine and high > 1:
        raise SettingsError(
            f"endpoint is {str(settings.endpoint)!r}, which no other machine can find, and max_nodes is {high}: "
            "it must name the host that serves, as in 'host:29400'"
        )
    _check_tls(settings)


def _check_tls(settings: Settings) -> None:
    for name in ("tls_cert", "tls_key", "tls_ca", "tls_mutual", "tls_server_name"):
        if settings.tls is False and getattr(settings, name):
            raise SettingsError(f"tls is false and {name} is set: leave one of them out")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        there, missing = ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
        raise SettingsError(f"{there} is set and {missing} is not: a certificate and its key are given together")
    if settings.tls_mutual and not settings.tls_ca:
        raise SettingsError("tls_mutual is true and tls_ca is not set: it must say whose certificates members may show")
    if settings.is_host and settings.uses_tls and not settings.tls_cert:
        raise SettingsError("is_host is true and tls is on without tls_cert and tls_key: who serves needs a certificate")


def _plain(value: object) -> str:
    """As a user would write it."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, tuple):
        low, high = value
        return f"{low}-{high}" if low != high else str(low)
    return str(value)
