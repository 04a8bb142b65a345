from __future__ import annotations

import asyncio
import re

from rdzv.testing.history import Changed, Fault, Given, History
from support.small_simulation import Small, hold


def busy(seed: int) -> History:
    """Many things at once, so that anything not drawn from the seed shows."""

    async def main(world):
        world.network.loss = 0.01
        for number in range(5):
            world.on(number, hold(world, number, ttl_s=3.0))
        for turn in range(6):
            await asyncio.sleep(4)
            victim = world.nodes[turn % 5]
            world.history.add(Fault(kind="pause", target=victim.name))
            victim.pause()
            world.network.cut(world.nodes[(turn + 1) % 5], world.server)
            await asyncio.sleep(2)
            victim.resume()
            world.history.add(Fault(kind="pause", target=victim.name, stop=True))
            world.network.heal(world.nodes[(turn + 1) % 5], world.server)
            if turn == 3:
                world.server.restart()
            if turn == 4:
                world.nodes[4].crash()

    world = Small(5, seed=seed)
    world.run(main)
    return world.history


def test_the_same_seed_makes_the_same_history():
    histories = [busy(7), busy(7), busy(8)]
    digests = [history.digest() for history in histories]
    assert digests[0] == digests[1] != digests[2]
    assert len(histories[0]) > 20
    assert str(histories[0]) == str(histories[1])


def test_a_history_is_readable():
    history = busy(7)
    lines = str(history).splitlines()
    assert len(lines) == len(history)
    assert any(re.match(r" +\d+\.\d{4} n\d       commit   s0@2 then \+members/n\d$", line) for line in lines)
    assert any("fault    end of pause n1" in line for line in lines)
    assert any("-        commit" in line and "expired -members/" in line for line in lines)
    assert [one.at for one in history] == sorted(one.at for one in history)
    assert history.of(Given) == history.of(Changed) == []
