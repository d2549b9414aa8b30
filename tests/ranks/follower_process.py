"""A follower as a process: `python follower_process.py ADDRESS RANK RANKS sharded|replicated|paged`.

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
from asynchicache.testing.paged import PagedMemory
from ranks.processes import PAGES, TOKEN, config, shard, spec_of


async def main(address: str, rank: int, ranks: int, spec: ModelSpec, *, paged: bool) -> None:
    device = EmulatedDevice(ThreadDriver())
    stream = device.stream("compute")
    loop = asyncio.get_running_loop()
    engine = PagedMemory(spec, PAGES, poison=False) if paged else None
    joining = RankWorker.join(
        spec,
        config(rank, ranks, paged=paged),
        address,
        TOKEN,
        limits=RankLimits(joining=60),
        device=device,
        engine=None if engine is None else engine.memory,
    )
    async with joining as worker:
        tensors = worker.device_tensor if engine is None else engine.tensor
        oracle = ByteOracle(spec, tensors, lambda pool: shard(spec, rank, pool))
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
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), its_spec, paged=sys.argv[4] == "paged"))
