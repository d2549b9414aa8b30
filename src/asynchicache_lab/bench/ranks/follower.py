"""A follower of `bench ranks`: `python -m asynchicache_lab.bench.ranks.follower ADDRESS RANK OPTIONS`.

It runs every step of the log as it arrives. A line of standard input is a number of all-reduces to take part
in.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from asynchicache.errors import RankError
from asynchicache.ranks.worker import RankWorker
from asynchicache.streams.base import Stream
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache_lab.bench.ranks.options import RanksOptions
from asynchicache_lab.bench.ranks.setup import LIMITS, TOKEN, Collective, config, model


async def follow(address: str, rank: int, options: RanksOptions) -> None:
    """Follow until standard input ends."""
    loop = asyncio.get_running_loop()
    device = EmulatedDevice(ThreadDriver())
    joining = RankWorker.join(
        model(options),
        config(options, rank, options.ranks),
        address,
        TOKEN,
        limits=LIMITS,
        device=device,
    )
    async with joining as worker:
        forwards = asyncio.create_task(_run_forwards(worker, device.stream("compute")))
        folder = Path(address.removeprefix("unix:")).parent
        collective = await asyncio.to_thread(Collective, folder, rank, options.ranks)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            await asyncio.to_thread(collective.run, int(line))
        await forwards
        collective.close()
    device.close()


async def _run_forwards(worker: RankWorker, stream: Stream) -> None:
    """Run forwards that compute nothing until the leader closes the group."""
    with suppress(RankError):
        for step in count(1):
            async with worker.forward(step, stream) as copies:
                await copies.submitted()
                copies.wait_on(stream, worker.spec.layers - 1)


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=RanksOptions)))
