"""A conversation hits what its template repeats, and the trace that a server records replays to that."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random

import pytest

from asynchicache import CacheConfig, CacheHint, PrefixCachedModel
from asynchicache.integrations.serve.loading import LoadedModel, load_checkpoint
from asynchicache.integrations.serve.tokenizers import Conversation
from asynchicache.integrations.transformers.asking import spec_from_model
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.run import run_replay
from asynchicache.replay.trace import read_trace
from integrations.serve.checkpoints import save_checkpoint, tiny_loaded
from integrations.serve.serving import PAGE, Running, running, uncached
from integrations.zoo import random_tokens, tiny_model
from integrations.zoo_configs import WINDOW
from soaking import first

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\nI think</think>\n{% endif %}"
)
SYSTEM = "You bring back what has been computed before it is needed. "


def thinking(name: str, folder: Path) -> LoadedModel:
    return load_checkpoint(save_checkpoint(folder, name, template=THINKS))


async def chat(served: Running, loaded: LoadedModel) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Two conversations of three turns, side by side: the prompts; their lengths, those of the answers, and
    cached tokens."""
    prompts, found = [], []
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(2)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": f"{number}{turn} " * (9 + 7 * turn + number)})
            prompts.append(loaded.tokenizer.encode_chat(Conversation(talk)))
            answer = await served.openai.chat.completions.create(
                model=loaded.name,
                messages=talk,  # type: ignore[arg-type]
                max_tokens=20 + 9 * number,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            talk.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            found.append((usage.prompt_tokens, usage.completion_tokens, cached))
    return prompts, found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def repeated_pages(loaded: LoadedModel, pools: str, prompts: Sequence[list[int]], outputs: bool) -> list[int]:
    """By prompt, the tokens of the whole pages that it shares with one before it, and maybe with its answer.

    A state stands only where the conversation goes on, and so not behind the system prompt.
    """
    computed, shared = [], []
    for at, prompt in enumerate(prompts):
        known = computed[at % 2 :: 2] if "mamba" in pools else computed
        shared.append(max((common(prompt, one) // PAGE * PAGE for one in known), default=0))
        answer = uncached(loaded, prompt, 20 + 9 * (at % 2)) if outputs else []
        computed.append(prompt + answer[:-1])  # nothing is computed for the last token
    return shared


DEFAULT = "prompt+output+branch"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("load", "pools", "checkpoints"),
    first(
        4,
        [
            (partial(thinking, "qwen3"), "kv", DEFAULT),
            (partial(thinking, "gemma3"), "kv,swa", DEFAULT),
            (partial(thinking, "qwen3_5"), "kv,mamba", DEFAULT),
            (lambda _: tiny_loaded("qwen3_5"), "kv,mamba", DEFAULT),
            (lambda _: tiny_loaded("gemma3"), "kv,swa", DEFAULT),
            (partial(thinking, "qwen3_5"), "kv,mamba", "prompt"),
        ],
    ),
)
async def test_each_turn_hits_what_is_repeated_in_the_server_and_in_a_replay(
    tmp_path: Path, load: Callable[[Path], LoadedModel], pools: str, checkpoints: str
) -> None:
    trace, loaded = tmp_path / "own.jsonl", load(tmp_path)
    slots = {pool.name: 256 for pool in spec_from_model(loaded.model).owners}
    cache = CacheConfig(device_slots=slots, host_slots=slots, weight_version="test", checkpoints=checkpoints)
    async with running(loaded, cache=cache, record_trace=str(trace)) as served:
        prompts, seen = await chat(served, loaded)
        await served.idle()
    outputs = "output" in checkpoints
    assert [cached for _, _, cached in seen] == repeated_pages(loaded, pools, prompts, outputs)

    requests = list(read_trace(trace).requests)
    assert [(request.tokens, request.output) for request in requests] == [one[:2] for one in seen]
    one, other = ({request.session for request in requests[number::2]} for number in range(2))
    assert len(one) == len(other) == 1
    assert one != other
    check_replays(trace, pools, PAGE, checkpoints, [cached for _, _, cached in seen])
    assert sum(cached > 0 for _, _, cached in seen) >= 4
    assert any("answer_runs" in json.loads(line) for line in trace.read_text().splitlines())


def check_replays(trace: Path, pools: str, page: int, checkpoints: str, cached: Sequence[int]) -> None:
    """Replays by block and by token hit what a server hit, request by request."""
    lines, part = trace.read_text().splitlines(keepends=True), trace.with_name("part")
    for page_size in (0, page) if "swa" not in pools else (0,):
        options = ReplayOptions(
            str(part), pools=pools, window=WINDOW, checkpoint=checkpoints, page_size=page_size
        )
        hits = [0]
        for count in range(1, len(lines) + 1):
            part.write_text("".join(lines[:count]))
            found = run_replay(options, lambda done, total: None)
            hits.append(sum(found.tokens_by_tier.values()))
        assert [after - before for before, after in pairwise(hits)] == cached


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "pools", "page", "checkpoints", "chunk"),
    first(
        3,
        [
            ("gemma3", "kv,swa", 8, "output", 64),
            ("qwen3_5", "kv,mamba", 8, "prompt+branch", 64),
            ("lfm3", "kv,swa,mamba", 16, "output+32", 24),
            ("qwen3", "kv", 8, "prompt+16", 24),
            ("qwen3_5", "kv,mamba", 16, "none", 512),
            ("lfm3", "kv,swa,mamba", 32, "branch", 64),
        ],
    ),
)
async def test_any_policy_replays_to_what_was_hit(
    tmp_path: Path, name: str, pools: str, page: int, checkpoints: str, chunk: int
) -> None:
    """Prompts and answers of any length, many of them of whole pages; of some, an end is not repeated."""
    model, chance, trace, cached = tiny_model(name), Random(page), tmp_path / "own.jsonl", []
    slots = {pool.name: 256 for pool in spec_from_model(model).owners}
    config = CacheConfig(device_slots=slots, host_slots=slots, checkpoints=checkpoints)
    async with PrefixCachedModel.open(model, config=config, page_size=page, prefill_chunk=chunk) as served:
        served.cache.record(trace)
        talks = [random_tokens(10 + 30 * number) for number in range(2)]
        for turn in range(8):
            number, invitation = turn % 2, [7] * chance.choice([0, 5])
            talk = talks[number] + random_tokens(chance.randrange(1, 60), seed=turn)
            talk += [9] * (chance.choice([0, 1]) * (-len(talk) % page))
            prompt = talk + invitation
            whole = -(len(prompt) - 1) % page + page  # an answer that ends with a page
            answer = served.generate(
                prompt,
                max_new_tokens=chance.choice([whole, chance.randrange(1, 30)]),
                stop_token_ids=(),
                hint=CacheHint(repeats=(len(talk),)) if invitation else CacheHint(),
            )
            words = [token async for token in answer]
            await served.drain()
            cached.append(answer.cached_tokens)
            talks[number] = talk + words if invitation else prompt + words
    check_replays(trace, pools, page, checkpoints, cached)
