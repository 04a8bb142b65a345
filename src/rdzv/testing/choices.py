"""The choices in a small world: what each one does, and whom it may strike when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .chosen import ChosenChannel

if TYPE_CHECKING:
    from .small_world import SmallWorld

TARGETS = ("", "m0", "m1", "m2", "m3", "n0")
"""Whom a choice may be about: nobody, a member, or the newcomer."""


class Choice(NamedTuple):
    """One thing that may happen next, and the member that it happens to."""

    verb: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.target}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Return the choice that `str` wrote."""
        verb, _, target = text.rpartition(" ")
        return cls(verb, target) if target in TARGETS else cls(text)


def _reset(kind: str, world: SmallWorld, name: str) -> None:
    """Break the member's connection. A request that is under way is lost with it."""
    world.record(kind, name)
    for connection in world.network.of(name):
        connection.reset()


def _lose_answer(world: SmallWorld, name: str) -> None:
    world.record("lose answer", name)
    world.request_of(name).deliver()
    for connection in world.network.of(name):
        world.loop.call_soon(connection.reset, context=world.loop.outside)


def _hold(world: SmallWorld, name: str) -> None:
    """Hold the request back: it may arrive long after the member has given it up."""
    world.begin("cut requests", name, "release")
    world.held[name] = world.request_of(name)


def _release(world: SmallWorld, name: str) -> None:
    del world.held[name]
    world.end("cut requests", name, "release")


def _crash(world: SmallWorld, name: str) -> None:
    """Kill the process before its kernel has sent what it wrote."""
    for connection in world.network.of(name):
        assert isinstance(connection.requests, ChosenChannel)
        connection.requests.queue.clear()
    _crash_late(world, name)


def _crash_late(world: SmallWorld, name: str) -> None:
    """Kill the process after its request went out, and before the answer comes."""
    world.record("crash", name)
    world.apps[name].node.crash()


def _pause(world: SmallWorld, name: str) -> None:
    """Stop the process. A request that it has sent is served, and the answer waits."""
    world.begin("pause", name, "resume", "resume late")
    if name in world.network.waiting([]):
        world.request_of(name).deliver()
    world.apps[name].node.pause()


def _stall(world: SmallWorld, name: str) -> None:
    """Stop the process for longer than its lease lasts."""
    _pause(world, name)
    lease = world.leases().get(name)
    if lease is not None:
        world.loop.call_soon(world.engine.expire, lease, context=world.loop.outside)


def _resume(world: SmallWorld, name: str) -> None:
    """Let the process go on. It reads its sockets before its timers fire."""
    for connection in world.network.of(name):
        assert isinstance(connection.answers, ChosenChannel)
        while connection.answers.queue:
            connection.answers.deliver()
    _resume_late(world, name)


def _resume_late(world: SmallWorld, name: str) -> None:
    """Let the process go on. Its timers fire before it reads its sockets."""
    world.end("pause", name, "resume", "resume late")
    world.apps[name].node.resume()


def _expire(world: SmallWorld, name: str) -> None:
    lease = world.leases()[name]
    world.record("expire", name)
    world.engine.expire(lease)


def _restart(world: SmallWorld, _name: str) -> None:
    world.record("engine restart", "")
    world.engine.restart()


def _restart_unseen(world: SmallWorld, name: str) -> None:
    """Restart the engine while that member is stopped, so that the others are back before it."""
    _pause(world, name)
    _restart(world, "")


def _host_down(world: SmallWorld, name: str) -> None:
    """Take down the host that serves, with the member that runs on it. The engine comes back empty."""
    _crash(world, name)
    _restart(world, "")


def _gap(world: SmallWorld, _name: str) -> None:
    world.record("watch gap", "")
    world.engine.drop_watches()


def _lead_astray(world: SmallWorld, name: str) -> None:
    """Let the endpoint's name mean another engine to that member, from its next connection on."""
    world.begin("moved", name)
    world.begin("second engine", name, "lead back")
    world.routes[name] = world.second = world.second or world.serve("engine-2")
    for connection in world.network.of(name):
        connection.reset()


def _lead_back(world: SmallWorld, name: str) -> None:
    del world.routes[name]
    world.end("moved", name)
    world.end("second engine", name, "lead back")
    for connection in world.network.of(name):
        connection.reset()


def _sick(world: SmallWorld, name: str) -> None:
    """Let the check of the node fail, and its workers too."""
    world.begin("sick", name, "cure")
    world.apps[name].node.sick = "row remapping failed"
    world.apps[name].command("fail")


def _cure(world: SmallWorld, name: str) -> None:
    world.end("sick", name, "cure")
    world.apps[name].node.sick = ""


def _newcomer(world: SmallWorld, name: str) -> None:
    world.record("newcomer", name)
    world.start(name)


def _respawn(world: SmallWorld, name: str) -> None:
    """Start a process again on the host of one that was killed."""
    world.record("newcomer", "n0")
    world.start("n0", world.apps[name].node.host)


def _order(deed: str, world: SmallWorld, name: str) -> None:
    world.apps[name].command(deed)


# When a fault may strike.
ENGINE, KEY, NEW, DEAD, HOLDING = "engine", "key", "new", "dead", "holding"
REQUEST, REQUEST_OR_QUIET = "request", "request or quiet"


class FaultKind(NamedTuple):
    """A fault, and whom it may strike when."""

    when: str
    strike: Callable[[SmallWorld, str], None]


FAULTS: dict[str, FaultKind] = {
    "lose request": FaultKind(REQUEST, partial(_reset, "lose request")),
    "lose answer": FaultKind(REQUEST, _lose_answer),
    "hold": FaultKind(REQUEST, _hold),
    "crash late": FaultKind(REQUEST, _crash_late),
    "crash": FaultKind(REQUEST_OR_QUIET, _crash),
    "reset": FaultKind(REQUEST_OR_QUIET, partial(_reset, "reset")),
    "pause": FaultKind(REQUEST_OR_QUIET, _pause),
    "stall": FaultKind(REQUEST_OR_QUIET, _stall),
    "expire": FaultKind(KEY, _expire),
    "restart": FaultKind(ENGINE, _restart),
    "restart unseen": FaultKind(REQUEST_OR_QUIET, _restart_unseen),
    "host down": FaultKind(REQUEST_OR_QUIET, _host_down),
    "gap": FaultKind(ENGINE, _gap),
    "lead astray": FaultKind(HOLDING, _lead_astray),
    "sick": FaultKind(HOLDING, _sick),
    "newcomer": FaultKind(NEW, _newcomer),
    "respawn": FaultKind(DEAD, _respawn),
    **{deed: FaultKind(HOLDING, partial(_order, deed)) for deed in ("fail", "leave", "done", "close", "drain", "give up")},
}
"""All faults. The last ones are no faults but things that a member's program does while it holds a round."""

ORDINARY: dict[str, Callable[[SmallWorld, str], None]] = {
    "serve": lambda world, name: world.request_of(name).deliver(),
    "resume": _resume, "resume late": _resume_late, "release": _release, "lead back": _lead_back, "cure": _cure,
}  # fmt: skip
VERBS = ("wait", "rest", *ORDINARY, *FAULTS)
