"""Every setting: its meaning, its allowed values, and the one place that checks them.

`Settings` is the table. Each field carries a `Setting` (`setting_types.py`), so the check, the error message and the
page docs/settings.md have one source. The rest of the code trusts these values and does not check them again.

Values come from Python code (numbers), from command lines and torchrun's `--rdzv-conf` (texts), and from the batch
system's environment, which the caller passes in. All three are read alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import msgspec

from ..core.model import QuarantineLimit, RunSettings
from ..errors import SettingsError
from . import setting_types
from .endpoint import Endpoint, similar
from .secret import TOKEN_ENV, Secret
from .setting_types import (
    Setting,
    address,
    choice,
    command,
    file,
    folder,
    limit,
    location,
    mapping,
    ports,
    seconds,
    secret,
    switch,
    text,
    way,
    whole,
)

NODES_MAX = 10_000  # The largest run that is planned for and measured.
RUN_ID_MAX = 200
_agreed_values = attrgetter(*RunSettings.__struct_fields__)
UNNAMED = "none"
"""torchrun's name for a run without an id. On an engine that keeps many runs, all such runs would meet."""

ORDER_ENV = ("SLURM_NODEID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Variables in which batch systems number the nodes; the first that is set gives `order`."""
INCARNATION_ENV = "SLURM_RESTART_COUNT"
TOPOLOGY_ENV = "RDZV_TOPOLOGY"
SLURM_TOPOLOGY = ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")
"""Where Slurm tells the switches or blocks above a node, and what each part of that is."""

_ALSO_CALLED = {
    "rank": "order", "node_rank": "order", "timeout": "join_timeout", "last_call_timeout": "last_call",
    "close_timeout": "closed_for", "keep_alive_interval": "lease",
}  # fmt: skip
"""torch's names that are spelt too differently for the spelling hint to find."""

_NODES = {"low": 1, "high": NODES_MAX}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one member, all checked. Times in seconds. Make it with `make`."""

    # fmt: off  A table: what a value means and what raising it costs.
    endpoint: Annotated[Endpoint, location(
        "where the run is kept; 'auto', or empty with several nodes: on the first node of the job, as the platform's "
        "variables name it")]
    run_id: Annotated[str, text(
        "names the run: members with one id meet; with endpoint 'auto' it may be empty: the id of the job",
        size_max=RUN_ID_MAX, empty=False)]
    min_nodes: Annotated[int, whole(
        "quorum: fewest nodes that make a round", "the run stands still after fewer losses", **_NODES)]
    max_nodes: Annotated[int, whole(
        "most nodes in a round; further nodes are spares", "a run that is not full waits out last_call", **_NODES)]
    join_timeout: Annotated[float, seconds(
        "until join gives up, while the run has no sealed round; spares and waiting members do not time out",
        "a run that can never form is noticed later")] = 600.0
    last_call: Annotated[float, seconds(
        "wait for more nodes after quorum; on the embedded server a first round that is not full waits 3 s in any case",
        "a run that will not be full starts later", zero=True)] = 30.0
    regroup: Annotated[float, seconds(
        "longest wait for live members of a broken round to stop their workers; then they are evicted "
        "if the others suffice", "one stuck node holds up all others for longer")] = 75.0
    lease: Annotated[float, seconds(
        "a member that does not renew for this long is lost", "a dead node is noticed later")] = 10.0
    linger: Annotated[float, seconds(
        "embedded server: a member whose connection is gone for this long is lost", "a killed process is noticed later",
        zero=True)] = 1.0
    sentinel: Annotated[bool, switch(
        "etcd: a small process beside the agent, the sentinel, revokes its lease when it dies; without it, a killed process is "
        "noticed when its lease ends")] = True
    serve_on: Annotated[float, seconds(
        "embedded server and quorum: how long the process that serves stays for other members when it could go",
        "its process ends later, and so does its job in the batch system", zero=True)] = 60.0
    outage_grace: Annotated[float, seconds(
        "workers go on for this long while the engine is unreachable; then the member is told",
        "a member that is cut off trains for nothing, beside a newer round, for longer")] = 900.0
    settle: Annotated[float, seconds(
        "gather newcomers for this long before growing", "a single newcomer waits longer", zero=True)] = 2.0
    grow: Annotated[str, choice(
        "let newcomers into a running round: after settling, at once, not at all, or by whole units",
        "'now' restarts the workers once for every newcomer",
        words=("settle", "now", "never"), or_unit=True)] = "settle"
    unit: Annotated[int, whole(
        "the size of a round is a multiple of this", "more nodes are left over as spares", **_NODES)] = 1
    grow_every: Annotated[float, seconds(
        "least time between two growths beyond a size the run already had", "newcomers stand idle for longer",
        zero=True)] = 60.0
    replace_wait: Annotated[float, seconds(
        "wait for a replacement before shrinking", "a loss that is not replaced costs this long", zero=True)] = 0.0
    drain_settle: Annotated[float, seconds(
        "gather members that drain, to break the round once", "less of their notice is left", zero=True)] = 1.0
    drain_notice: Annotated[float, seconds(
        "before a round is broken because a node drains, its workers are told and have this long to save; 0: they are not told",
        "a node whose workers do not answer goes later", zero=True)] = 0.0
    drain_grace: Annotated[float, seconds(
        "longest time that the workers have to save when this node gets a signal to go, if that is less than drain_notice; a "
        "few seconds less than the platform waits before it kills; 0: no less",
        "above what the platform waits, the node is killed while its workers save", zero=True)] = 0.0
    stall: Annotated[float, seconds(
        "break the round when the step of a worker has not changed for this long, if workers tell their steps; 0: never",
        "a job that hangs is noticed later", zero=True)] = 0.0
    futile_rounds: Annotated[int, whole(
        "close the run when so many rounds in a row have failed without a worker getting further than before, if workers tell "
        "their steps; 0: never", "a job that fails again and again at one step is ended later", low=0, high=1000)] = 0
    on_failure: Annotated[str, choice(
        "when a member that gave up puts quorum out of reach: close the run with its reason, or wait for others",
        "'wait' keeps idle nodes until join_timeout if nobody restarts agents", words=("close", "wait"))] = "close"
    quarantine: Annotated[QuarantineLimit | None, limit(
        "keep a host out for 10 minutes, or LENGTH, if it broke so many rounds within that time; doubled each time, at most a "
        "day; a host that quorum needs is let in all the same", "a bad host makes the others restart more often")] = None
    closed_for: Annotated[float, seconds(
        "a closed run id is refused for this long", "the id cannot be used again for longer")] = 60.0
    incarnation: Annotated[int, whole(
        f"number of the run id's life; a higher one may follow a close at once (default: {INCARNATION_ENV})", low=0,
        high=2**31 - 1)] = 0
    read_timeout: Annotated[float, seconds(
        "longest wait for one answer of the engine", "an engine that hangs is noticed later")] = 10.0
    is_host: Annotated[bool | None, switch(
        "serve here, or do not; unset: serve where the endpoint's address can be bound")] = None
    place: Annotated[str, text(
        "embedded server: the host name, or the pod's name in RDZV_POD_NAME, that the platform gives to one server at a time. "
        "Only a node of that name serves, and members follow it to another machine",
        "if the platform starts a second one before the first has ended, the run may split")] = ""
    order: Annotated[str, text(
        f"sort key for the first ranks (default: the first set of {', '.join(ORDER_ENV)})", or_number=True)] = ""
    slot: Annotated[str, text("tells members on one host apart, and keeps their ranks apart", or_number=True)] = ""
    topology: Annotated[str, way(
        "path of the node in the network, such as block/rack: neighbours get ranks side by side, and a lost node is replaced "
        f"by one that is near (default: {TOPOLOGY_ENV}, or {SLURM_TOPOLOGY[0]} unless order is given)")] = ""
    topology_file: Annotated[str, file("file of JSON with the path of each node, {host: path}")] = ""
    topology_command: Annotated[str, text(
        "command that prints the path of this node; run once, without a shell, for at most 10 s and 64 KiB of output",
        size_max=4096)] = ""
    segment: Annotated[int, whole(
        "only whole segments of this many neighbours take part, nodes whose paths differ in the last part only; the others "
        "are spares", "more nodes are left over as spares", **_NODES)] = 1
    check: Annotated[str, command(
        "command that must end with exit code 0 on this node before it takes part in a round; run without a shell",
        size_max=4096)] = ""
    check_timeout: Annotated[float, seconds(
        "longest time that check may take", "the others wait longer for a node whose check hangs")] = 30.0
    info: Annotated[dict[str, str], mapping(
        f"told to all members of the round; max_nodes times its bytes must be {setting_types.INFOS_MAX} or less",
        "each fetches it from all others")] = {}
    journal_dir: Annotated[str, folder(
        "folder for the journal of this agent, a file that outlives the run (default under torchrun and "
        "`rdzv run`: its --log-dir, else $XDG_STATE_HOME/rdzv or ~/.local/state/rdzv; elsewhere: none)")] = ""
    state_dir: Annotated[str, folder(
        "quorum: folder on a local disk for the data of a listed host's etcd (default: /var/tmp/rdzv- and the user's number)")
    ] = ""
    bootstrap_port: Annotated[tuple[int, int], ports(
        "where rank 0 serves the workers' bootstrap; if a firewall wants fixed ports, a range: rounds take turns in it")
    ] = (0, 0)
    local_addr: Annotated[str, address("how others reach this node; empty: taken from the connection")] = ""
    http: Annotated[str, setting_types.bind(
        "where an agent that serves also serves metrics and a page about its run, to anybody who reaches it; empty: nowhere")
    ] = ""
    token: Annotated[Secret | None, secret(
        f"the secret that members and server share (default: {TOKEN_ENV}, which is taken out of the environment)",
    )] = None
    token_file: Annotated[str, file("file with the secret that members and server share")] = ""
    tls: Annotated[bool | None, switch(
        "encrypt, and check the server's certificate; unset: if any other tls setting is given")] = None
    tls_cert: Annotated[str, file("file with the certificate this node shows; a node that serves needs one")] = ""
    tls_key: Annotated[str, file("file with the key of tls_cert")] = ""
    tls_ca: Annotated[str, file(
        "file with the certificates that others' are checked against; empty: those the system trusts")] = ""
    tls_mutual: Annotated[bool | None, switch(
        "the server takes only members that show a certificate; unset: true if tls_ca is given")] = None
    tls_server_name: Annotated[str, text("the name in the server's certificate, if it is not the endpoint's host")] = ""

    # fmt: on
    @classmethod
    def make(
        cls, endpoint: str | Endpoint, *, run_id: str, min_nodes: int | str, max_nodes: int | str,
        environ: Mapping[str, str] = MappingProxyType({}), **options: object,
    ) -> Settings:  # fmt: skip
        """Check all values and raise SettingsError for the first wrong one. Numbers may come as text.

        `environ` gives what the batch system knows better than the user; the public API passes `os.environ`.
        """
        for name in options:
            check_name(name)
        given = {"endpoint": endpoint, "run_id": run_id, "min_nodes": min_nodes, "max_nodes": max_nodes, **options}
        values: dict[str, Any] = {name: _read(name, value) for name, value in given.items()}
        told = values.keys() & {"topology", "topology_file", "topology_command"}
        for name, variables in _ENVIRON.items():
            for variable in () if name == "topology" and told else variables:
                if name not in values and environ.get(variable):
                    values[name] = _read(name, environ[variable], f" (from {variable})")
        # A path that only the environment knows does not overrule an order that the user gave.
        if not told and "topology" not in values and "order" not in options and environ.get(SLURM_TOPOLOGY[0]):
            values["topology"] = _read("topology", _slurm_path(environ), f" (from {SLURM_TOPOLOGY[0]})")
        grow = values.get("grow", "")
        if grow.startswith("unit="):  # The short form of two settings.
            unit = _read("unit", grow.removeprefix("unit="), f" (from grow={grow!r})")
            if values.setdefault("unit", unit) != unit:
                raise SettingsError(f"grow is {grow!r} and unit is {values['unit']}: give one of them")
            values["grow"] = "settle"
        settings = cls(**values)
        _check_together(settings)
        return settings

    def agreed(self) -> RunSettings:
        """The settings that must be the same for all members of a run."""
        return RunSettings(**dict(zip(RunSettings.__struct_fields__, _agreed_values(self), strict=True)))

    @property
    def capacity(self) -> int:
        """The largest size of a round, in whole units."""
        step = max(self.unit, self.segment)
        return self.max_nodes // step * step

    @property
    def uses_tls(self) -> bool:
        """Whether TLS is on: by `tls`, or because another tls setting is given."""
        if self.tls is not None:
            return self.tls
        return any((self.tls_cert, self.tls_ca, self.tls_mutual, self.tls_server_name))

    def summary(self) -> str:
        """The settings that decide when a round is sealed and all that were set, for the end of an error message."""
        names = [name for name in TABLE if name in _ALWAYS_SHOWN or getattr(self, name) != DEFAULTS.get(name)]
        return " ".join(f"{name}={_plain(getattr(self, name))}" for name in names if name not in _NEVER_SHOWN)


_HINTS = get_type_hints(Settings, include_extras=True)
TABLE: dict[str, Setting] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(Settings)
    if not field.required
}

_ENVIRON = {"order": ORDER_ENV, "incarnation": (INCARNATION_ENV,), "topology": (TOPOLOGY_ENV,)}
_ALWAYS_SHOWN = frozenset({"min_nodes", "max_nodes", "join_timeout", "last_call", "regroup", "lease"})
_NEVER_SHOWN = frozenset({
    "endpoint", "run_id", "info", "token", "token_file", "tls_cert", "tls_key", "tls_ca", "journal_dir", "state_dir",
})  # fmt: skip
"""Part of the same message already, confidential, or of no influence on a round."""


def differences(mine: RunSettings, theirs: RunSettings) -> list[str]:
    """Describe the settings that differ from the run's, one text each."""
    pairs = [(name, getattr(mine, name), getattr(theirs, name)) for name in RunSettings.__struct_fields__]
    return [f"{name} is {_plain(a)} here and {_plain(b)} in the run" for name, a, b in pairs if a != b]


def check_name(name: str) -> None:
    """Raise SettingsError if no setting has that name."""
    if name not in TABLE:
        close = [_ALSO_CALLED[name]] if name in _ALSO_CALLED else similar(name, TABLE)
        hint = f": did you mean {close[0]!r}?" if close else f"; the settings are {', '.join(TABLE)}"
        raise SettingsError(f"unknown setting {name!r}{hint}")


def _read(name: str, value: object, source: str = "") -> object:
    setting = TABLE[name]
    try:
        return setting.read(value)
    except SettingsError:
        raise
    except (ValueError, TypeError):
        close = similar(str(value), setting.words)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise SettingsError(f"{name} is {setting.show(value)}{source}: it must be {setting.allowed}{hint}") from None


def _check_together(settings: Settings) -> None:
    """Refuse values that contradict each other."""
    low, high, unit, segment = settings.min_nodes, settings.max_nodes, settings.unit, settings.segment
    if low > high:
        raise SettingsError(f"min_nodes is {low} and max_nodes is {high}: min_nodes must not be more than max_nodes")
    for name, size in (("unit", unit), ("segment", segment)):
        if math.ceil(low / size) * size > high:
            raise SettingsError(f"{name} is {size}: it must have a multiple from min_nodes {low} to max_nodes {high}")
    if unit > 1 and unit % segment:
        raise SettingsError(f"unit is {unit} and segment is {segment}: unit must be 1 or a multiple of segment")
    size, size_max = setting_types.info_size(settings.info), setting_types.INFOS_MAX // high
    if size > size_max:
        raise SettingsError(
            f"info has {size} bytes as JSON and max_nodes is {high}: with so many nodes it may have at most {size_max}, "
            "because a leader reads the info of all nodes at once; shorten it, or put the rest into the round's store"
        )
    ways = [name for name in ("topology", "topology_file", "topology_command") if getattr(settings, name)]
    if len(ways) > 1:
        raise SettingsError(f"{' and '.join(ways)} are given: give one of them")
    if settings.endpoint.is_one_machine and high > 1:
        raise SettingsError(
            f"endpoint is {str(settings.endpoint)!r}, which no other machine can find, and max_nodes is {high}: "
            "it must name the host that serves, as in 'host:29400'"
        )
    for name in ("tls_cert", "tls_key", "tls_ca", "tls_mutual", "tls_server_name"):
        if settings.tls is False and getattr(settings, name):
            raise SettingsError(f"tls is false and {name} is set: leave one of them out")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        there, missing = ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
        raise SettingsError(f"{there} is set and {missing} is not: a certificate and its key are given together")
    if settings.tls_mutual and not settings.tls_ca:
        raise SettingsError("tls_mutual is true and tls_ca is not set: it must say whose certificates members may show")
    if settings.is_host and settings.uses_tls and not settings.tls_cert:
        raise SettingsError("is_host is true and tls is on without tls_cert and tls_key: a server needs a certificate")


def _slurm_path(environ: Mapping[str, str]) -> str:
    """Return the switches or blocks above this node, as `switch1.switch2.node` and its pattern name them."""
    address, pattern = (environ.get(name, "") for name in SLURM_TOPOLOGY)
    # The name of the node may have dots in it, and comes last. The member adds its host itself.
    above = pattern.count(".") if pattern else address.count(".")
    return "/".join(address.split(".", above)[:above])


def _plain(value: object) -> str:
    """Return the value as a user would write it."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, tuple):
        low, high = value
        return f"{low}-{high}" if low != high else str(low)
    return str(value)
