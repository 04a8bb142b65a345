"""The one place where a head is written: by leaders, by members that close a run, and by operators."""

from __future__ import annotations

from collections.abc import Iterable

from ..core import wire
from ..core.keys import Keys
from ..core.model import Head, JournalEntry, Phase
from ..engines.port import Compare, Operation, Outcome, Put, Session


async def write_head(
    session: Session,
    run_id: str,
    head: Head,
    journal: JournalEntry,
    guard: Iterable[Compare],
    *,
    run_lease: int,
    closed_for: float,
    ahead: Iterable[Operation] = (),
    behind: Iterable[Operation] = (),
    otherwise: Iterable[Operation] = (),
) -> Outcome:
    """Write a head and its journal entry in one transaction, if the guard holds.

    A closed head has a lease of its own: it expires `closed_for` after the close (T11.10). All other heads, and the
    journal, are under the run's lease. `ahead`, `behind` and `otherwise` are further operations of the transaction.
    """
    keys, lease = Keys(run_id), run_lease
    if head.phase is Phase.CLOSED:
        lease = await session.grant(closed_for)
    put = Put(keys.head, wire.encode(head), lease)
    entry = Put(keys.journal_entry(head.seq), wire.encode(journal), run_lease or lease)
    return await session.txn(guard, [*ahead, put, entry, *behind], otherwise)
