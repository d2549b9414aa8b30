"""The real client gets what the model alone would say, and is told how much of it came from the cache."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from asynchicache.integrations.serve.api import ServedModel
from asynchicache.integrations.serve.description import describe
from asynchicache.integrations.serve.tokenizers import Conversation
from asynchicache.types import Tier
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import PAGE, Running, as_text, body, running, uncached

PROMPT = "A cache keeps what a model has computed, and brings it back before it is needed. "
LOADED = tiny_loaded()

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Running]:
    async with running(LOADED) as one:
        yield one
        await one.idle()


def expected(prompt: str, count: int) -> str:
    return as_text(LOADED, uncached(LOADED, LOADED.tokenizer.encode(prompt), count))


async def test_a_completion_is_the_models_own(server: Running) -> None:
    answer = await server.openai.completions.create(
        model="qwen3_5", prompt=PROMPT + "whole", max_tokens=9, temperature=0
    )
    assert answer.choices[0].text == expected(PROMPT + "whole", 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT) + 5, 9)
    assert answer.usage.total_tokens == len(PROMPT) + 14


async def test_a_stream_is_the_same_text_in_pieces(server: Running) -> None:
    stream = await server.openai.completions.create(
        model="qwen3_5",
        prompt=PROMPT + "stream",
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected(PROMPT + "stream", 9)
    assert len(texts) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_each_chunk_of_a_stream_may_have_the_counts_so_far(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = body(stream=True, stream_options=options, max_tokens=None, max_completion_tokens=3)
    chunks = await streamed(server, "/v1/completions", fields)

    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (1, 3)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {120}


async def streamed(server: Running, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, from bytes: no client drops what it does not know."""
    text = (await server.http.post(path, json=fields)).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_told_by_tier_as_sglang_does(server: Running, stream: bool) -> None:
    prompt = f"tiers {stream} " + PROMPT
    fields = body(prompt=prompt, stream=stream, return_cached_tokens_details=True)
    hit = len(prompt) // PAGE * PAGE
    for cached_tokens in (0, hit):
        if stream:
            chunks = await streamed(server, "/v1/completions", fields)
            (told,) = [chunk["sglext"] for chunk in chunks if "sglext" in chunk and chunk["choices"]]
        else:
            told = (await server.http.post("/v1/completions", json=fields)).json()["sglext"]
        assert told == {"cached_tokens_details": {"device": cached_tokens, "host": 0, "storage": 0}}


async def test_a_conversation_resumes_where_its_last_turn_ended(server: Running) -> None:
    messages: list[Any] = []
    computed = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}: {PROMPT}"})
        prompt = LOADED.tokenizer.encode_chat(Conversation(messages))
        answer = await server.openai.chat.completions.create(
            model="qwen3_5", messages=messages, max_completion_tokens=20, temperature=0
        )
        assert answer.choices[0].message.content == as_text(LOADED, uncached(LOADED, prompt, 20))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == computed // PAGE * PAGE
        messages.append(answer.choices[0].message.model_dump())
        computed = len(prompt) + 20 - 1  # the last token was not fed to the model


async def test_a_streamed_chat_begins_with_its_role(server: Running) -> None:
    stream = await server.openai.chat.completions.create(
        model="qwen3_5",
        messages=[{"role": "user", "content": "role"}],
        max_tokens=5,
        temperature=0,
        stream=True,
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    prompt = LOADED.tokenizer.encode_chat(Conversation([{"role": "user", "content": "role"}]))
    assert "".join(delta.content or "" for delta in deltas) == as_text(LOADED, uncached(LOADED, prompt, 5))


async def cached(server: Running, prompt: str, **extra: Any) -> int:
    answer = await server.openai.completions.create(
        model="qwen3_5", prompt=prompt, max_tokens=1, temperature=0, extra_body=extra
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_salts_share_nothing(server: Running) -> None:
    prompt = "salted " + PROMPT
    hit = len(prompt) // PAGE * PAGE
    assert await cached(server, prompt, cache_salt="a") == 0
    assert await cached(server, prompt, cache_salt="a") == hit
    assert await cached(server, prompt, cache_salt="b") == 0
    assert await cached(server, prompt) == 0
    assert await cached(server, prompt) == hit


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(server: Running) -> None:
    whole = expected(PROMPT, 30)
    stop = whole[10:12]
    answer = await server.openai.completions.create(
        model="qwen3_5", prompt=PROMPT, max_tokens=30, temperature=0, stop=["never", stop]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 30


@pytest.mark.parametrize("more", [{}, {"n": 8}, {"max_tokens": 0}, {"max_tokens": 1, "echo": True, "n": 8}])
async def test_an_answer_that_has_been_sent_is_no_client_that_left(
    server: Running, more: dict[str, Any]
) -> None:
    """Whatever is left to tidy up then: a stop string ends a generation before its limit."""
    await server.idle()
    before = (server.api.counts.answered, server.api.counts.cancelled)
    stop = expected(PROMPT, 30)[10:12]
    fields = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": stop, **more}
    for stream in (False, True):
        await server.http.post("/v1/completions", json={**fields, "stream": stream})
    await server.idle()
    assert (server.api.counts.answered, server.api.counts.cancelled) == (before[0] + 2, before[1])


async def test_the_same_seed_draws_the_same_text(server: Running) -> None:
    async def drawn(seed: int) -> str:
        answer = await server.openai.completions.create(
            model="qwen3_5", prompt=PROMPT, max_tokens=12, seed=seed, temperature=1.5, top_p=0.9
        )
        return answer.choices[0].text

    assert await drawn(-7) == await drawn(-7)
    assert await drawn(-7) != await drawn(8)


async def test_choices_are_as_many_and_each_is_another(server: Running) -> None:
    """Of a drawn answer; they share the prompt, which counts once."""
    fields = {"prompt": "choices " + PROMPT, "max_tokens": 12, "seed": 5, "temperature": 1.5}
    answer = await server.openai.completions.create(model="qwen3_5", n=3, **fields)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT) + 8, 36)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0  # what was there before, not what they share

    again = await server.openai.completions.create(model="qwen3_5", **{**fields, "seed": 6})
    assert again.choices[0].text == texts[1]
    stream = await server.openai.completions.create(model="qwen3_5", n=3, stream=True, **fields)
    parts = [choice async for chunk in stream for choice in chunk.choices]
    assert ["".join(part.text for part in parts if part.index == index) for index in range(3)] == texts


async def test_several_prompts_are_answered_in_their_order(server: Running) -> None:
    prompts = ["first " + PROMPT, "second " + PROMPT * 3, "third"]
    answer = await server.openai.completions.create(
        model="qwen3_5", prompt=prompts, max_tokens=6, temperature=0, n=2
    )
    assert [choice.text for choice in answer.choices] == [expected(p, 6) for p in prompts for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


async def test_each_choice_of_a_chat_begins_with_its_role(server: Running) -> None:
    stream = await server.openai.chat.completions.create(
        model="qwen3_5", messages=[{"role": "user", "content": "x"}], max_tokens=3, n=2, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    roles = [choice.index for choice in choices if choice.delta.role == "assistant"]
    assert sorted(roles) == [0, 1]
    assert sorted(choice.index for choice in choices if choice.finish_reason) == [0, 1]


async def test_more_answers_than_wait_together_are_refused_at_once(server: Running) -> None:
    answer = await server.http.post("/v1/completions", json=body(prompt=["a"] * 40, n=8))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "prompt"
    assert "40 prompts with 8 answers each are more than the 288" in error["message"]


async def test_scores_are_the_models_own_cold_and_warm(server: Running) -> None:
    """Drawn or not: they are those before temperature."""
    fields = {"prompt": "scored " + PROMPT, "max_tokens": 5, "temperature": 0}
    tokens = LOADED.tokenizer.encode(str(fields["prompt"]))
    said = uncached(LOADED, tokens, 5)
    with torch.no_grad():
        rows = LOADED.model(torch.tensor([[*tokens, *said]])).logits[0].log_softmax(-1)
    own = [float(rows[len(tokens) + place - 1, token]) for place, token in enumerate(said)]
    for _ in range(2):
        answer = await server.openai.completions.create(model="qwen3_5", logprobs=2, **fields)
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.token_logprobs == pytest.approx(own, abs=1e-3)
        assert told.top_logprobs is not None
        for likely, value in zip(told.top_logprobs, told.token_logprobs or (), strict=True):
            assert len(likely) == 2
            assert max(likely.values()) == value  # greedy
        assert told.tokens == [LOADED.tokenizer.token_text(token) for token in said]
        assert told.text_offset is not None
        assert told.text_offset[0] == 0
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


async def test_scores_of_a_chat_are_in_its_shape_streamed_too(server: Running) -> None:
    fields: Any = {
        "model": "qwen3_5",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = await server.openai.chat.completions.create(**fields)
    stream = await server.openai.chat.completions.create(stream=True, **fields)
    assert answer.choices[0].logprobs is not None
    whole = answer.choices[0].logprobs.content or []
    parts = [
        score
        async for chunk in stream
        if (told := chunk.choices[0].logprobs) is not None
        for score in told.content or []
    ]
    assert [score.token for score in parts] == [score.token for score in whole]
    assert len(whole) == 4
    for score in whole:
        assert len(score.top_logprobs) == 3
        assert score.top_logprobs[0].logprob == score.logprob
        assert bytes(score.bytes or []).decode() == score.token


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_has_the_prompt_and_the_scores_of_its_tokens(server: Running, stream: bool) -> None:
    """As what measures how likely given texts are asks for them."""
    prompt = f"echo {stream} " + PROMPT
    tokens = LOADED.tokenizer.encode(prompt)
    with torch.no_grad():
        rows = LOADED.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    own = rows.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0].tolist()
    for count in (0, 1):
        fields = body(prompt=tokens, max_tokens=count, echo=True, logprobs=1, stream=stream)
        if stream:
            choices = [
                c for chunk in await streamed(server, "/v1/completions", fields) for c in chunk["choices"]
            ]
        else:
            choices = (await server.http.post("/v1/completions", json=fields)).json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        scores = [score for one in told for score in one["token_logprobs"]]
        assert text == prompt + expected(prompt, 1)[: len(text) - len(prompt)]
        assert scores[0] is None
        assert scores[1 : len(tokens)] == pytest.approx(own, abs=1e-3)
        assert len(scores) == len(tokens) + count
        assert told[0]["text_offset"][:3] == [0, 1, 2]
        assert told[0]["top_logprobs"][0] is None


async def test_no_tokens_are_asked_for_and_the_prompt_is_warm(server: Running) -> None:
    prompt = "warm " + PROMPT
    answer = await server.openai.completions.create(model="qwen3_5", prompt=prompt, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert await cached(server, prompt) == len(prompt) // PAGE * PAGE
    echoed = await server.openai.completions.create(
        model="qwen3_5", prompt=prompt, max_tokens=2, temperature=0, echo=True
    )
    assert echoed.choices[0].text == prompt + expected(prompt, 2)


async def test_tokens_are_a_prompt_too(server: Running) -> None:
    ids = [255, 254, *range(40)]
    answer = await server.openai.completions.create(model="qwen3_5", prompt=ids, max_tokens=6, temperature=0)
    assert answer.choices[0].text == as_text(LOADED, uncached(LOADED, ids, 6))


async def test_the_model_is_listed(server: Running) -> None:
    models = [model.id async for model in server.openai.models.list()]
    assert models == ["qwen3_5"]
    assert (await server.openai.models.retrieve("qwen3_5")).id == "qwen3_5"
    with pytest.raises(NotFoundError, match="qwen3_5"):
        await server.openai.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("m", True),
        ("models/x", True),
        ("./models/x/", True),
        (str(Path.cwd() / "models/x"), True),
        ("x", False),
        ("models", False),
        ("", False),
    ],
)
async def test_a_checkpoint_is_called_by_its_folder_too(name: str, known: bool) -> None:
    served = ServedModel(
        "m", LOADED.tokenizer, 256, frozenset(), 2048, answer_tokens=16, folder=Path("./models/x")
    )
    assert served.is_called(name) == known


async def test_health_tells_what_is_going_on(server: Running) -> None:
    answer = await server.http.get("/health")
    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "ok"
    assert body.keys() >= {"model", "running", "waiting", "storage_breakers"}
    assert body["storage"] == "none"


async def test_each_request_is_a_line_of_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await server.http.post("/v1/completions", json=body(prompt="the access log", max_tokens=2))
        await server.http.post("/v1/completions", json=body(min_p=2))
        await server.http.get("/no%0Aline")
        for refused in (
            {"max_completion_tokens": 3, "max_secret": 1},
            {"stream_options": {"continuous": True}},
            {"cache_hint": {"forever": 1}},
            {"temperature": 3},
            {"prompt": [7, -1]},
            {"model": "m" * 300},
            {"stop": ["a private matter" * 9] * 99},
        ):
            await server.http.post("/v1/completions", json=body(**refused))
        await server.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "private" * 9, "content": "x"}]}
        )
        await server.http.post(
            "/v1/completions", content=b"private", headers={"content-type": "application/json"}
        )
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("serve.access")]

    took = r"in \d+\.\d{3} s"
    tokens = r"14 prompt tokens, 0 of them cached; 2 generated, the first after \d+\.\d{3} s"
    assert re.fullmatch(rf"127\.0\.0\.1:\d+ POST /v1/completions: 200 {took}; {tokens}", lines[0])
    assert re.fullmatch(
        rf"\S+ POST /v1/completions: 400 {took}; min_p is not supported: leave it out; .*", lines[1]
    )
    assert re.fullmatch(rf"\S+ GET /no%0Aline: 404 {took}; no such path", lines[2])
    flag = "is not known: leave it out, or serve with --ignore-unknown-fields"
    reasons = [line.split(" s; ")[1] for line in lines[3:]]
    assert reasons[:3] == [
        f"max_secret {flag}",
        f"stream_options.continuous {flag}",
        f"cache_hint.forever {flag}",
    ]
    for reason, field in zip(
        reasons[3:], ("temperature", "prompt", "model", "stop", "messages", "body"), strict=True
    ):
        assert field in reason
        assert len(reason) <= 200
        assert "private" not in reason
        assert "mmm" not in reason


async def test_the_server_describes_itself(server: Running) -> None:
    lines = list(describe(server.api))

    assert lines[0].startswith("serving 'qwen3_5': qwen3_5_text, ")
    assert lines[1].startswith("pool 'kv': 256 pages on the device (")
    assert lines[2].startswith("pool 'mamba': 64 states on the device (")
    assert lines[4].startswith("storage: none: ")
    spec = server.api.model.spec
    nbytes = sum(pool.slot_bytes(spec.page_size) * {"kv": 256, "mamba": 64}[pool.name] for pool in spec.pools)
    on_host = server.api.model.cache.statistics().memory_bytes[Tier.HOST]
    sizes = [
        f"{tier / (1 << 20):.4g} MiB on the {name}" for tier, name in ((nbytes, "device"), (on_host, "host"))
    ]
    assert f"memory: {', '.join(sizes)}; pages" in lines[3]


async def test_metrics_are_those_of_cache_and_server(server: Running) -> None:
    for _ in range(2):
        cached_tokens = await cached(server, "metered " + PROMPT)
    assert cached_tokens > 0
    answer = await server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        sample.name + str(dict(sample.labels)): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    counts = server.api.counts
    assert samples["asynchicache_serve_requests_total{'status': '200'}"] == counts.answered > 0
    assert samples["asynchicache_serve_tokens_total{'kind': 'cached'}"] == counts.cached_tokens > 0
    assert samples["asynchicache_serve_first_token_seconds_count{}"] == counts.answered
    assert samples["asynchicache_serve_requests{'state': 'running'}"] == 0
    assert samples["asynchicache_prompt_tokens_total{}"] > 0


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "words"),
    [
        ("/v1/completions", b"{", JSON, 400, "no JSON object"),
        ("/v1/completions", b'{"prompt": "a", "min_p": 2}', JSON, 400, "min_p is not supported"),
        ("/v1/completions", b'{"prompt": [256]}', JSON, 400, "0 to 255"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 5000}', JSON, 400, "2048"),
        ("/v1/completions", b'{"prompt": "a", "model": "gpt"}', JSON, 404, "'qwen3_5'"),
        ("/v1/chat/completions", b'{"messages": []}', JSON, 400, "messages"),
        ("/v1/completions", b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "application/json"),
        ("/v1/embeddings", b"{}", JSON, 404, "/v1/embeddings"),
        ("/health", b"{}", JSON, 405, "POST /health: send GET"),
    ],
)
async def test_what_is_not_answered_is_told_in_openais_shape(
    server: Running, path: str, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = await server.http.post(path, content=body, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"]


async def test_a_long_body_is_refused_whether_announced_or_not() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100

    async with running(LOADED, max_body_bytes=1000) as server:
        for content in (b" " * 1001, parts()):
            answer = await server.http.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
