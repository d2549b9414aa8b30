"""A rank of a divided model: it runs the calls that the leader's `PrefixCachedModel` sends."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import msgspec
from transformers import PreTrainedModel

from asynchicache.config import CacheConfig
from asynchicache.errors import RankProtocolError
from asynchicache.integrations.transformers.asking import check_spec
from asynchicache.integrations.transformers.bridge import PrefixCopies
from asynchicache.integrations.transformers.calls import ModelCall, ModelRank
from asynchicache.integrations.transformers.prefill_runner import check_model
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.parts import open_device
from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.worker import RankWorker
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend


async def run_follower(
    model: PreTrainedModel,
    spec: ModelSpec,
    address: str,
    token: str,
    *,
    rank: int,
    config: CacheConfig | None = None,
    storage: StorageBackend | None = None,
    limits: RankLimits | None = None,
) -> None:
    """Run this rank's part of a model until the leader closes its `PrefixCachedModel`.

    Args:
        model: this rank's part, in evaluation mode, for exclusive use.
        spec: its pools: `ModelSpec.from_config(...).shard(...)`.
        address: where the leader listens.
        token: the group's secret.
        rank: this rank's number, from 1.
        config: as the leader's. Default: that of `CacheConfig`, on the model's device.
        storage: an open backend to use instead of the configured one; the caller closes it.

    Raises:
        RankError: the leader refuses this rank, or is lost.
        UnsupportedModelError, ConfigError, StorageError: as of `PrefixCachedModel.open`.
        Exception: the model's error. The group has failed then.
    """
    config = config or CacheConfig(device=str(model.device))
    check_model(model, config, spec)
    check_spec(model, spec)
    decoder = msgspec.msgpack.Decoder(ModelCall)
    with closing(open_device(config)) as device:
        stream = device.stream("model")  # stays empty: a call ends only when the device has finished
        joining = RankWorker.join(
            spec, config, address, token, rank=rank, limits=limits, storage=storage, device=device
        )
        async with joining as worker:
            part = ModelRank(model, PrefixCopies(model.config, spec, worker.device_tensor))
            with ModelThread(model.device) as thread:
                async for step, message in worker.steps():
                    call = _decoded(decoder, message)
                    async with worker.forward(step, stream) as copies:
                        await copies.landed()
                        await thread.run(partial(part.run, call), always=True)


def _decoded(decoder: msgspec.msgpack.Decoder[ModelCall], message: bytes) -> ModelCall:
    try:
        return decoder.decode(message)
    except msgspec.DecodeError as error:
        raise RankProtocolError(f"the leader sent no call of a model: {error}") from error
