"""The bootstrap socket that a member has bound for its next round."""

from __future__ import annotations

import logging

from ..core.model import Head
from ..system import bootstrap
from ..system.bootstrap import Bootstrap
from ..system.node import Node

logger = logging.getLogger("rdzv.member")


class NextBootstrap:
    """Bound before the member announces it, and handed over if the member gets rank 0."""

    def __init__(self, node: Node, ports: tuple[int, int]) -> None:
        self._node = node
        self._ports = ports
        self._warned = False
        self._bound: list[Bootstrap] = []
        """The socket to announce is the last. One before it was announced earlier, and a seal may have taken it."""
        self.same_port = False
        """No port was free but the one of the round before."""

    @property
    def address(self) -> str:
        """The address to announce; empty: none is bound."""
        return str(self._bound[-1]) if self._bound else ""

    def bind(self, addr: str, heard: Head | None, *, keep: bool = False) -> None:
        """T4.5: bind a new socket, on another port than that of the last round that is known if one is free.

        `keep` the former one until a round is given: it was announced, and a leader may be sealing with it.
        """
        if not keep:
            self.release()
        former = bootstrap.parse(heard.boot).port if heard is not None and heard.boot else 0
        self._bound.append(self._node.bind(addr, self._ports, former))
        self.same_port = self._bound[-1].port == former
        if self.same_port and not self._warned:
            self._warned = True
            logger.warning(
                "bootstrap_port %s..%s: no port but %s is free, so this round and the next may have the same address, and "
                "a worker that is late in one could meet workers of the other; give a range with more free ports",
                *self._ports, former,
            )  # fmt: skip

    def take(self, address: str, rank: int) -> Bootstrap:
        """Return the bootstrap of a round that was given: rank 0's own socket, or the address of the round's head."""
        taken = bootstrap.parse(address)
        for one in self._bound if rank == 0 else ():
            if str(one) == address:
                taken = one
        self._bound = [one for one in self._bound if one is not taken]
        self.release()
        return taken

    def release(self) -> None:
        """Close what is bound."""
        for one in self._bound:
            one.release()
        self._bound.clear()
