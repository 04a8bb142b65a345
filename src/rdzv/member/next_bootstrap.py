"""The bootstrap socket that a member has bound for its next round."""

from __future__ import annotations

import logging

from ..core.model import Head
from ..system import bootstrap
from ..system.bootstrap import Bootstrap
from ..system.node import Node

logger = logging.getLogger("rdzv.member")


class NextBootstrap:
    """One socket at a time: bound before the member announces it, and handed over if the member gets rank 0."""

    def __init__(self, node: Node, ports: tuple[int, int]) -> None:
        self._node = node
        self._ports = ports
        self._warned = False
        self.bound: Bootstrap | None = None
        self.same_port = False
        """No port was free but the one of the round before."""

    @property
    def address(self) -> str:
        """The address to announce."""
        return str(self.bound)

    def bind(self, addr: str, heard: Head | None) -> None:
        """T4.5: bind a new socket, on another port than that of the last round that is known if one is free."""
        self.release()
        former = bootstrap.parse(heard.boot).port if heard is not None and heard.boot else 0
        self.bound = self._node.bind(addr, self._ports, former)
        self.same_port = self.bound.port == former
        if self.same_port and not self._warned:
            self._warned = True
            logger.warning(
                "bootstrap_port %s..%s: no port but %s is free, so this round and the next may have the same address, and "
                "a worker that is late in one could meet workers of the other; give a range with more free ports",
                *self._ports, former,
            )  # fmt: skip

    def take(self, address: str, rank: int) -> Bootstrap:
        """Return the bootstrap of a round that was given: rank 0's own socket, or the address of the round's head."""
        own, self.bound = self.bound, None
        if own is not None and rank == 0:
            return own
        if own is not None:
            own.release()
        return bootstrap.parse(address)

    def release(self) -> None:
        """Close the socket, if one is bound."""
        if self.bound is not None:
            self.bound.release()
            self.bound = None
