"""Flags of a replay: pools, sizes and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from asynchicache.errors import ConfigError
from asynchicache.options import CommandOptions, Natural, Positive, Share, about, check_folder
from asynchicache.planner.checkpoints import DEFAULT_WORDS, CheckpointPolicy
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.policies import EVICTION, policy


class ReplayOptions(CommandOptions, frozen=True):
    """The flags of `replay`."""

    trace: Annotated[
        str, about("a trace: JSON with one request a line, plain or packed", positional=True)
    ] = ""
    pools: Annotated[str, about("pools of the model, joined by commas: kv, then any of mamba, swa, dsa")] = (
        "kv"
    )
    capacity_share: Annotated[
        str, about("device slots as a share of the working set; or by pool: kv=0.25,mamba=0.1")
    ] = "1.0"
    host_share: Annotated[str, about("host slots, in the same form")] = "0"
    memory_share: Annotated[
        Share, about("one device memory for all pools, as a share of what the trace's kv takes; 0: by slots")
    ] = 0.0
    state_tokens: Annotated[Positive, about("tokens whose kv takes as many bytes as a state")] = 1600
    policy: Annotated[
        str, about("eviction policy of attention pages: size, lru, fifo, or package.module:Class")
    ] = EVICTION
    write_policy: Annotated[
        Literal["write_through", "write_through_selective", "write_back"],
        about("when pages are backed up to the host"),
    ] = "write_through"
    checkpoint: Annotated[
        str, about("where states are kept: prompt, output, branch, a spacing in tokens, joined by +; or none")
    ] = DEFAULT_WORDS
    window: Annotated[Positive, about("tokens of the sliding window, for swa")] = 1024
    block_size: Annotated[Natural, about("tokens of a block, for traces that do not state it")] = 0
    chain_ids: Annotated[bool, about("make ids that stand for one block stand for all before it too")] = False
    page_size: Annotated[Natural, about("tokens of a page; 0: a block of the trace")] = 0
    outputs: Annotated[bool, about("cache outputs, which the next prompt of a session repeats")] = False
    tails: Annotated[bool, about("let prefixes end inside a page, see the option tails")] = False
    compare: Annotated[bool, about("replay with all of --compare-policies and --compare-shares")] = False
    compare_policies: Annotated[str, about("for --compare: policies, joined by commas")] = "size,lru"
    compare_shares: Annotated[
        str, about("for --compare: memories, as shares of what the trace's kv takes, joined by commas")
    ] = "0.01,0.02,0.05,0.1,0.25,0.5,1"
    target: Annotated[Share, about("for --compare: advise memory for this share of the best hit rate")] = 0.95
    report: Annotated[str, about("for --compare: write the curves to this HTML file")] = ""
    seed: int = 0

    def check(self) -> None:
        synthetic_spec(1, self.names)
        self.shares()
        CheckpointPolicy.parse(self.checkpoint)
        policy(self.policy)
        for name in self.policies:
            policy(name)
        if self.by_token and "swa" in self.names:
            raise ConfigError("--page-size, --outputs and --tails: not with a sliding window (swa)")
        if not all(self.memory_shares):
            raise ConfigError(f"--compare-shares {self.compare_shares}: must be above 0 and at most 1")
        if self.report:
            check_folder("--report", Path(self.report).parent)

    @property
    def by_token(self) -> bool:
        """Whether the trace is played token by token, and not block by block."""
        return bool(self.page_size or self.outputs or self.tails)

    @property
    def names(self) -> tuple[str, ...]:
        """The pools."""
        return tuple(self.pools.split(","))

    @property
    def policies(self) -> list[str]:
        """The policies of a comparison."""
        return self.compare_policies.split(",")

    @property
    def memory_shares(self) -> list[float]:
        """The memories of a comparison, ascending."""
        return sorted(_share("--compare-shares", text) for text in self.compare_shares.split(","))

    def shares(self) -> dict[str, tuple[float, float]]:
        """Device and host shares of each pool that does not share another pool's slots.

        Raises:
            ConfigError: a share is not a number, breaks its rule, or names an unknown pool.
        """
        names = [pool.name for pool in synthetic_spec(1, self.names).owners]
        device = _shares("--capacity-share", self.capacity_share, names)
        host = _shares("--host-share", self.host_share, names)
        for name, share in device.items():
            if not share:
                raise ConfigError(f"--capacity-share {self.capacity_share}: {name!r} must be above 0")
        return {name: (device[name], host[name]) for name in names}

    def checkpoints(self, block_size: int) -> CheckpointPolicy:
        """The checkpoint policy, with its spacing in blocks.

        Raises:
            ConfigError: the spacing is not a whole number of blocks.
        """
        policy = CheckpointPolicy.parse(self.checkpoint)
        policy.check(block_size)
        return CheckpointPolicy(policy.prompt, policy.output, policy.branch, policy.spacing // block_size)


def _shares(flag: str, text: str, names: list[str]) -> dict[str, float]:
    """Parse `0.5` for all pools, or `kv=0.5,mamba=0.1`; other pools get all the slots they need."""
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
