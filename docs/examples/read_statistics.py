"""What a cache says about itself."""

import asyncio

from toy import SPEC, Toy

from asynchicache import CacheConfig, CacheStatistics, HybridCache


def show(statistics: CacheStatistics) -> None:
    served = statistics.served
    rate = sum(served.hit_tokens.values()) / served.prompt_tokens
    print(f"{served.requests} requests, hit rate {rate:.0%}")
    for tier, tokens in served.hit_tokens.items():
        print(f"  {tokens} tokens came from {tier.name.lower()}")
    for reason, requests in served.reasons.items():
        if requests:
            print(f"  {requests} requests ended with reason {reason.value}")
    for pool, (device, host) in statistics.occupancy.items():
        print(f"{pool}: {device.held} of {device.capacity} slots are held on the device")
        print(f"{pool}: {host.held} of {host.capacity} slots are held on the host")
    planner, traffic = statistics.planner, statistics.traffic
    print(f"{planner.backed_up} went to the host, {planner.host_pressure} found no room there")
    print(f"{planner.demoted} pages live on in a lower tier, {planner.lost} are gone")
    shed = {reason.value: count for reason, count in traffic.shed.items()}
    print(f"{traffic.stored} went to storage; not stored, by reason: {shed}")
    for pool, calls in statistics.storage.items():
        print(f"{pool} in storage: {calls.get.pages} read, breaker {calls.breaker.value}")


async def main() -> None:
    options = CacheConfig(
        device_slots={"kv": 12, "mamba": 4}, host_ratio=1, storage="memory", weight_version="1"
    )
    async with HybridCache.open(SPEC, options) as cache:
        toy = Toy(cache)
        for start in (0, 100, 200, 300, 0, 100, 0):
            await toy.serve(range(start, start + 22))
        show(cache.statistics())


asyncio.run(main())
