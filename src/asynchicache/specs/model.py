"""The pools of a model's cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from asynchicache.errors import ConfigError, UnknownPoolError
from asynchicache.options import check_fields
from asynchicache.specs.huggingface import describe
from asynchicache.specs.identity import HuggingFaceConfig
from asynchicache.specs.pools import PoolSpec
from asynchicache.specs.sharding import WHOLE, Axis, Shard, shard_pools, stage_layers, tensor_places
from asynchicache.specs.variants import draft_pools, quantise
from asynchicache.types import check_number


class Division(NamedTuple):
    """The model that the pools of a rank are a part of.

    Attributes:
        whole: the model.
        place: the rank's.
        layers, stripe: as given to `ModelSpec.shard`.
    """

    whole: ModelSpec
    place: Shard
    layers: range | None
    stripe: str

    def axes(self, number: int, parts: int) -> dict[str, Any]:
        """Arguments of `ModelSpec.shard` for the same place in a group of another tensor-parallel size."""
        pp, cp = tuple(self.place.pp), tuple(self.place.cp)
        return {"tp": (number, parts), "pp": pp, "cp": cp, "layers": self.layers, "stripe": self.stripe}


class StoredPartSpec(NamedTuple):
    """A part that pages are stored as.

    Attributes:
        spec: the pools of a rank that has only this part.
        rows: by pool and tensor, the rows along the first dimension that the part is in the larger rank's.
    """

    spec: ModelSpec
    rows: Mapping[str, Mapping[str, Sequence[int]]]


@dataclass(frozen=True)
class ModelSpec:
    """The pools of one model, in pages of `page_size` tokens.

    Attributes:
        model: name of the model, for people and for the fingerprint, e.g. `qwen3_5`.
        page_size: tokens per page.
        layers: number of layers, including layers without a cache.
        pools: the pools; the first covers all pages, and the others depend on it. Empty pools are dropped.
        identity: everything else that affects cached bytes (head counts, rope, ...), for the fingerprint.
    """

    model: str
    page_size: int
    layers: int
    pools: tuple[PoolSpec, ...]
    identity: str = ""
    _division: Division | None = field(default=None, repr=False, compare=False)
    _by_name: dict[str, PoolSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, f"model {self.model!r}: ")
        _check_page_size(self.page_size)
        object.__setattr__(self, "pools", tuple(pool for pool in self.pools if pool.tensors))
        if not self.pools or self.pools[0].coverage.trailing:
            raise ConfigError(f"model {self.model!r}: the first pool must cover every page")
        by_name = {pool.name: pool for pool in self.pools}
        if len(by_name) != len(self.pools):
            raise ConfigError(f"model {self.model!r}: pool names {list(by_name)} must be unique")
        object.__setattr__(self, "_by_name", by_name)
        for pool in self.pools:
            self._check_layers(pool)
            pool.slot_bytes(self.page_size)  # refuses a page that ends within an entry
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
        """Return the spec of a model that transformers runs with a `DynamicCache`.

        Args:
            config: configuration of a decoder, or a composite one whose `get_text_config` returns it.
            page_size: tokens per page.
            dtype: dtype that the model computes in, e.g. `bfloat16`. Default: the configuration's, or float32
                if it was made by hand without one.
            model: name in fingerprints. Default: the configuration's model type.

        Raises:
            UnsupportedModelError: no pool describes the cache content of a layer; names layer and model.
            ConfigError: the configuration contradicts itself or is a checkpoint's without a
                dtype, or `page_size` is below 1 or
                ends a page within a compressed entry (DeepSeek-V4).
        """
        _check_page_size(page_size)
        found = describe(config, page_size, dtype=dtype)
        return cls(model or found.model, page_size, found.layers, found.pools, found.identity)

    def with_quantised_kv(
        self,
        dtype: str = "float8_e4m3fn",
        *,
        scale_dtype: str = "float32",
        pools: Collection[str] | None = None,
    ) -> ModelSpec:
        """Return the spec of the model with quantised pages, and scales as additional tensors of each page.

        Each floating-point tensor `x` of a quantised pool gets `dtype`, and a tensor `x_scale` is added: one
        scale per token, head and section (latent and RoPE key have different ranges).

        Args:
            dtype: `float8_e4m3fn`, `float8_e5m2`, `int8` or `uint8`.
            scale_dtype: dtype of the scales.
            pools: pools of pages to quantise. Default: all that own slots (`dsa` does not).

        Raises:
            ConfigError: an unsupported dtype, a pool without pages, or a pool that is already quantised.
        """
        return replace(self, pools=quantise(self.pools, pools, dtype, scale_dtype))

    def with_draft(self, draft: ModelSpec, *, prefix: str = "draft") -> ModelSpec:
        """Return the spec of the model with the pools of a draft model, which share the target's slots.

        The draft reads the same tokens, so it has a page whenever the target has it: a slot of `kv` is also a
        slot of `draft_kv`. The draft's layers are numbered after the target's. `weight_version` must identify
        the weights of both models.

        Args:
            draft: spec of the draft, with the same page size.
            prefix: prefix of the names of the draft's pools.

        Raises:
            ConfigError: page sizes differ, or no pool of the target covers the pages that the draft needs.
        """
        if draft.page_size != self.page_size:
            raise ConfigError(
                f"pages of {draft.page_size} tokens in the draft, of {self.page_size} in its target; "
                "they must be the same"
            )
        return ModelSpec(
            self.model,
            self.page_size,
            self.layers + draft.layers,
            self.pools + draft_pools(self.owners, draft.pools, self.layers, prefix),
            f"{self.identity} {prefix}: {draft.identity}",
        )

    def shard(
        self,
        *,
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        cp: tuple[int, int] = (0, 1),
        layers: range | None = None,
        stripe: str = "token",
    ) -> ModelSpec:
        """Return the pools of one rank of a model that is spread over devices; an axis is `(rank, size)`.

        Ranks of one prompt cache the same pages, so `page_size` is still the tokens of the whole page. Pools
        of which several ranks hold the same bytes have one key, and the first of these ranks writes them.

        Args:
            tp: tensor parallel. KV heads are divided, or repeated if there are more ranks than heads; heads
                and channels of recurrent layers are divided; latents, index keys and compressed entries are
                whole on every rank.
            pp: pipeline parallel: the rank has the layers of its stage, with their numbers in the model.
            cp: context parallel, striped by tokens: every rank holds one in `size` entries of each page.
                States are whole on every rank.
            layers: layers of the stage. Default: equal shares, in order.
            stripe: `token`; stripes of whole pages are refused.

        Raises:
            ConfigError: the model cannot be divided so; names the tensor and the axis.
        """
        place = Shard.of(tp=tp, pp=pp, cp=cp)
        division = Division(self, place, layers, stripe)
        return replace(self, pools=shard_pools(self, place, layers, stripe), _division=division)

    def stored_as(self, parts: int) -> list[StoredPartSpec]:
        """Return the parts that this rank's pages are stored as, with the option `store_parts`.

        Raises:
            ConfigError: the model cannot be divided so, or pools were changed after `shard`.
        """
        division = self._division or Division(self, WHOLE, None, "token")
        tp = division.place.tp
        if parts % tp.size:
            raise ConfigError(f"store_parts {parts} must be a multiple of the tensor-parallel size {tp.size}")
        if shard_pools(division.whole, division.place, division.layers, division.stripe) != self.pools:
            raise ConfigError("store_parts: pools of this rank were changed; change those of the model first")
        each = parts // tp.size
        try:
            return [
                StoredPartSpec(part, tensor_places(division.whole, part, tp, Axis(number, parts)))
                for number in range(tp.rank * each, (tp.rank + 1) * each)
                for part in [division.whole.shard(**division.axes(number, parts))]
            ]
        except ConfigError as error:
            raise ConfigError(f"store_parts {parts}: {error}") from error

    def on_one_rank(self) -> ModelSpec:
        """Return the pools of the rank's pipeline stage as one rank has them that is not divided further."""
        if self._division is None:
            return self
        whole, place, layers, _ = self._division
        return whole.shard(pp=(place.pp.rank, place.pp.size), layers=layers)

    @property
    def place(self) -> Shard:
        """The place of the rank that has these pools, on every axis."""
        return self._division.place if self._division else WHOLE

    @property
    def stage(self) -> range:
        """Layers of the rank's pipeline stage, by their numbers in the model; without stages, all."""
        layers = self._division.layers if self._division else None
        return stage_layers(self.layers, self.place.pp, layers)

    def pool(self, name: str) -> PoolSpec:
        """
        Raises:
            UnknownPoolError: the model has no such pool.
        """
        if name not in self._by_name:
            raise UnknownPoolError(f"{name!r} is none of the pools {list(self._by_name)}")
        return self._by_name[name]

    def depends_on(self, name: str) -> str | None:
        """Return the pool that pages of this pool depend on; None for that pool itself.

        It is the first pool that owns slots, which covers every page. Without its page of the same digest, a
        page of this pool is useless.
        """
        first = self.owners[0].name
        return None if name == first else first

    @cached_property
    def owners(self) -> tuple[PoolSpec, ...]:
        """Pools that own slots."""
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
    check_number("page_size", page_size)
    if page_size < 1:
        raise ConfigError(f"page_size {page_size} must be 1 at least")
