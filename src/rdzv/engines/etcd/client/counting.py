"""What there is under many keys at one revision, asked together by all who want to know at about the same time.

A head that is written wakes every member of a run, and each asks at once. What is asked while an answer is under way goes out
together after it, and every key is read once, however many want it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from .errors import Compacted
from .messages import OPERATIONS_MAX, RangeRequest, RangeResponse, Sort, TxnResponse

Span: TypeAlias = "tuple[bytes, bytes]"
"""The first key, and the first behind those that are meant; empty: the one key."""
Reader: TypeAlias = "Callable[[Sequence[RangeRequest]], Awaitable[TxnResponse]]"

READS_MAX = OPERATIONS_MAX - 1
"""Per transaction; the client may need one operation for itself."""


class Counted(msgspec.Struct, frozen=True):
    """At `revision`: how many keys each span has, and which of them was written last.

    `before`: how many it had earlier; not for a single key that is there, since its own revision tells more.
    """

    revision: int
    now: dict[Span, RangeResponse]
    before: dict[Span, int]


class _Question(msgspec.Struct):
    spans: Sequence[Span]
    before: Sequence[Span]
    since: int
    tell: Callable[[Counted | Exception], None]


class KeyCounter:
    """See the module's docstring."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._questions: list[_Question] = []
        self._asking: asyncio.Task[None] | None = None

    def count(
        self, spans: Sequence[Span], before: Sequence[Span], since: int, tell: Callable[[Counted | Exception], None]
    ) -> None:
        """Of all `spans` now, and of those `before` at revision `since`. `tell` gets it, or why not: Unanswered, Refused.

        Told by a call and not awaited: a task for each of a thousand who ask at once would cost more than the answer.
        """
        self._questions.append(_Question(spans, before, since, tell))
        if self._asking is None:
            loop = asyncio.get_running_loop()
            self._asking = loop.create_task(self._ask(), name="rdzv counts keys of etcd")

    def close(self) -> None:
        """Whoever still waits is not waited for."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        try:
            while self._questions:
                questions, self._questions = self._questions, []
                try:
                    answers = await self._answer(questions)
                except Exception as fault:  # noqa: BLE001  Whatever it is, they are waiting for an answer.
                    answers = [fault] * len(questions)
                for question, answer in zip(questions, answers, strict=True):
                    question.tell(answer)
        finally:
            self._asking = None

    async def _answer(self, questions: list[_Question]) -> list[Counted | Exception]:
        spans = dict.fromkeys(span for question in questions for span in question.spans)
        revision, found = await self._all(map(_newest, spans))
        now = dict(zip(spans, found, strict=True))
        wanted = [
            [(question.since, span) for span in question.before if span[1] or not now[span].count] for question in questions
        ]
        earlier = dict.fromkeys(one for some in wanted for one in some)
        counts: dict[tuple[int, Span], int] | None
        try:
            counts = await self._earlier(earlier)
        except Compacted:
            counts = None  # Of somebody's revision; whose, is found out one by one.
        answers: list[Counted | Exception] = []
        for some in wanted:
            try:
                known = await self._earlier(some) if counts is None else counts
            except Compacted as fault:
                answers.append(fault)
            else:
                answers.append(Counted(revision, now, {one[1]: known[one] for one in some}))
        return answers

    async def _earlier(self, asked: Iterable[tuple[int, Span]]) -> dict[tuple[int, Span], int]:
        asked = tuple(asked)
        _, found = await self._all(RangeRequest(key, end, revision=since, count_only=True) for since, (key, end) in asked)
        return {one: answer.count for one, answer in zip(asked, found, strict=True)}

    async def _all(self, ranges: Iterable[RangeRequest]) -> tuple[int, list[RangeResponse]]:
        """At one revision: that of the first transaction."""
        left = list(ranges)
        found: list[RangeResponse] = []
        revision = 0
        while left:
            some, left = left[:READS_MAX], left[READS_MAX:]
            if revision:
                some = [one if one.revision else msgspec.structs.replace(one, revision=revision) for one in some]
            done = await self._read(some)
            revision = revision or done.header.revision
            found += done.found[: len(some)]
        return revision, found


def _newest(span: Span) -> RangeRequest:
    key, end = span
    if not end:
        return RangeRequest(key, keys_only=True)
    return RangeRequest(key, end, limit=1, sort=Sort.MODIFIED, descending=True, keys_only=True)
