"""One member as a process: `python member_process.py ENDPOINT RUN_ID MIN:MAX [SETTING=VALUE...]`.

It prints what `rdzv join --json` prints, but keeps its bootstrap socket, so that a test can connect to the address. It imports
no more than it needs, because tests start hundreds of these at once.
"""

import asyncio
import logging
import signal
import sys
from functools import partial

from rdzv.aio import AsyncRendezvous
from rdzv.cli.exit_codes import exit_on_error
from rdzv.cli.launcher import Printer, StopSignal
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.errors import Evicted


async def main(endpoint: str, run_id: str, nnodes: str, *settings: str) -> None:
    low, _, high = nnodes.partition(":")
    printer, stop = Printer(as_json=True), StopSignal()
    printer.ends = partial(stop.set, signal.SIGPIPE)
    options = dict(setting.split("=", 1) for setting in settings)
    async with AsyncRendezvous(
        endpoint, run_id=run_id, min_nodes=low, max_nodes=high or low, observer=printer.notice, **options
    ) as rendezvous:
        while stop.signal is None:
            try:
                world = await stop.run_until(rendezvous.join())
                if world is not None:
                    printer.world(world)
                    change = await stop.run_until(rendezvous.wait_changed())
                    if change is not None:
                        printer.changed(world.round, change)
            except Evicted as evicted:
                printer.changed(0, Change(ChangeKind.EVICTED, evicted.reason))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("rdzv").disabled = True  # This process prints them.
    with exit_on_error():
        asyncio.run(main(*sys.argv[1:]))
