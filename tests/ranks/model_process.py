"""A follower with its part of a model: `python model_process.py MODEL FOLDER`.

Each line of standard input is a job; the answer is a line with the tokens that this rank computed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from asynchicache.ranks.worker import RankWorker
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from ranks.sharded_model import LIMITS, TOKEN, Job, ModelRank, join_model, options, rank_spec


async def main(name: str, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    device = EmulatedDevice(ThreadDriver())
    stream = device.stream("compute")
    joining = RankWorker.join(
        rank_spec(name, 1),
        options(name, folder / "pages"),
        f"unix:{folder / 'group'}",
        TOKEN,
        rank=1,
        limits=LIMITS,
        device=device,
    )
    async with joining as worker:
        await asyncio.to_thread(join_model, folder, 1)
        model = ModelRank(name, 1, worker.device_tensor)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            job = msgspec.json.decode(line, type=Job)
            async with worker.forward(job.step, stream) as copies:
                await copies.landed()
                tokens = await asyncio.to_thread(model.run, job)
            print(msgspec.json.encode(tokens).decode(), flush=True)
    device.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
