"""`RendezvousInfo.store`: a `torch.distributed.Store` over the round's store, which also does what torch's agent needs.

Any code of torch takes it: `PrefixStore`, `init_process_group`, and C++ code behind them. Only the keys of torch's agent, its
workers' ranks and its last barrier, are handled by `agent_store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

from ..blocking import Store
from .agent_store import AgentStore
from .dist_store import OwnedStore

AGENT = "torchelastic/"  # The beginning of all keys of torch's agent.


class InfoStore(OwnedStore):
    """The store of one round. The handler keeps it alive: torch may hold only its C++ half."""

    def __init__(self, agent: AgentStore, space: Store, timeout: timedelta | None = None) -> None:
        self._agent = agent
        super().__init__(space, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._agent.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        (self._agent.multi_set if _are_agents(keys) else super().multi_set)(keys, values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return (self._agent.multi_get if _are_agents(keys) else super().multi_get)(keys)

    def add(self, key: str, amount: int) -> int:
        return (self._agent.add if _are_agents([key]) else super().add)(key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        (self._agent.wait if _are_agents(keys) else super().wait)(keys, timeout)


def _are_agents(keys: Iterable[str]) -> bool:
    return any(key.startswith(AGENT) for key in keys)
