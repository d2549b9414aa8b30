"""A follower as a process: `python follower_process.py ADDRESS RANK RANKS sharded|replicated`.

Each line of standard input is one forward, as its engine would get it from the leader's: the step, what it
reads, and what it writes. The answer is a line: how many pages that it read are wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys

from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.worker import RankWorker
from asynchicache.specs import ModelSpec
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.oracle import ByteOracle
from ranks.processes import TOKEN, config, shard, spec_of


async def main(address: str, rank: int, ranks: int, spec: ModelSpec) -> None:
    device = EmulatedDevice(ThreadDriver())
    stream = device.stream("compute")
    loop = asyncio.get_running_loop()
    joining = RankWorker.join(
        spec, config(rank, ranks), address, TOKEN, limits=RankLimits(joining=60), device=device
    )
    async with joining as worker:
        oracle = ByteOracle(spec, worker.device_tensor, lambda pool: shard(spec, rank, pool))
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
    its_spec = spec_of(replicated=sys.argv[4] == "replicated")
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), its_spec))
