"""The rules by which the listed hosts agree on one cluster. No I/O.

Every host draws a random *number* and keeps it on disk. The cluster is named by the numbers of all hosts: they are in its
token and in its members' names, so a cluster with other numbers is another cluster, and the members of the two refuse each
other. A host *chooses* numbers once, keeps them on disk, and only then starts its etcd.

Why there are never two clusters that work. A cluster works only with a majority of the hosts, and any two majorities have a
host in common. That host would have started two clusters with one number, but it chooses once per number. A host that lost
its disk has lost its number too. It draws another, which is in no cluster that exists, so it cannot vote there with nothing in
its memory. It stays a client as long as its process lives, and becomes one again while others have the cluster.

    state     event                                             next state
    OPEN      every host offers the same complete numbers       VOTER
    OPEN      a host has chosen numbers that contain ours       VOTER    it had all offers; ours was among them
    OPEN      a host has chosen numbers with another of ours    CLIENT   we are a later life of a host that voted
    VOTER, CLIENT                                               stay

The first row needs all hosts, not a majority: two hosts that started without the third could not tell a third that never
came from one that has voted and is frozen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum

import msgspec

NUMBER_BYTES = 16


class VoterState(Enum):
    OPEN = "open"
    VOTER = "voter"
    CLIENT = "client"


class Offer(msgspec.Struct, frozen=True):
    """A host's message to the others: its list, the numbers that it knows (empty: unknown), and whether it has chosen them."""

    quorum: str
    numbers: tuple[str, ...]
    chosen: bool = False


class HostRecord(msgspec.Struct, frozen=True):
    """The record that a host keeps on disk."""

    quorum: str
    me: int
    number: str
    chosen: tuple[str, ...] = ()
    started: bool = False  # Its etcd may have voted. If its data is gone all the same, this record is worthless.

    @property
    def standing(self) -> VoterState:
        if not self.chosen:
            return VoterState.OPEN
        return VoterState.VOTER if self.chosen[self.me] == self.number else VoterState.CLIENT


def quorum_name(run_id: str, hosts: tuple[str, ...]) -> str:
    """Return the name of the quorum of one run on one list: only hosts that were told the same have it."""
    return hashlib.sha256("\n".join((run_id, *hosts)).encode()).hexdigest()[:16]


def cluster_token(record: HostRecord) -> str:
    """Return the token of the cluster that a host has chosen: etcd makes the ids of cluster and members from it."""
    return hashlib.sha256("\n".join((record.quorum, *record.chosen)).encode()).hexdigest()


def member_name(quorum: str, number: str) -> str:
    """Return a member's name in etcd. It tells other hosts the number, and clients the quorum."""
    return f"{quorum}-{number}"


def offer_of(record: HostRecord, heard: Mapping[int, Offer], size: int) -> Offer:
    """Return what this host tells the others."""
    if record.chosen:
        return Offer(record.quorum, record.chosen, chosen=True)
    own = {index: offer.numbers[index] for index, offer in heard.items() if _fits(record, offer, size)}
    own[record.me] = record.number
    return Offer(record.quorum, tuple(own.get(index, "") for index in range(size)))


def decide(record: HostRecord, heard: Mapping[int, Offer], size: int) -> HostRecord:
    """Return the record after these offers, which other hosts made themselves: the newest of each."""
    if record.chosen:
        return record
    usable = {index: offer for index, offer in heard.items() if _fits(record, offer, size)}
    chosen = [offer.numbers for offer in usable.values() if offer.chosen]
    if chosen:
        ours = [numbers for numbers in chosen if numbers[record.me] == record.number]
        return msgspec.structs.replace(record, chosen=(ours or chosen)[0])
    mine = offer_of(record, usable, size).numbers
    if all(mine) and len(usable) == size - 1 and all(offer.numbers == mine for offer in usable.values()):
        return msgspec.structs.replace(record, chosen=mine)
    return record


def counted(heard: Mapping[int, Offer], *, formed: bool) -> dict[int, Offer]:
    """Return the offers that count. A process that has used the cluster (`formed`) counts choices only: it makes no other."""
    return {index: offer for index, offer in heard.items() if offer.chosen or not formed}


def _fits(record: HostRecord, offer: Offer, size: int) -> bool:
    """Whether the offer is one of this quorum: another run at the same ports, or a differing list, counts for nothing."""
    complete = all(offer.numbers) or not offer.chosen
    return offer.quorum == record.quorum and len(offer.numbers) == size and complete
