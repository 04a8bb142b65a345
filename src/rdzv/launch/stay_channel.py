"""The agent's end of the socket to workers that stay: it hands out ranks, ends rounds, and makes their store calls.

Only processes of the same user may connect, as to the worker channel. A worker that sends nonsense is dropped. It ends
then, and is started again like any worker that failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..core import stay_messages as messages
from ..core.stay_messages import (
    CloseRun,
    FromWorker,
    GivenRank,
    RoundEnded,
    RunEnded,
    StoreAnswer,
    StoreCall,
    WorkerReady,
)
from ..errors import RoundOver, StoreTimeout, Unreachable
from ..member.store import AsyncStore
from ..member.worker_channel import make_folder, peer_of
from ..member.world import AsyncWorld
from .environment import NodeInRound, of_worker

logger = logging.getLogger("rdzv.launch")

_NAMES = (
    "set", "multi_set", "get", "multi_get", "wait", "check", "add", "append", "compare_set", "delete", "num_keys", "list_keys",
)  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {name: getattr(AsyncStore, name) for name in _NAMES}
"""Calls of a store that a worker may make."""
CALLS_MAX = 64
"""Calls of one worker that may be under way at once; further ones wait."""
LEFT = "the agent has left it"
"""Why a round is over to a worker that is still in it."""


class StayingWorker:
    """One connected worker."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.is_ready = False
        """It waits for the next round."""
        self.local_rank = -1
        self.round = 0
        """The last round that it was given."""
        self._writer = writer

    def send(self, message: msgspec.Struct) -> None:
        with suppress(OSError, RuntimeError):
            self._writer.write(messages.encode(message))


class StayChannel:
    """The socket, and the workers that are connected to it."""

    def __init__(self, count: int, news: Callable[[], None], close_run: Callable[[str], None]) -> None:
        """`news` is called when a worker came, is ready or went; `close_run` when one wants the run to be closed."""
        self.path = ""
        self.workers: dict[int, StayingWorker] = {}
        """By local rank."""
        self._count = count
        self._news = news
        self._close_run = close_run
        self._world: AsyncWorld | None = None
        self._folder: Path | None = None
        self._lock = -1
        """Held for as long as the folder is used: the next agent removes one that was left behind."""
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self) -> str:
        """Listen, and return the path of the socket. Raises OSError."""
        self._folder, self._lock = make_folder()
        path = self._folder / "stay"
        self._server = await asyncio.start_unix_server(self._serve, path)
        path.chmod(0o600)
        self.path = str(path)
        return self.path

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._calls:
            task.cancel()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    # ---- what the agent says

    def drop(self, local_rank: int) -> None:
        """Forget a worker that has ended. A child of its may hold the connection open."""
        self.workers.pop(local_rank, None)

    def give(self, world: AsyncWorld, node: NodeInRound) -> None:
        """Give each worker its rank in the round."""
        self._world = world
        for local_rank, worker in self.workers.items():
            worker.is_ready, worker.round = False, world.round
            mine = {name: value for name, value in of_worker({}, node, local_rank).items() if name in PER_ROUND}
            worker.send(GivenRank(
                node.run_id, node.round, node.ranks.first + local_rank, node.ranks.total, node.fence, node.reason, node.address,
                mine,
            ))  # fmt: skip

    def end_round(self, round: int, reason: str, newcomers: int = 0) -> None:
        """Tell the workers that the round is over, also those that wait in a call of its store."""
        self._world = None
        for task in self._calls:
            task.cancel()
        for worker in self.workers.values():
            if not worker.is_ready:
                worker.send(RoundEnded(round, reason, newcomers))

    def end_run(self, run_id: str, reason: str, success: bool) -> None:
        """Tell the workers that there is no next round."""
        for worker in self.workers.values():
            worker.send(RunEnded(run_id, reason, success))

    # ---- what workers say

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = StayingWorker(writer)
        try:
            _, problem = peer_of(writer.get_extra_info("socket"))
            while not problem:
                problem = await self._hear(worker, await _read(reader))
            logger.warning("a process that says it is a worker of this agent is not heard any longer: %s", problem)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except ValueError as error:
            logger.warning("a process that says it is a worker of this agent is not heard any longer: %s", error)
        except asyncio.CancelledError:
            pass  # The agent ends. asyncio would log a cancelled connection as an error.
        finally:
            if self.workers.get(worker.local_rank) is worker:
                del self.workers[worker.local_rank]
            writer.close()
            self._news()

    async def _hear(self, worker: StayingWorker, said: Any) -> str:
        """Act on a message, and return why the worker may say nothing more."""
        if isinstance(said, WorkerReady):
            if not 0 <= said.local_rank < self._count or worker.local_rank not in (-1, said.local_rank):
                return f"it has local rank {said.local_rank} of {self._count}"
            worker.local_rank = said.local_rank
            self.workers[said.local_rank] = worker
            worker.is_ready = said.left >= worker.round
            self._news()
        elif worker.local_rank < 0:
            return "it does not say which worker it is"
        elif isinstance(said, CloseRun):
            self._close_run(said.reason)
        else:
            await self._start_call(worker, said)
        return ""

    async def _start_call(self, worker: StayingWorker, call: StoreCall) -> None:
        while len(self._calls) >= CALLS_MAX * self._count:
            await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.ensure_future(self._call(call))
        self._calls.add(task)
        # A task that is cancelled before its first step runs none of its own code, but its callbacks.
        task.add_done_callback(partial(self._answer, worker, call))

    async def _call(self, call: StoreCall) -> Any:
        world = self._world
        if world is None or world.round != call.round:
            raise RoundOver(call.round, LEFT)
        return await CALLS[call.name](world.store, *call.arguments)

    def _answer(self, worker: StayingWorker, call: StoreCall, task: asyncio.Task[Any]) -> None:
        """Answer a call that has ended, whatever its end: the worker waits until then."""
        self._calls.discard(task)
        try:
            worker.send(StoreAnswer(call.id, task.result()))
        except asyncio.CancelledError:
            worker.send(StoreAnswer(call.id, error="over", details=[call.round, LEFT]))
        except RoundOver as error:
            worker.send(StoreAnswer(call.id, error="over", details=[error.round_number, error.reason]))
        except StoreTimeout as error:
            worker.send(StoreAnswer(call.id, error="timeout", details=[list(error.keys), error.waited_s, error.round_number]))
        except Unreachable as error:
            worker.send(StoreAnswer(call.id, error="away", details=[error.endpoint, error.problem, error.waited_s]))
        except Exception as error:  # noqa: BLE001  Also a result that cannot be sent, such as a sum beyond 64 bits.
            worker.send(StoreAnswer(call.id, error="wrong", details=[str(error)]))


PER_ROUND = frozenset({
    "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "RDZV_ROUND", "RDZV_FENCE", "RDZV_REASON",
})  # fmt: skip
"""Variables that differ from round to round. A worker that stays sets them anew."""


async def _read(reader: asyncio.StreamReader) -> Any:
    size = messages.size_of(await reader.readexactly(messages.SIZE_BYTES))
    return messages.decode(FromWorker, await reader.readexactly(size))  # type: ignore[arg-type]
