"""The pools of one rank of a model that is spread over several devices.

Axes: tensor parallel divides heads, pipeline parallel layers, context parallel the tokens of every page. A
shard's name has only the axes that divide the pool's bytes, so ranks with the same bytes have the same keys:
`tp1/4` is the second of four equal parts, wherever it is held. Layers are not in it, because the layout
names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from asynchicache.errors import ConfigError
from asynchicache.specs.pools import PoolSpec, TensorSpec
from asynchicache.types import check_number


class Axis(NamedTuple):
    """The place of a rank on one axis."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a rank, on every axis."""

    tp: Axis
    pp: Axis
    cp: Axis

    @classmethod
    def of(cls, **axes: tuple[int, int]) -> Self:
        """
        Raises:
            ConfigError: an axis is no rank of a size.
        """
        return cls(**{name: _axis(name, value) for name, value in axes.items()})

    @property
    def count(self) -> int:
        """How many ranks the model is divided over."""
        return self.tp.size * self.pp.size * self.cp.size

    def __str__(self) -> str:
        return f"tp {self.tp.size}, pp {self.pp.size}, cp {self.cp.size}"


WHOLE = Shard(Axis(0, 1), Axis(0, 1), Axis(0, 1))
"""The place of the only rank of a model that is not divided."""


def _axis(name: str, value: tuple[int, int]) -> Axis:
    if not isinstance(value, tuple) or len(value) != len(Axis._fields):
        raise ConfigError(f"{name} {value!r} must be (rank, size), such as (0, 2)")
    for number in value:
        check_number(f"{name} {value!r}: rank and size", number)
    axis = Axis(*value)
    if not 0 <= axis.rank < axis.size:
        raise ConfigError(f"{name} {value!r}: rank {axis.rank} of {axis.size}; ranks count from 0")
    return axis


def stage_layers(count: int, pp: Axis, layers: range | None) -> range:
    """Return the layers of a stage.

    Raises:
        ConfigError: the layers are none of the model's, or do not divide equally and are not given.
    """
    if layers is not None:
        if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise ConfigError(f"layers {layers!r} must be a range of some of the model's {count} layers")
        return layers
    if count % pp.size:
        raise ConfigError(
            f"pp: {count} layers in {pp.size} stages are not equal shares; engines differ in who has more: "
            "pass layers=range(first, last + 1)"
        )
    share = count // pp.size
    return range(pp.rank * share, (pp.rank + 1) * share)


def shard_pool(pool: PoolSpec, place: Shard, layers: range) -> PoolSpec | None:
    """Return the part of a pool that one rank holds; None if its stage has no such layer.

    Raises:
        ConfigError: the pool cannot be divided so.
    """
    tensors = tuple(part for tensor in pool.tensors if (part := _tensor(pool, tensor, place, layers)))
    if not tensors:
        return None
    names, first = [], True
    if not pool.replicated and place.tp.size > 1:
        parts = max(_parts(tensor, place.tp) for tensor in pool.tensors)
        copies = place.tp.size // parts
        first = place.tp.rank % copies == 0
        names += [f"tp{place.tp.rank // copies}/{parts}"] if parts > 1 else []
    elif pool.replicated:
        first = place.tp.rank == 0
    if pool.per_token and place.cp.size > 1:
        names.append(f"cp{place.cp.rank}/{place.cp.size}")
    elif not pool.per_token:
        first = first and place.cp.rank == 0
    return replace(pool, tensors=tensors, shard="-".join(names), writes=first)


def _tensor(pool: PoolSpec, tensor: TensorSpec, place: Shard, layers: range) -> TensorSpec | None:
    kept = tuple(layer for layer in tensor.layers if layer in layers)
    if not kept:
        return None
    stripes = place.cp.size if pool.per_token else 1
    part = replace(tensor, layers=kept, tokens_per_entry=tensor.tokens_per_entry * stripes)
    if pool.replicated or place.tp.size == 1:
        return part
    rows = tensor_rows(tensor, place.tp)
    # The part is not divided again, so it does not say how.
    return replace(part, shape=(sum(map(len, rows)), *tensor.shape[1:]), cut=())


def tensor_rows(tensor: TensorSpec, tp: Axis) -> list[range]:
    """Return the rows along the first dimension that a tensor-parallel rank holds, of each section in order.

    Raises:
        ConfigError: the tensor cannot be divided so.
    """
    if not tensor.cut:
        raise ConfigError(f"tp: tensor {tensor.name!r} does not say how ranks divide it (TensorSpec.cut)")
    found, start = [], 0
    for section in tensor.cut:
        parts, unit = (
            _units(tensor, section.units, tp, repeats=section.repeats),
            section.rows // section.units,
        )
        each = section.units // parts * unit
        first = start + tp.rank // (tp.size // parts) * each
        found.append(range(first, first + each))
        start += section.rows
    return found


def tensor_places(whole: _Model, part: _Model, tp: Axis, smaller: Axis) -> dict[str, dict[str, list[int]]]:
    """Return, by pool and tensor that ranks divide, where the rows of a smaller rank are among those of `tp`.

    Args:
        whole: the model.
        part: the pools of the smaller rank.
        tp: a tensor-parallel rank.
        smaller: a rank of a larger group, whose heads are some of those of `tp`.
    """
    kept = {pool.name: {tensor.name for tensor in pool.tensors} for pool in part.pools}
    found: dict[str, dict[str, list[int]]] = {}
    for pool in whole.pools:
        if pool.name not in kept or pool.replicated:
            continue
        found[pool.name] = {}
        for tensor in pool.tensors:
            if tensor.name in kept[pool.name]:
                ours = _rows(tensor, tp)
                found[pool.name][tensor.name] = [ours.index(row) for row in _rows(tensor, smaller)]
    return found


def _rows(tensor: TensorSpec, tp: Axis) -> list[int]:
    if tp.size == 1:
        return list(range(tensor.shape[0]))
    return [row for rows in tensor_rows(tensor, tp) for row in rows]


def _parts(tensor: TensorSpec, tp: Axis) -> int:
    """Return the number of different parts of a tensor."""
    return max(_units(tensor, section.units, tp, repeats=section.repeats) for section in tensor.cut)


def _units(tensor: TensorSpec, units: int, tp: Axis, *, repeats: bool) -> int:
    if units % tp.size == 0:
        return tp.size
    if repeats and tp.size % units == 0:
        return units
    rule = "divide or be a multiple of" if repeats else "divide"
    raise ConfigError(
        f"tp size {tp.size} must {rule} the {units} heads (or groups) of tensor {tensor.name!r}"
    )


class _Model(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def pools(self) -> tuple[PoolSpec, ...]: ...


def shard_pools(spec: _Model, place: Shard, layers: range | None, stripe: str) -> tuple[PoolSpec, ...]:
    """Return the pools of one rank; arguments and errors as of `ModelSpec.shard`."""
    if stripe != "token":
        raise ConfigError(
            f"stripe {stripe!r} must be 'token': with stripes of pages each rank has other pages of a "
            "prefix, so no page of one rank stands for all before it"
        )
    _check_whole(spec)
    stage = stage_layers(spec.layers, place.pp, layers)
    pools = [part for pool in spec.pools if (part := shard_pool(pool, place, stage))]
    if not pools or pools[0].name != spec.pools[0].name:
        raise ConfigError(
            f"pp stage {place.pp.rank} of {place.pp.size} has layers {stage.start} to {stage.stop - 1}, none "
            f"of pool {spec.pools[0].name!r}, which must cover every page; give the stages other layers"
        )
    return tuple(pools)


def _check_whole(spec: _Model) -> None:
    sharded: Sequence[str] = [pool.name for pool in spec.pools if pool.shard or not pool.writes]
    if sharded:
        raise ConfigError(f"model {spec.model!r}: pools {sharded} are those of a rank; shard the whole model")
