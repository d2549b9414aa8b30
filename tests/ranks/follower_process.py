"""A follower as a process: `python follower_process.py ADDRESS RANK RANKS`.

Each line of standard input is one forward, as its engine would get it from the leader's: the step, what it
reads, and what it writes. The answer is a line: how many pages that it read are wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys

from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.worker import RankWorker
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.oracle import ByteOracle
from ranks.processes import SPEC, TOKEN, config, shard


async def main(address: str, rank: int, ranks: int) -> None:
    device = EmulatedDevice(ThreadDriver())
    stream = device.stream("compute")
    loop = asyncio.get_running_loop()
    joining = RankWorker.join(
        SPEC, config(rank, ranks), address, TOKEN, limits=RankLimits(joining=60), device=device
    )
    async with joining as worker:
        oracle = ByteOracle(SPEC, worker.device_tensor, lambda pool: shard(rank, pool))
        print("joined", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            forward = json.loads(line)
            wrong = 0
            async with worker.forward(forward["step"], stream) as applied:
                await applied.landed()
                for pool, slots, digests in forward["reads"]:
                    wrong += oracle.count_wrong(pool, slots, [bytes.fromhex(one) for one in digests])
                for pool, slots, digests in forward["writes"]:
                    oracle.write(pool, slots, [bytes.fromhex(one) for one in digests])
            print(wrong, flush=True)
    device.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
