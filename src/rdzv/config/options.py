"""The settings as keyword arguments with types, for editors and type checkers. Made from the table in `settings.py`.

`pytest tests/config/test_options.py --rewrite` writes the class anew after a setting has changed. When the program runs,
`Settings.make` checks the values, and takes texts for numbers, too, as a command line has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypedDict, Union

from .secret import Secret

if TYPE_CHECKING:
    from typing_extensions import Unpack
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:
    Unpack = Union  # A union of one type is that type.

__all__ = ["Options", "Unpack"]


class Options(TypedDict, total=False):
    """The settings that `Rendezvous` takes as keywords. Each has a default. Times in seconds."""

    join_timeout: float
    """Until join gives up, while the run has no sealed round; spares and waiting members do not time out."""
    last_call: float
    """Wait for more nodes after quorum; on the embedded server a first round that is not full waits 3 s in any case."""
    regroup: float
    """Longest wait for live members of a broken round to stop their workers; then they are evicted if the others
    suffice."""
    lease: float
    """A member that does not renew for this long is lost."""
    linger: float
    """Embedded server: a member whose connection is gone for this long is lost."""
    sentinel: bool
    """etcd: a small process beside the agent, the sentinel, revokes its lease when it dies; without it, a killed
    process is noticed when its lease ends."""
    serve_on: float
    """Embedded server and quorum: how long the process that serves stays for other members when it could go."""
    outage_grace: float
    """Workers go on for this long while the engine is unreachable; then the member is told."""
    settle: float
    """Gather newcomers for this long before growing."""
    grow: str
    """Let newcomers into a running round: after settling, at once, not at all, or by whole units."""
    unit: int
    """The size of a round is a multiple of this."""
    grow_every: float
    """Least time between two growths beyond a size the run already had."""
    replace_wait: float
    """Wait for a replacement before shrinking."""
    drain_settle: float
    """Gather members that drain, to break the round once."""
    drain_notice: float
    """Before a round is broken because a node drains, its workers are told and have this long to save; 0: they are not
    told."""
    drain_grace: float
    """Longest time that the workers have to save when this node gets a signal to go, if that is less than
    drain_notice; a few seconds less than the platform waits before it kills; 0: no less."""
    stall: float
    """Break the round when the step of a worker has not changed for this long, if workers tell their steps; 0: never."""
    futile_rounds: int
    """Close the run when so many rounds in a row have failed without a worker getting further than before, if workers
    tell their steps; 0: never."""
    on_failure: Literal["close", "wait"]
    """When a member that gave up puts quorum out of reach: close the run with its reason, or wait for others."""
    quarantine: str
    """Keep a host out for 10 minutes, or LENGTH, if it broke so many rounds within that time; doubled each time, at
    most a day; a host that quorum needs is let in all the same."""
    closed_for: float
    """A closed run id is refused for this long."""
    incarnation: int
    """Number of the run id's life; a higher one may follow a close at once (default: SLURM_RESTART_COUNT)."""
    read_timeout: float
    """Longest wait for one answer of the engine."""
    is_host: bool | None
    """Serve here, or do not; unset: serve where the endpoint's address can be bound."""
    place: str
    """Embedded server: the host name, or the pod's name in RDZV_POD_NAME, that the platform gives to one server at a
    time. Only a node of that name serves, and members follow it to another machine."""
    order: str | int
    """Sort key for the first ranks (default: the first set of SLURM_NODEID, PET_NODE_RANK, JOB_COMPLETION_INDEX)."""
    slot: str | int
    """Tells members on one host apart, and keeps their ranks apart."""
    topology: str
    """Path of the node in the network, such as block/rack: neighbours get ranks side by side, and a lost node is
    replaced by one that is near (default: RDZV_TOPOLOGY, or SLURM_TOPOLOGY_ADDR unless order is given)."""
    topology_file: str | PathLike[str]
    """File of JSON with the path of each node, {host: path}."""
    topology_command: str
    """Command that prints the path of this node; run once, without a shell, for at most 10 s and 64 KiB of output."""
    segment: int
    """Only whole segments of this many neighbours take part, nodes whose paths differ in the last part only; the
    others are spares."""
    check: str
    """Command that must end with exit code 0 on this node before it takes part in a round; run without a shell."""
    check_timeout: float
    """Longest time that check may take."""
    info: Mapping[str, str]
    """Told to all members of the round; max_nodes times its bytes must be 8388608 or less."""
    journal_dir: str | PathLike[str]
    """Folder for the journal of this agent, a file that outlives the run (default under torchrun and `rdzv run`: its
    --log-dir, else $XDG_STATE_HOME/rdzv or ~/.local/state/rdzv; elsewhere: none)."""
    state_dir: str | PathLike[str]
    """Quorum: folder on a local disk for the data of a listed host's etcd (default: /var/tmp/rdzv- and the user's
    number)."""
    bootstrap_port: tuple[int, int] | int | str
    """Where rank 0 serves the workers' bootstrap; if a firewall wants fixed ports, a range: rounds take turns in it."""
    local_addr: str
    """How others reach this node; empty: taken from the connection."""
    http: str
    """Where an agent that serves also serves metrics and a page about its run, to anybody who reaches it; empty:
    nowhere."""
    token: str | Secret | None
    """The secret that members and server share (default: RDZV_TOKEN, which is taken out of the environment)."""
    token_file: str | PathLike[str]
    """File with the secret that members and server share."""
    tls: bool | None
    """Encrypt, and check the server's certificate; unset: if any other tls setting is given."""
    tls_cert: str | PathLike[str]
    """File with the certificate this node shows; a node that serves needs one."""
    tls_key: str | PathLike[str]
    """File with the key of tls_cert."""
    tls_ca: str | PathLike[str]
    """File with the certificates that others' are checked against; empty: those the system trusts."""
    tls_mutual: bool | None
    """The server takes only members that show a certificate; unset: true if tls_ca is given."""
    tls_server_name: str
    """The name in the server's certificate, if it is not the endpoint's host."""
