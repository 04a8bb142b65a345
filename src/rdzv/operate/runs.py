"""The runs that an engine keeps: their ids, and each one's status.

The embedded server lists its runs itself. etcd, files and memory keep the keys of all runs in one order, so the next run is the
first key after all keys of the run before: one small read per run, however large the runs are. Nothing is written, and no run
that was only asked for comes into being.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

import msgspec

from ..config.endpoint import Endpoint
from ..config.settings import TABLE, Settings
from ..core.keys import ROOT
from ..core.status import Status
from ..drivers import open_driver
from ..engines.embedded.client import RemoteDriver
from ..engines.port import EngineReset, List, Session
from ..engines.register.document import MAGIC
from ..errors import RdzvError, SettingsError, Unreachable
from .run_viewer import RunViewer

RUNS_MAX = 10_000
"""Runs of one list: as many as an embedded server can have."""
LOOKS_AT_ONCE = 8
"""Runs whose status is read at the same time. Each costs an embedded server a connection."""
READS_MAX = 2 * RUNS_MAX
"""Pages or keys that are read for one list, however many names on them are not those of runs."""
FILES_MAX = 1_000
"""Files of a directory that are looked at."""


class ListedRun(msgspec.Struct, frozen=True):
    """A run that an engine keeps."""

    run_id: str
    endpoint: Endpoint
    """Where it is kept: differs from the endpoint that was asked only for another file of the same directory."""
    age_s: float | None = None
    """How long the server has had it in its memory; None: the engine cannot tell."""
    silent_s: float | None = None
    """How long no client of the run was heard; None: the engine cannot tell."""


class RunList(msgspec.Struct, frozen=True):
    """The runs of one endpoint, sorted by id."""

    runs: tuple[ListedRun, ...]
    more: bool = False
    """Whether there are more, which are not listed."""


class SeenRun(msgspec.Struct, frozen=True):
    """A run and its status; None: it is gone, or `problem` says why it cannot be read."""

    run: ListedRun
    status: Status | None
    problem: str = ""


async def list_runs(settings: Settings, limit: int = RUNS_MAX) -> RunList:
    """Return the runs at the endpoint of the settings, at most `limit`. The run id in the settings means nothing here.

    Raises Unreachable, Untrusted, and SettingsError for an engine that cannot list.
    """
    endpoint = settings.endpoint
    if endpoint.scheme == "c10d":
        raise SettingsError(
            f"endpoint {str(endpoint)!r}: torch's TCPStore keeps each run under a key of its own and cannot list them: "
            "give its id to `rdzv status`, `rdzv watch` or `rdzv journal` (--run-id)"
        )
    limit = min(limit, RUNS_MAX)
    if endpoint.scheme == "file":
        found: list[ListedRun] = []
        more = False
        try:
            paths = await asyncio.to_thread(_registers_beside, endpoint.path)
        except OSError as error:  # Its name is too long, or its file system is away.
            raise Unreachable(str(endpoint), (error.strerror or str(error)).lower()) from None
        for path in paths:
            place = msgspec.structs.replace(endpoint, path=path)
            try:
                listed = await _list_keys(msgspec.structs.replace(settings, endpoint=place), limit - len(found))
            except RdzvError:
                if path == endpoint.path:  # Another file that cannot be read is nobody's question.
                    raise
                continue
            found += listed.runs
            more = more or listed.more
        return RunList(tuple(found), more)
    driver = open_driver(settings)
    if not isinstance(driver, RemoteDriver):
        await driver.close()
        return await _list_keys(settings, limit)
    try:
        return await _list_server(driver, endpoint, limit)
    finally:
        await driver.close()


async def _list_server(driver: RemoteDriver, endpoint: Endpoint, limit: int) -> RunList:
    """Ask an embedded server, page by page."""
    found: list[ListedRun] = []
    after = ""
    for _ in range(READS_MAX):
        page = await driver.list_runs(after)
        found += [ListedRun(one.name, endpoint, one.age_s, one.silent_s) for one in page.runs if _is_run_id(one.name)]
        is_last = page.after <= after  # A page that does not lead on is the last one, too.
        if is_last or len(found) >= limit:
            return RunList(tuple(found[:limit]), not is_last or len(found) > limit)
        after = page.after
    return RunList(tuple(found), more=True)


async def _list_keys(settings: Settings, limit: int) -> RunList:
    """Find the runs among the keys of an engine that keeps all runs together."""
    found: list[ListedRun] = []
    after = ""
    async with _session(settings) as session:
        for _ in range(READS_MAX):
            if len(found) == limit:
                break
            keys = (await session.txn(then=[List(ROOT, limit=1, after=after)])).reads[0]
            if not keys:
                return RunList(tuple(found))
            name, slash, _ = keys[0].key[len(ROOT) :].partition("/")
            # No character lies between "/" and "0", so all keys of the run are before this one, and no other run's are.
            after = f"{ROOT}{name}0" if slash else keys[0].key
            run_id = unquote(name)
            if slash and _is_run_id(run_id):
                found.append(ListedRun(run_id, settings.endpoint))
    return RunList(tuple(found), more=True)


async def look_at_runs(settings: Settings, runs: Sequence[ListedRun]) -> list[SeenRun]:
    """Read the status of each run. A run that cannot be read has a problem instead; the others are read all the same."""
    turns = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def look(run: ListedRun) -> SeenRun:
        own = msgspec.structs.replace(settings, endpoint=run.endpoint, run_id=run.run_id)
        async with turns:
            try:
                async with _session(own) as session:
                    return SeenRun(run, await RunViewer(session, run.run_id, time.monotonic).look())
            except RdzvError as error:
                return SeenRun(run, None, error.sentence)

    return await asyncio.gather(*map(look, runs))


@asynccontextmanager
async def _session(settings: Settings) -> AsyncIterator[Session]:
    driver = open_driver(settings)
    try:
        session = await driver.connect()
        try:
            yield session
        except EngineReset:
            raise Unreachable(driver.endpoint, "it was restarted at this moment: ask again") from None
        finally:
            with suppress(RdzvError):
                await session.close()
    finally:
        await driver.close()


def _is_run_id(name: str) -> bool:
    """Whether a member could have that run id. Any client can greet a server, or write to etcd, with another name."""
    try:
        return bool(TABLE["run_id"].read(name) == name)
    except ValueError:
        return False


def _registers_beside(path: str) -> list[str]:
    """Return the file and its neighbours that hold registers, sorted. A file that is not there is not made."""
    named = Path(path)
    found = [path] if named.exists() else []
    with suppress(OSError):
        beside = [file for file in itertools.islice(named.parent.iterdir(), FILES_MAX) if file != named]
        found += [str(file) for file in beside if str(file).isprintable() and file.is_file() and _is_register(file)]
    return sorted(found)


def _is_register(file: Path) -> bool:
    """Whether the first bytes are those of a register. No link is followed, and a pipe in a file's place is not waited for."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.read(descriptor, len(MAGIC)) == MAGIC
        finally:
            os.close(descriptor)
    return False
