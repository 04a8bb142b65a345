"""What an agent does, as a process of its own: `python agent.py ENDPOINT RUN_ID MIN:MAX [SETTING=VALUE...]`.

It prints what `rdzv join --json` prints, and keeps its bootstrap socket, so that
others can try whether the address works. It imports no more than it needs: hundreds of these are started at once.
"""

import asyncio
import logging
import sys

from rdzv.aio import AsyncRendezvous
from rdzv.cli.exit_codes import sentences
from rdzv.cli.launcher import Stop
from rdzv.cli.output import Printer
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.errors import Evicted


async def main(endpoint: str, run_id: str, nnodes: str, *settings: str) -> None:
    low, _, high = nnodes.partition(":")
    voice, stop = Printer(as_json=True), Stop()
    options = dict(setting.split("=", 1) for setting in settings)
    async with AsyncRendezvous(
        endpoint, run_id=run_id, min_nodes=low, max_nodes=high or low, observer=voice.notice, **options
    ) as rendezvous:
        while stop.signal is None:
            try:
                world = await stop.unless(rendezvous.join())
                if world is not None:
                    voice.world(world)
                    change = await stop.unless(rendezvous.wait_changed())
                    if change is not None:
                        voice.changed(world.round, change)
            except Evicted as evicted:
                voice.changed(0, Change(ChangeKind.EVICTED, evicted.reason))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("rdzv.notices").disabled = True  # They are printed.
    with sentences():
        asyncio.run(main(*sys.argv[1:]))
