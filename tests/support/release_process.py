"""A member of whichever release PYTHONPATH names: `python release_process.py ENDPOINT RUN_ID MIN:MAX [SETTING=VALUE...]`.

It uses the public API only, which every release has, and prints each event as a line of JSON. In each round it uses every
operation of the store together with the other members, unless it is given `store=no`. SIGUSR1 means that its work is done;
SIGTERM, that it should leave.
"""

import asyncio
import json
import signal
import sys

import rdzv
from rdzv.aio import AsyncRendezvous
from rdzv.errors import Closed, Drained, Evicted, RdzvError, RoundOver


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)  # noqa: T201


def say_world(world, store):
    names = ("incarnation", "round", "fence", "rank", "size", "digest")
    fields = {name: getattr(world, name) for name in names}
    era = [world.era.level, world.era.id]
    say("world", run=world.run_id, era=era, bootstrap=str(world.bootstrap), store=store, reason=world.reason, **fields)


def say_notice(notice):
    say("notice", kind=notice.kind, round=notice.round, reason=notice.reason)


async def use_store(world):
    """Use the store with all members of the round; the result is the same for each of them."""
    store, rank, ranks = world.store, world.rank, range(world.size)
    store.set_timeout(30)
    await store.set(f"set/{rank}", f"{rank}")
    got = [(await store.get(f"set/{other}")).decode() for other in ranks]
    await store.add("count", rank + 1)
    await store.append("appended", f"{rank};")
    await store.compare_set("winner", "", f"{rank}")
    await store.multi_set({f"multi/{rank}/{number}": f"{number}" for number in range(3)})
    gone = f"gone/{rank}"
    await store.set(gone, "")
    deleted = [await store.delete(gone), await store.delete(gone)]
    await store.add("finished", 1)
    await store.set(f"finished/{rank}", "")
    await store.wait([f"finished/{other}" for other in ranks])
    return {
        "got": got,
        "count": await store.add("count", 0),
        "appended": (await store.get("appended")).decode(),
        "winner": (await store.get("winner")).decode(),
        "lost": (await store.compare_set("winner", "nobody", "me")).decode(),
        "multi": [one.decode() for one in await store.multi_get([f"multi/{other}/2" for other in ranks])],
        "deleted": deleted,
        "there": [await store.check(["winner", "count"]), await store.check(["winner", "missing"])],
        "keys": sorted(await store.list_keys()),
        "members": len(await world.members()),
    }


async def first_of(stop, coroutine):
    """Return the coroutine's result; None: `stop` came first."""
    work, stopped = asyncio.ensure_future(coroutine), asyncio.ensure_future(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait([work])
        return None
    return work.result()


async def take_part(rendezvous, stop, done, with_store):
    while not stop.is_set():
        try:
            world = await first_of(stop, rendezvous.join())
            if world is None:
                return
            try:
                store = await use_store(world) if with_store else {}
            except RoundOver:
                store = None
            say_world(world, store)
            await first_of(done, first_of(stop, rendezvous.wait_changed()))
            if done.is_set():
                await rendezvous.done()
                await first_of(stop, rendezvous.wait_changed())
            change = rendezvous.changed
            if change is not None:
                say("changed", kind=str(change.kind.value), round=world.round, reason=change.reason)
        except Evicted as evicted:
            say("changed", kind="evicted", round=0, reason=evicted.reason)


async def main(endpoint, run_id, nnodes, *settings):
    low, _, high = nnodes.partition(":")
    say("code", path=rdzv.__file__, version=rdzv.__version__)
    stop, done = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, done.set)
    options = dict(setting.split("=", 1) for setting in settings)
    with_store = options.pop("store", "yes") == "yes"
    options |= {"run_id": run_id, "min_nodes": low, "max_nodes": high}
    try:
        async with AsyncRendezvous(endpoint, observer=say_notice, **options) as rendezvous:
            await take_part(rendezvous, stop, done, with_store)
    except Closed as closed:
        say("closed", success=closed.success, reason=closed.reason)
    except Drained as drained:
        say("drained", reason=str(drained))
    except RdzvError as error:
        say("refused", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
