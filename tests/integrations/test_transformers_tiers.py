"""Every model class of the reference: equal bits and equal answers after three tiers and back."""

from __future__ import annotations

import pytest
import torch

from asynchicache import Tier
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import new_cache
from integrations.snapshots import BOUNDARIES, LENGTH
from integrations.tiers import compute, loaded, open_tiers
from integrations.zoo import ALL, SLICE, differences, random_tokens, tiny_config, tiny_model

pytestmark = pytest.mark.asyncio

DTYPES = ("float32", "bfloat16")


async def check_every_boundary(name: str, dtype: str, steps: int) -> None:
    """Through storage and back: equal bits at once, after the tail, and while decoding so many steps."""
    model, tokens = tiny_model(name, dtype), random_tokens(LENGTH)
    uncached = prefill(model, new_cache(tiny_config(name)), tokens, 0, LENGTH)
    async with open_tiers(name, dtype) as (cache, bridge):
        originals = await compute(name, dtype, cache, bridge, tokens, BOUNDARIES[-1])
        for boundary in BOUNDARIES:
            await cache.flush()
            async with loaded(cache, tokens[: boundary + 1]) as request:
                assert request.hit.by_tier == {Tier.STORAGE: boundary}
                restored, original = bridge.restore(request), originals[boundary]
            assert differences(restored, original) == []
            expected = prefill(model, original, tokens, boundary, LENGTH)
            logits = prefill(model, restored, tokens, boundary, LENGTH)
            assert torch.equal(logits, expected)
            assert differences(restored, original) == []
            if dtype == "float32":  # rounding in bfloat16 is the model's own
                torch.testing.assert_close(logits, uncached, rtol=0, atol=1e-4)
                assert logits.argmax() == uncached.argmax()
            for length in range(LENGTH, LENGTH + steps):
                token = [int(expected.argmax())]
                expected, logits = (decode(model, held, token, length)[0] for held in (original, restored))
                assert torch.equal(logits, expected)
            assert differences(restored, original) == []


@pytest.mark.parametrize("name", SLICE)
async def test_one_model_of_each_kind(name: str) -> None:
    await check_every_boundary(name, "float32", 3)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
async def test_every_model_and_dtype(name: str, dtype: str) -> None:
    await check_every_boundary(name, dtype, 16)
