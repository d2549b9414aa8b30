"""The trace that a server records replays to the server's own numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from asynchicache import CacheConfig
from asynchicache.integrations.serve.loading import LoadedModel, load_checkpoint
from asynchicache.integrations.transformers.asking import spec_from_model
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.run import run_replay
from asynchicache.replay.trace import read_trace
from integrations.serve.checkpoints import save_checkpoint, tiny_loaded
from integrations.serve.serving import PAGE, Running, running
from integrations.zoo_configs import WINDOW

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\nI think</think>\n{% endif %}"
)
SYSTEM = "You bring back what has been computed before it is needed. "


def thinking_checkpoint(folder: Path) -> LoadedModel:
    save_checkpoint(folder, template=False)
    (folder / "chat_template.jinja").write_text(THINKS)
    return load_checkpoint(folder)


async def chat(served: Running, name: str) -> list[tuple[int, int, int]]:
    """Two conversations of three turns, in turns; lengths of prompts and answers, and cached tokens."""
    found = []
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(2)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": f"{number}{turn} " * (9 + 7 * turn + number)})
            answer = await served.openai.chat.completions.create(
                model=name,
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
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("checkpoints", ["prompt+output+branch", "prompt"])
@pytest.mark.parametrize(
    ("load", "pools"),
    [
        (lambda _: tiny_loaded("qwen3"), "kv"),
        (lambda _: tiny_loaded("gemma3"), "kv,swa"),
        (lambda _: tiny_loaded("qwen3_5"), "kv,mamba"),
        (thinking_checkpoint, "kv,mamba"),
    ],
)
async def test_each_request_of_a_replay_hits_what_it_hit_in_the_server(
    tmp_path: Path, load: Callable[[Path], LoadedModel], pools: str, checkpoints: str
) -> None:
    trace, loaded = tmp_path / "own.jsonl", load(tmp_path)
    slots = {pool.name: 256 for pool in spec_from_model(loaded.model).owners}
    cache = CacheConfig(device_slots=slots, host_slots=slots, weight_version="test", checkpoints=checkpoints)
    async with running(loaded, cache=cache, record_trace=str(trace)) as served:
        seen = await chat(served, loaded.name)
        await served.idle()

    requests = list(read_trace(trace).requests)
    assert [(request.tokens, request.output) for request in requests] == [one[:2] for one in seen]
    assert len({request.session for request in requests[::2]}) == 1
    assert requests[0].session != requests[1].session
    lines = trace.read_text().splitlines(keepends=True)
    replay = partial(run_replay, progress=lambda done, total: None)
    hits = [0]
    for count in range(1, len(lines) + 1):
        (tmp_path / "part").write_text("".join(lines[:count]))
        options = ReplayOptions(str(tmp_path / "part"), pools=pools, window=WINDOW, checkpoint=checkpoints)
        hits.append(sum(replay(options).tokens_by_tier.values()))
    assert [after - before for before, after in pairwise(hits)] == [cached for _, _, cached in seen]
    if "swa" not in pools:  # page by page, it is the same
        options = ReplayOptions(str(trace), pools=pools, page_size=PAGE, checkpoint=checkpoints)
        assert sum(replay(options).tokens_by_tier.values()) == hits[-1]
    assert sum(cached > 0 for _, _, cached in seen) >= 4
    assert any("answer_runs" in json.loads(line) for line in lines)
