"""How many slots each pool gets, worked out without taking any memory."""

from asynchicache import CacheConfig, CapacityError, Coverage, ModelSpec, PoolSpec, TensorSpec
from asynchicache.pools.balance import advise_split, find_undersized_pools
from asynchicache.pools.sizing import FreeMemory, plan_slots

ATTENTION, RECURRENT = tuple(range(3, 48, 4)), tuple(n for n in range(48) if n % 4 != 3)
SPEC = ModelSpec(  # the shapes of a Qwen3-Next with 48 layers
    "hybrid",
    page_size=64,
    layers=48,
    pools=(
        PoolSpec(
            "kv",
            (
                TensorSpec("keys", ATTENTION, (2, 256), "bfloat16"),
                TensorSpec("values", ATTENTION, (2, 256), "bfloat16"),
            ),
        ),
        PoolSpec(
            "mamba",
            (
                TensorSpec("conv", RECURRENT, (8192, 4), "bfloat16"),
                TensorSpec("recurrent", RECURRENT, (32, 128, 128), "float32"),
            ),
            coverage=Coverage(1),
            per_token=False,
        ),
    ),
)
MACHINE = FreeMemory(device=80 << 30, host=512 << 30, shared=False)  # bytes that are free

CHOICES = {
    "automatic": CacheConfig(),
    "bytes": CacheConfig(device_bytes=40 << 30, host_bytes=200 << 30),
    "slots": CacheConfig(device_slots={"kv": 20_000, "mamba": 300}, host_ratio=4),
    "states on the device only": CacheConfig(device_bytes=40 << 30, host_slots={"mamba": 0}),
}

for pool in SPEC.pools:
    print(f"a slot of {pool.name} takes {pool.slot_bytes(SPEC.page_size):,} bytes")
for name, config in CHOICES.items():
    print(name)
    for owner, (device, host) in plan_slots(SPEC, config, MACHINE).items():
        print(f"  {owner}: {device:,} slots on the device, {host:,} on the host")
starved = CacheConfig(device_slots={"kv": 20_000, "mamba": 300}, host_ratio=4, host_slots={"mamba": 0})
for warning in find_undersized_pools(SPEC, plan_slots(SPEC, starved, MACHINE)):
    print(warning)
print(advise_split(SPEC, {"kv": (20_032, 0), "mamba": (313, 0)}, 16_384, CacheConfig()))
try:
    plan_slots(SPEC, CacheConfig(device_slots={"kv": 60_000, "mamba": 300}), MACHINE)
except CapacityError as error:
    print(error)
