"""What a replay is asked for: which pools, how large, and by which policies."""

from __future__ import annotations

from dataclasses import dataclass

from asynchicache.bench.options import check_minimums, option
from asynchicache.bench.synthetic import synthetic_spec
from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.tree.policies import POLICIES
from asynchicache.types import WritePolicy


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The flags of `replay`."""

    trace: str = option("", "requests, one a line: JSONL, packed by gzip or not", positional=True)
    pools: str = option("kv", "pools of the model: kv, then any of mamba, swa, dsa, joined by commas")
    capacity_share: str = option(
        "1.0", "device slots, as a share of what the trace would fill; or by pool: kv=0.25,mamba=0.1"
    )
    host_share: str = option("0", "host slots, in the same way")
    policy: str = option("lru", "who is evicted first, of attention pages", choices=POLICIES)
    write_policy: str = option(
        "write_through", "when pages go to the host", choices=[policy.value for policy in WritePolicy]
    )
    checkpoint: str = option(
        "prompt+branch", "where states are kept: prompt, branch, a spacing in tokens, joined by +; or none"
    )
    window: int = option(1024, "tokens of the sliding window, for swa", minimum=1)
    block_size: int = option(
        0, "tokens of a block, for traces whose lines do not say it; 0: they do", minimum=0
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)
        synthetic_spec(1, self.names)
        self.shares()
        CheckpointPolicy.parse(self.checkpoint)

    @property
    def names(self) -> tuple[str, ...]:
        """The pools."""
        return tuple(self.pools.split(","))

    def shares(self) -> dict[str, tuple[float, float]]:
        """Of each pool that has slots of its own, the shares that device and host hold.

        Raises:
            ConfigError: a share is no number, outside its rule, or of a pool that is not there.
        """
        names = [pool.name for pool in synthetic_spec(1, self.names).owners]
        device = _shares("--capacity-share", self.capacity_share, names)
        host = _shares("--host-share", self.host_share, names)
        for name, share in device.items():
            if not share:
                raise ConfigError(f"--capacity-share {self.capacity_share}: {name!r} must be above 0")
        return {name: (device[name], host[name]) for name in names}

    def checkpoints(self, block_size: int) -> CheckpointPolicy:
        """Where states are kept, with the spacing in blocks.

        Raises:
            ConfigError: the spacing is not whole blocks.
        """
        policy = CheckpointPolicy.parse(self.checkpoint)
        policy.check(block_size)
        return CheckpointPolicy(policy.prompt, policy.output, policy.branch, policy.spacing // block_size)


def _shares(flag: str, text: str, names: list[str]) -> dict[str, float]:
    """`0.5` for all, or `kv=0.5,mamba=0.1`; pools that are not named have all they need."""
    if "=" not in text:
        return dict.fromkeys(names, _share(flag, text))
    shares = dict.fromkeys(names, 1.0)
    for part in text.split(","):
        name, _, share = part.partition("=")
        if name not in shares:
            raise ConfigError(
                f"{flag} {text}: {name!r} is none of the pools with slots of their own, {names}"
            )
        shares[name] = _share(flag, share)
    return shares


def _share(flag: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: must be a number, or numbers by pool: kv=0.5,mamba=0.1") from None
    if not 0 <= share <= 1:
        raise ConfigError(f"{flag} {text}: must be at most 1, where everything fits, and not below 0")
    return share
