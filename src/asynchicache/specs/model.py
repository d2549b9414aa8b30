"""A model as the pools that its cache consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from asynchicache.errors import ConfigError
from asynchicache.specs.huggingface import describe
from asynchicache.specs.identity import HuggingFaceConfig
from asynchicache.specs.pools import PoolSpec


@dataclass(frozen=True)
class ModelSpec:
    """The pools of one model, cut into pages of `page_size` tokens.

    Attributes:
        model: a name for people and for the fingerprint, e.g. `qwen3_5`.
        page_size: tokens of a page.
        layers: layers of the model, those without a cache included.
        pools: the first covers all pages; the others follow it.
        identity: whatever else makes cached bytes differ (head counts, rope, ...), for the fingerprint.
    """

    model: str
    page_size: int
    layers: int
    pools: tuple[PoolSpec, ...]
    identity: str = ""
    _by_name: dict[str, PoolSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_page_size(self.page_size)
        if not self.pools or self.pools[0].coverage.trailing:
            raise ConfigError(f"model {self.model!r}: the first pool must cover every page")
        by_name = {pool.name: pool for pool in self.pools}
        if len(by_name) != len(self.pools):
            raise ConfigError(f"model {self.model!r}: pool names {list(by_name)} must be unique")
        object.__setattr__(self, "_by_name", by_name)
        for pool in self.pools:
            self._check_layers(pool)
            self._check_sharing(pool)

    @classmethod
    def from_config(
        cls,
        config: HuggingFaceConfig,
        *,
        page_size: int = 64,
        dtype: str | None = None,
        model: str | None = None,
    ) -> ModelSpec:
        """The spec of a model that transformers runs with a `DynamicCache`.

        Args:
            config: of a decoder, or a composite one whose `get_text_config` names the decoder.
            page_size: tokens of a page.
            dtype: what the model computes in, e.g. `bfloat16`; by default the configuration's own,
                and float32 if it names none.
            model: the name in fingerprints; by default the configuration's model type.

        Raises:
            UnsupportedModelError: a layer leaves something that no pool describes; names both.
            ConfigError: the configuration contradicts itself.
        """
        _check_page_size(page_size)
        found = describe(config, page_size, dtype=dtype)
        return cls(model or found.model, page_size, found.layers, found.pools, found.identity)

    def pool(self, name: str) -> PoolSpec:
        return self._by_name[name]

    @cached_property
    def owners(self) -> tuple[PoolSpec, ...]:
        """The pools that have slots of their own."""
        return tuple(pool for pool in self.pools if pool.slots_of is None)

    def _check_layers(self, pool: PoolSpec) -> None:
        last = max(tensor.layers[-1] for tensor in pool.tensors)
        if last >= self.layers:
            raise ConfigError(f"pool {pool.name!r} names layer {last}; the model has {self.layers}")

    def _check_sharing(self, pool: PoolSpec) -> None:
        if pool.slots_of is None:
            return
        owner = self._by_name.get(pool.slots_of)
        if owner is None or owner.slots_of is not None or not _same_slots(owner, pool):
            raise ConfigError(
                f"pool {pool.name!r} shares slots of {pool.slots_of!r}, which must own slots "
                "and cover the same pages"
            )


def _same_slots(owner: PoolSpec, pool: PoolSpec) -> bool:
    return owner.coverage == pool.coverage and owner.per_token == pool.per_token


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ConfigError(f"page_size {page_size} must be 1 at least")
