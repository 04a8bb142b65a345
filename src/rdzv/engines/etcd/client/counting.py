"""Counts of keys at one revision, requested together by all callers that ask at about the same time.

A new head wakes every member of a run, and each asks at once. Requests that come while a reply is pending are merged
and sent after it, and every key range is read once, however many callers want it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from .errors import Compacted
from .messages import OPERATIONS_MAX, Header, RangeRequest, RangeResponse, Sort, TxnResponse

Span: TypeAlias = "tuple[bytes, bytes]"
"""A range of keys: the first key and the first key behind the range; an empty end means the one key."""
Reader: TypeAlias = "Callable[[Sequence[RangeRequest]], Awaitable[TxnResponse]]"

READS_MAX = OPERATIONS_MAX - 1
"""Reads in one transaction. `Client.txn` may need one operation for itself (see `reads_can_crash_etcd`)."""


class KeyCounts(msgspec.Struct, frozen=True):
    """The number of keys of each span at `revision`, and the key of each that was written last.

    `before` has the number of keys at an earlier revision. A single key that exists is left out: its own revision tells more.
    """

    revision: int
    now: dict[Span, RangeResponse]
    before: dict[Span, int]


class _CountRequest(msgspec.Struct):
    spans: Sequence[Span]
    before: Sequence[Span]
    since: int
    callback: Callable[[KeyCounts | Exception], None]


class KeyCounter:
    """Merges concurrent requests for counts into few transactions."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._requests: list[_CountRequest] = []
        self._task: asyncio.Task[None] | None = None

    def count(
        self, spans: Sequence[Span], before: Sequence[Span], since: int, callback: Callable[[KeyCounts | Exception], None]
    ) -> None:
        """Count the keys of all `spans` now, and of those in `before` also at revision `since`.

        `callback` gets the counts or the error: Unanswered or RequestRefused. A callback instead of a coroutine, because a
        task for each of a thousand callers would cost more than the reply.
        """
        self._requests.append(_CountRequest(spans, before, since, callback))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="rdzv counts keys of etcd")

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._requests:
                requests, self._requests = self._requests, []
                try:
                    results = await self._count_all(requests)
                except Exception as fault:  # noqa: BLE001  Every caller must get a result, or it waits forever.
                    results = [fault] * len(requests)
                for request, result in zip(requests, results, strict=True):
                    request.callback(result)
        finally:
            self._task = None

    async def _count_all(self, requests: list[_CountRequest]) -> list[KeyCounts | Exception]:
        spans = dict.fromkeys(span for request in requests for span in request.spans)
        header, found = await read_all(self._read, map(_newest, spans))
        now = dict(zip(spans, found, strict=True))
        wanted = [
            [(request.since, span) for span in request.before if span[1] or not now[span].count] for request in requests
        ]
        counts: dict[tuple[int, Span], int] | None
        try:
            counts = await self._count_before(dict.fromkeys(one for some in wanted for one in some))
        except Compacted:
            counts = None  # etcd does not say which revision is compacted: ask for each request separately.
        results: list[KeyCounts | Exception] = []
        for some in wanted:
            try:
                known = await self._count_before(some) if counts is None else counts
            except Compacted as fault:
                results.append(fault)
            else:
                results.append(KeyCounts(header.revision, now, {one[1]: known[one] for one in some}))
        return results

    async def _count_before(self, wanted: Iterable[tuple[int, Span]]) -> dict[tuple[int, Span], int]:
        wanted = tuple(wanted)
        ranges = (RangeRequest(key, end, revision=since, count_only=True) for since, (key, end) in wanted)
        _, found = await read_all(self._read, ranges)
        return {one: reply.count for one, reply in zip(wanted, found, strict=True)}


async def read_all(read: Reader, ranges: Iterable[RangeRequest]) -> tuple[Header, list[RangeResponse]]:
    """Read any number of ranges at one revision: that of the first transaction."""
    left = list(ranges)
    found: list[RangeResponse] = []
    header = Header()
    while left:
        some, left = left[:READS_MAX], left[READS_MAX:]
        if found:
            revision = header.revision
            some = [one if one.revision else msgspec.structs.replace(one, revision=revision) for one in some]
        done = await read(some)
        header = header if found else done.header
        found += done.found[: len(some)]
    return header, found


def _newest(span: Span) -> RangeRequest:
    key, end = span
    if not end:
        return RangeRequest(key, keys_only=True)
    return RangeRequest(key, end, limit=1, sort=Sort.MODIFIED, descending=True, keys_only=True)
