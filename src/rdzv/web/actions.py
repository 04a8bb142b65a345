"""Requests that a person makes on the page: drain, ban, unban and close. Off unless allowed, and then only with the secret."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from contextlib import suppress

import msgspec

from ..config.secret import Secret
from ..core.text import NAME_MAX, clip
from ..engines.port import EngineReset
from ..errors import NotFound, RdzvError, SettingsError
from ..operate import commands
from .observer import RunsObserver

BODY_MAX = 8 * 1024
GUESS_S = 1.0
"""How long a wrong secret takes. They are refused one after the other."""
GUESSES_MAX = 8
"""Wrong secrets that may wait at once."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request as the page sends it."""

    run: str
    act: str
    target: str
    """A member's id, name or host (drain), or a host (ban, unban)."""
    reason: str
    by: str
    """The person who asks, in their own words."""
    secret: str


_decode = msgspec.json.Decoder(Request).decode


class Refusal(Exception):
    """A request that is refused, with the HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class Actions:
    """Carries out requests on the runs of an observer. `secret` is None where no action is allowed."""

    def __init__(self, observer: RunsObserver, secret: Secret | None) -> None:
        self._observer = observer
        self._secret = secret
        self._guesses = 0
        self._guessing = asyncio.Lock()

    @property
    def are_allowed(self) -> bool:
        return self._secret is not None

    async def act(self, parts: AsyncIterable[bytes], peer: str) -> str:
        """Carry out a request and return a sentence about it. Raises Refusal.

        `parts`: the body as it comes. It is not waited for where no action is allowed. `peer`: the address that it came from.
        """
        if self._secret is None:
            raise Refusal(403, "this page only shows: start it with --allow-actions and a secret to act on runs")
        body = b""
        async for part in parts:
            body += part
            if len(body) > BODY_MAX:
                raise Refusal(413, f"a request has at most {BODY_MAX} bytes")
        try:
            request = _decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Refusal(400, f"the request cannot be read: {error}") from None
        await self._check(self._secret, request.secret)
        reason, person = clip(request.reason.strip(), 200), clip(request.by.strip(), 60)
        if not reason or not person:
            raise Refusal(400, "a reason and your name are needed: the members are told, and the journal keeps them")
        try:
            return await self._carry_out(request, reason, clip(f"{person} (page, {peer})", NAME_MAX))
        except NotFound as error:
            raise Refusal(404, error.sentence) from None
        except SettingsError as error:
            raise Refusal(400, error.sentence) from None
        except (RdzvError, EngineReset) as error:
            sentence = error.sentence if isinstance(error, RdzvError) else "the engine was restarted: try again"
            raise Refusal(502, sentence) from None

    async def _check(self, secret: Secret, given: str) -> None:
        try:
            if Secret(given) == secret:
                return
        except ValueError:
            pass
        if self._guesses >= GUESSES_MAX:
            raise Refusal(429, "too many wrong secrets: wait a moment")
        self._guesses += 1
        try:
            async with self._guessing:
                await asyncio.sleep(GUESS_S)
        finally:
            self._guesses -= 1
        raise Refusal(403, "this is not the secret")

    async def _carry_out(self, request: Request, reason: str, by: str) -> str:
        follower = self._observer.runs.get(request.run)
        session = follower.session if follower is not None else None
        if follower is None or session is None:
            raise NotFound(request.run, "there is no such run, or it cannot be reached at the moment")
        run_id, target, said = request.run, request.target, f"{reason}, asked for by {by}"
        if request.act == "close":
            if not await commands.close(session, run_id, reason, by):
                raise NotFound(run_id, "it has no round to close: it is closed already, or has not begun")
            return f"run {run_id!r} is closed"
        if request.act == "drain":
            asked = await commands.drain(session, run_id, target, said)
            if not asked:
                raise NotFound(run_id, f"nobody there has the name, id or host {target!r}")
            done = f"asked to drain: {', '.join(asked)}"
        elif request.act == "ban":
            await commands.ban(session, run_id, target, said)
            done = f"host {target!r} is banned"
        elif request.act == "unban":
            if not await commands.unban(session, run_id, target):
                raise NotFound(run_id, f"host {target!r} is neither banned from it nor quarantined")
            done = f"host {target!r} may join again"
        else:
            raise Refusal(400, f"{request.act!r} is no action: there is drain, ban, unban and close")
        # It is done, and must not be said to have failed: whoever reads that asks again.
        try:
            await commands.note(session, run_id, by, f"{done} ({reason})")
        except (RdzvError, EngineReset):
            done += "; the journal could not be written"
        with suppress(RdzvError, EngineReset):
            await follower.refresh()
        return done
