"""How a group forms: every rank says what it is, and the leader answers with the sizes of all. Sans-IO.

Sizes are the least that any rank has memory for, so that a slot number means the same on every rank. What all
ranks must agree on is compared by name, and an error names the rank and the field.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from types import MappingProxyType

from asynchicache.config import CacheConfig
from asynchicache.errors import RankError
from asynchicache.ranks.host_sizes import HostNeed, SlotCounts, fitted
from asynchicache.ranks.messages import PROTOCOL, Hello
from asynchicache.ranks.sharing import sharing_ranks
from asynchicache.specs import ModelSpec


def build_of(spec: ModelSpec, config: CacheConfig, *, engine: bool = False) -> dict[str, str]:
    """What every rank of a group must agree on, by name. `engine`: an engine owns the device memory."""
    return {
        "library version": version("asynchicache"),
        "model": spec.model,
        "page_size": str(spec.page_size),
        "pools that own slots": ", ".join(sorted(pool.name for pool in spec.owners)),
        "weight_version": str(config.weight_version),
        "salt": sha256(config.salt.encode()).hexdigest()[:16],  # a hash: an error names both values
        "host_layout": str(config.host_layout),
        "ranks": str(config.ranks),
        "division": str(spec.place),
        "store_parts": str(config.store_parts),
        "device memory": "an engine's" if engine else "the cache's",
    }


class Members:
    """The ranks that have joined so far.

    Args:
        token: the group's secret.
        build: of the leader.
        slots: of the leader.
        ranks: how many ranks the group has, the leader included.
        need: what the slots of the leader cost of the memory of its host.
        parts: `parts.rank_parts` of the leader.
        engine: the device slots are pages of an engine's, which the leader names: every rank needs them all.
    """

    def __init__(
        self,
        token: str,
        build: Mapping[str, str],
        slots: SlotCounts,
        ranks: int,
        need: HostNeed = HostNeed(),  # noqa: B008 - immutable
        parts: Mapping[str, tuple[str, bool]] = MappingProxyType({}),
        *,
        engine: bool = False,
    ) -> None:
        self._token = token
        self._build = build
        self._slots = slots
        self._ranks = ranks
        self._need = need
        self._engine = engine
        self._joined: dict[int, Hello] = {}
        self._parts: dict[int, Mapping[str, tuple[str, bool]]] = {}
        self._writers: dict[tuple[str, str], int] = {}
        self._keep(0, parts)

    def admits(self, hello: Hello) -> bool:
        """Whether the sender knows the group's secret. Others are refused and change nothing."""
        return hmac.compare_digest(hello.token.encode(), self._token.encode())

    def join(self, hello: Hello) -> None:
        """
        Raises:
            RankError: the rank does not fit the group; names it and the rule.
        """
        rank = hello.rank
        if hello.protocol != PROTOCOL:
            raise RankError(f"rank {rank} speaks protocol {hello.protocol}, this group {PROTOCOL}")
        if not 0 < rank < self._ranks:
            raise RankError(f"rank {rank} is none of the followers 1 to {self._ranks - 1} of this group")
        if rank in self._joined:
            raise RankError(f"rank {rank} joined twice")
        for name in sorted(self._build.keys() | hello.build.keys()):
            ours, theirs = self._build.get(name), hello.build.get(name)
            if ours != theirs:
                raise RankError(f"rank {rank} differs from rank 0 in {name}: {theirs!r}, not {ours!r}")
        if hello.slots.keys() != self._slots.keys():
            raise RankError(
                f"rank {rank} has slots of {sorted(hello.slots)}, rank 0 of {sorted(self._slots)}"
            )
        for name, (pages, _) in self._slots.items():
            given = hello.slots[name][0]
            if self._engine and given < pages:
                raise RankError(f"rank {rank} has {given} pages of {name!r}; rank 0 names any of {pages}")
        self._keep(rank, hello.parts)
        self._joined[rank] = hello

    def _keep(self, rank: int, parts: Mapping[str, tuple[str, bool]]) -> None:
        """Note who writes what. Two ranks that write other bytes to the same keys would read each other's.

        Raises:
            RankError: another rank writes the same part.
        """
        self._parts[rank] = parts
        for pool, (part, writes) in parts.items():
            writer = self._writers.setdefault((pool, part), rank) if writes else rank
            if writer != rank:
                raise RankError(
                    f"rank {rank} keeps the same part of pool {pool!r} as rank {writer} ({part}), and both "
                    "write it: give each rank its own part (ModelSpec.shard of the whole model, or the "
                    "options rank and ranks), or say that the pool is the same on all ranks (replicated)"
                )

    def _check_copies(self) -> None:
        """
        Raises:
            RankError: a rank has a copy of a part that no rank writes.
        """
        for rank, parts in sorted(self._parts.items()):
            for pool, (part, _) in parts.items():
                if (pool, part) not in self._writers:
                    raise RankError(
                        f"rank {rank} has a copy of a part of pool {pool!r} that no rank writes: {part}"
                    )

    @property
    def missing(self) -> Sequence[int]:
        return [rank for rank in range(1, self._ranks) if rank not in self._joined]

    def sharing(self, leader: str) -> dict[int, list[int]]:
        """By rank, those that share host memory with it; `leader`: the key of rank 0."""
        return sharing_ranks({0: leader} | {rank: hello.shares for rank, hello in self._joined.items()})

    def agreed(self, sharing: Mapping[int, Sequence[int]]) -> dict[str, tuple[int, int]]:
        """The least slots of all ranks, by pool and tier, as many as each host has memory for; none on the
        device if engines own that. `sharing`: what the method returns, or nothing.

        Raises:
            RankError: the memory of a host does not suffice for what was chosen; names its ranks. Or no rank
                writes a part; names one that has a copy.
        """
        self._check_copies()
        every = [self._slots, *(hello.slots for hello in self._joined.values())]
        least = {
            name: (min(one[name][0] for one in every), min(one[name][1] for one in every))
            for name in self._slots
        }
        needs = {0: self._need} | {rank: hello.need for rank, hello in self._joined.items()}
        fit = fitted(least, needs, sharing)
        return {name: (0, host) for name, (_, host) in fit.items()} if self._engine else fit
