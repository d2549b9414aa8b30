"""What a newcomer does wrong is answered by what to do; nothing is silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from asynchicache import (
    CacheBridge,
    CacheConfig,
    CacheError,
    Coverage,
    HybridCache,
    ModelSpec,
    PrefixCachedModel,
    Request,
    TensorSpec,
    prefix_cached,
    spec_from_model,
)
from asynchicache.integrations.transformers.batches import stack
from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.sampling import Sampling
from asynchicache.integrations.transformers.snapshot import new_cache
from integrations.tiers import open_tiers
from integrations.zoo import PAGE, random_tokens, tiny_config, tiny_model, tiny_spec

pytestmark = pytest.mark.asyncio

NAME = "qwen3_5"
SLOTS = CacheConfig(device_slots={"kv": 16, "mamba": 4}, host_slots={"kv": 16, "mamba": 4})
CONFIG, SPEC, PROMPT = tiny_config(NAME), tiny_spec(NAME), random_tokens(3 * PAGE + 5)


class Bed(NamedTuple):
    """A request for a prompt of which two pages are cached: loaded, restored, and its first forward run."""

    cache: HybridCache
    bridge: CacheBridge
    request: Request
    held: DynamicCache
    done: int
    end: int


@asynccontextmanager
async def made() -> AsyncIterator[Bed]:
    model, end = tiny_model(NAME), 3 * PAGE
    async with open_tiers(NAME) as (cache, bridge):
        for known in (2 * PAGE, 0):
            async with cache.request(PROMPT) as request:
                await request.load()
                held, done = bridge.restore(request), request.hit.tokens
                prefill(model, held, PROMPT, done, known or end)
                if known:
                    request.extend(known)
                    bridge.save(request, held, 0, known)
                    await request.checkpoint(known)
                else:
                    assert done == 2 * PAGE
                    yield Bed(cache, bridge, request, held, done, end)


async def load_not_awaited(bed: Bed) -> None:
    async with bed.cache.request(PROMPT) as request:
        request.load()
        bed.bridge.restore(request)


async def checkpoint_not_awaited(bed: Bed) -> None:
    extended(bed)
    bed.bridge.save(bed.request, bed.held, bed.done, bed.end)
    bed.request.checkpoint(bed.end)
    bed.request.extend(5)
    prefill(tiny_model(NAME), bed.held, PROMPT, bed.end, bed.end + 5)
    bed.bridge.save(bed.request, bed.held, bed.end, bed.end + 5)


def extended(bed: Bed) -> Request:
    bed.request.extend(bed.end - bed.done)
    return bed.request


def from_a_padded_batch(bed: Bed) -> None:
    other = new_cache(CONFIG)
    prefill(tiny_model(NAME), other, PROMPT, 0, bed.end + 2)
    bed.bridge.save(extended(bed), stack([bed.held, other], padded=True), bed.done, bed.end)


async def save_into_another(bed: Bed) -> None:
    async with bed.cache.request(PROMPT) as other:
        await other.load()
        other.extend(bed.end - bed.done)
        bed.bridge.save(other, bed.held, bed.done, bed.end)


async def restore_after_close(bed: Bed) -> None:
    async with bed.cache.request(PROMPT) as request:
        await request.load()
        await bed.cache.aclose()
        bed.bridge.restore(request)


def append_to_the_end(bed: Bed) -> None:
    bed.bridge.save(extended(bed), bed.held, bed.done, bed.end)
    bed.request.checkpoint(bed.end, final=True)
    bed.request.append([1])


def record_twice(bed: Bed) -> None:
    for name in ("trace", "./trace"):
        bed.cache.record(name)


async def entered(thing: Any) -> None:
    async with thing:
        pass


def entered_by_with(thing: Any) -> None:
    with thing:
        pass


IN_A_REQUEST: dict[str, tuple[Callable[[Bed], object], str]] = {
    "text": (lambda bed: bed.cache.request("text"), "tokenise it first"),
    "mapping": (lambda bed: bed.cache.request({"input_ids": [1]}), "pass the ids in 'input_ids'"),
    "row of a batch": (lambda bed: bed.cache.request(torch.tensor([[1, 2]])), "pass [0], its only row"),
    "set": (lambda bed: bed.cache.request({3, 1}), "a set, which has no order"),
    "mask": (lambda bed: bed.cache.request(torch.ones(9).bool()), "truth values, as of a mask"),
    "text in append": (lambda bed: bed.request.append("text"), "tokenise it first"),
    "list of a prompt": (lambda bed: bed.cache.request([PROMPT]), "pass [0], the only one"),
    "list of prompts": (lambda bed: bed.cache.request([PROMPT, PROMPT]), "one prompt a request"),
    "pages of states": (lambda bed: bed.request.pages("mamba"), "['kv']: state('mamba') is its slot"),
    "first page of states": (lambda bed: bed.request.first_page("mamba"), "state('mamba') is its slot"),
    "state of pages": (lambda bed: bed.request.state("kv"), "['mamba']: pages('kv') are its slots"),
    "no such pages": (lambda bed: bed.request.pages("kb"), "['kv'], or with states: ['mamba']"),
    "no such state": (lambda bed: bed.request.state("kb"), "['mamba'], or with pages: ['kv']"),
    "no such tensor": (lambda bed: bed.cache.device_tensor("kb", "keys"), "'kv': ['keys', 'values']"),
    "with": (lambda bed: entered_by_with(bed.cache.request(PROMPT)), "`async with cache.request(...)"),
    "await": (lambda bed: bed.cache.request(PROMPT), "`async with cache.request(...)"),
    "hint of a mapping": (lambda bed: bed.cache.request(PROMPT, hint={"over": True}), "pass CacheHint(...)"),
    "span of a number": (lambda bed: bed.cache.request(PROMPT, traceparent=5), "the W3C header"),
    "prefill of floats": (lambda bed: prefill(tiny_model(NAME), bed.held, [1.5], 0, 1), "integer"),
    "prefill of text": (lambda bed: prefill(tiny_model(NAME), bed.held, "hi", 0, 1), "tokenise it first"),
    "prefill beyond the vocabulary": (
        lambda bed: prefill(tiny_model(NAME), bed.held, [10**6], 0, 1),
        "token id 1000000: the model knows",
    ),
    "prefill up to text": (lambda bed: prefill(tiny_model(NAME), bed.held, PROMPT, 0, "5"), "'5'"),
    "prefill into nothing": (
        lambda bed: prefill(tiny_model(NAME), None, PROMPT, 0, 5),
        "pass what restore() returned",
    ),
    "prefill of a path": (lambda bed: prefill("folder", bed.held, PROMPT, 0, 5), "from_pretrained('folder')"),
    "prefill of a config": (lambda bed: prefill(CONFIG, bed.held, PROMPT, 0, 5), "build the model"),
    "row of text": (
        lambda bed: bed.bridge.save(extended(bed), bed.held, bed.done, bed.end, row="a"),
        "row 'a' is not among",
    ),
    "no such pool": (lambda bed: bed.cache.spec.pool("kb"), "['kv', 'mamba']"),
    "not entered": (lambda bed: bed.cache.request(PROMPT).load(), "use it inside `async with`"),
    "restore before load": (lambda bed: bed.bridge.restore(bed.cache.request(PROMPT)), "use it inside"),
    "restore after extend": (lambda bed: bed.bridge.restore(extended(bed)), "restore it before"),
    "save before extend": (
        lambda bed: bed.bridge.save(bed.request, bed.held, bed.done, bed.end),
        "call extend() first",
    ),
    "save of another length": (
        lambda bed: bed.bridge.save(extended(bed), bed.held, bed.done, bed.end - 3),
        "save where a forward ended",
    ),
    "save behind a gap": (
        lambda bed: bed.bridge.save(extended(bed), bed.held, bed.end, bed.end),
        "neither restored nor written",
    ),
    "save of nothing": (lambda bed: bed.bridge.save(bed.request, None, 0, 1), "what restore() returned"),
    "save of tensors": (lambda bed: bed.bridge.save(bed.request, ((PROMPT,),), 0, 1), "not tuple"),
    "save the wrong way round": (lambda bed: bed.bridge.save(bed.held, bed.request, 0, 1), "a request of"),
    "restore of a cache": (lambda bed: bed.bridge.restore(bed.cache), "not HybridCache"),
    "save into another": (save_into_another, "that of another open request"),
    "restore after close": (restore_after_close, "the cache is closed"),
    "append to the end": (append_to_the_end, "its last checkpoint was final"),
    "record to a number": (lambda bed: bed.cache.record(5), "trace 5 is a int: pass a file to write"),
    "record twice": (record_twice, "is being recorded: await recorder.aclose() first"),
    "salt of text": (lambda bed: bed.cache.record("trace", salt="a"), "pass bytes, as text.encode()"),
    "tracer of text": (lambda bed: bed.cache.trace("x"), "instrument(cache) sets one"),
    "costs of text": (lambda bed: bed.request.computed("4", 1.0), "a whole number of tokens"),
    "save of a padded row": (from_a_padded_batch, "take a row out of a padded batch first"),
    "checkpoint before save": (lambda bed: extended(bed).checkpoint(bed.end), "only 32 tokens were written"),
    "suspend before save": (lambda bed: extended(bed).suspend(bed.end), "only 32 tokens were written"),
    "checkpoint before extend": (lambda bed: bed.request.checkpoint(bed.end), "call append() and extend()"),
    "load not awaited": (load_not_awaited, "await load()"),
    "checkpoint not awaited": (checkpoint_not_awaited, "await load(), and each checkpoint()"),
    "bridge of a model": (lambda bed: CacheBridge(tiny_model(NAME), bed.cache), "pass its `config`"),
    "bridge the wrong way round": (lambda bed: CacheBridge(bed.cache, CONFIG), "CacheBridge(config, cache)"),
    "bridge of another model": (
        lambda bed: CacheBridge(tiny_config("nemotron_h"), bed.cache),
        "layers, the spec of the cache",
    ),
}


@pytest.mark.parametrize(("mistake", "cure"), IN_A_REQUEST.values(), ids=IN_A_REQUEST)
async def test_in_a_request(
    mistake: Callable[[Bed], object], cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with made() as bed:
        with pytest.raises(CacheError) as caught:
            await done(lambda: mistake(bed))
    assert cure in str(caught.value)


async def done(mistake: Callable[[], object]) -> None:
    got = mistake()
    if isinstance(got, Awaitable):
        await got


def opened_with(name: str) -> Awaitable[None]:
    return entered(HybridCache.open(SPEC, **{name: "cpu"}))


BEFORE_IT: dict[str, tuple[Callable[[], object], str]] = {
    "path as config": (lambda: ModelSpec.from_config("folder"), "AutoConfig.from_pretrained('folder')"),
    "Path as config": (lambda: ModelSpec.from_config(Path("folder")), "AutoConfig.from_pretrained('folder')"),
    "path to ask": (lambda: spec_from_model("folder"), "AutoConfig.from_pretrained('folder')"),
    "model as config": (lambda: ModelSpec.from_config(tiny_model(NAME)), "pass its `config`"),
    "config as spec": (
        lambda: entered(HybridCache.open(CONFIG)),
        "opened with a ModelSpec and a CacheConfig",
    ),
    "path to serve": (
        lambda: entered(PrefixCachedModel.open("folder")),
        "AutoModelForCausalLM.from_pretrained('folder')",
    ),
    "path to generate": (lambda: prefix_cached("folder"), "AutoModelForCausalLM.from_pretrained('folder')"),
    "config to generate": (lambda: prefix_cached(CONFIG), "build the model, and pass that"),
    "async with": (lambda: entered(prefix_cached(tiny_model(NAME))), "use `with`, or PrefixCachedModel.open"),
    "tokenizer of text": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), tokenizer="x")),
        "AutoTokenizer.from_pretrained(folder) reads one",
    ),
    "tokenizer of text, to generate": (
        lambda: prefix_cached(tiny_model(NAME), tokenizer="x"),
        "AutoTokenizer.from_pretrained(folder) reads one",
    ),
    "processor as tokenizer": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), tokenizer=SimpleNamespace(tokenizer=1))),
        "pass its `tokenizer`",
    ),
    "config of a mapping": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), config={"device_slots": {}})),
        "pass CacheConfig(...)",
    ),
    "spec of text": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), spec="qwen")),
        "ModelSpec.from_config(model.config)",
    ),
    "limit of text": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), max_running="3")),
        "max_running '3': expected int",
    ),
    "chunk of text": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), prefill_chunk="3")),
        "prefill_chunk '3' must be a whole number",
    ),
    **{
        f"{name} of text": (partial(opened_with, name), f"{name}='cpu' must be {wanted}")
        for name, wanted in (
            ("device", "an open device"),
            ("port", "a Port"),
            ("engine", "EngineMemory"),
            ("group", "a RankGroup"),
        )
    },
    "page size beside a spec": (
        lambda: entered(PrefixCachedModel.open(tiny_model(NAME), spec=SPEC, page_size=2 * PAGE)),
        "leave it out",
    ),
    "options of no storage": (
        lambda: CacheConfig(storage_options={"path": "x"}),
        "such as storage='file'",
    ),
    "tensor without a name": (lambda: TensorSpec("", (0,), (1,), "int8"), "must have a letter"),
    "window of less than nothing": (lambda: Coverage(-1), "or None for every page"),
    "sampling of text": (lambda: Sampling(temperature="1"), "temperature '1': expected float"),
    "heads that do not divide": (
        lambda: ModelSpec.from_config(LlamaConfig(num_attention_heads=4, num_key_value_heads=3)),
        "num_attention_heads 4 is no multiple of num_key_value_heads 3",
    ),
    "configuration by hand": (
        lambda: ModelSpec.from_config(SimpleNamespace(model_type="llama")),
        "a SimpleNamespace is no configuration",
    ),
    "option": (lambda: CacheConfig(device_byte=1), "did you mean 'device_bytes'"),
    "size": (lambda: CacheConfig(device_bytes="64 megs"), "a size such as '10GiB'"),
    "pool": (
        lambda: entered(HybridCache.open(SPEC, CacheConfig(device_slots={"kb": 4, "mamba": 4}))),
        "['kv', 'mamba']",
    ),
}


@pytest.mark.parametrize(("mistake", "cure"), BEFORE_IT.values(), ids=BEFORE_IT)
async def test_before_a_request(mistake: Callable[[], object], cure: str) -> None:
    with pytest.raises((CacheError, TypeError)) as caught:
        await done(mistake)
    assert cure in str(caught.value)


@pytest.mark.parametrize("open_it", [lambda: HybridCache.open(SPEC), lambda: PrefixCachedModel.open(None)])
async def test_an_opening_is_entered_by_async_with(open_it: Callable[[], Any]) -> None:
    with pytest.warns(RuntimeWarning, match="use `async with"), pytest.raises(CacheError, match="async with"):
        entered_by_with(open_it())


async def test_a_generation_is_read_by_async_for() -> None:
    async with PrefixCachedModel.open(tiny_model(NAME), page_size=PAGE, config=SLOTS) as served:
        answer = served.generate(PROMPT, max_new_tokens=2)
        for misused in (iter, entered_by_with):
            with pytest.raises(CacheError, match="read by `async for`"):
                misused(answer)
        assert len([token async for token in answer]) == 2


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"max_new_tokens": "2"}, "max_new_tokens '2' must be a whole number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens 2.5 must be a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens None must be a whole number"),
        ({"stop_token_ids": 5}, "stop_token_ids 5 is a int: a collection of token ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: 'a' must be a whole number"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 never comes"),
        ({"stop_token_ids": [1 << 40]}, f"stop_token_ids: {1 << 40} never comes"),
        ({"sampling": {"temperature": 1}}, "pass Sampling(...)"),
        ({"hint": {"over": True}}, "pass CacheHint(...)"),
        ({"traceparent": 5}, "the W3C header"),
        ({"constraint": 5}, "pass an object with `allow` and `take`"),
        ({"durable": "x"}, "durable 'x' is a str: pass True or False"),
        ({"prompt_logprobs": 1, "logprobs": 0}, "prompt_logprobs 1 is a int: pass True or False"),
    ],
)
async def test_an_option_of_a_generation(options: dict[str, Any], cure: str) -> None:
    async with PrefixCachedModel.open(tiny_model(NAME), page_size=PAGE, config=SLOTS) as served:
        with pytest.raises(CacheError) as caught:
            served.generate(PROMPT, **({"max_new_tokens": 2} | options))
    assert cure in str(caught.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "again",
    [
        lambda model: entered(PrefixCachedModel.open(model, page_size=PAGE, config=SLOTS)),
        lambda model: entered_by_with(prefix_cached(model, page_size=PAGE, config=SLOTS)),
    ],
    ids=["served", "generate"],
)
async def test_a_model_that_is_opened_twice_is_told_of(again, caplog: pytest.LogCaptureFixture):
    """It works, and after a cancelled opening it has to: nobody could close that one."""
    model = tiny_model(NAME)
    async with PrefixCachedModel.open(model, page_size=PAGE, config=SLOTS):
        assert caplog.text == ""
        await done(lambda: again(model))
    assert "opened before and not closed" in caplog.text
