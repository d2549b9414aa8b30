"""Conversations with a server over HTTP, streamed to measure the time to first token."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from asynchicache.errors import CacheError
from asynchicache.integrations.serve.tokenizers import ByteTokenizer
from asynchicache.integrations.transformers.demo_model import VOCABULARY
from asynchicache_lab.bench.serve.options import ServeBenchOptions


@dataclass(frozen=True, slots=True)
class ServeTurn:
    """One answer.

    Attributes:
        tokens: the generated tokens.
        cached_tokens: number of prompt tokens served from the cache.
        ttft_ms: milliseconds from sending the request to the first token's arrival.
        by_tier: the cached tokens of each tier.
    """

    tokens: list[int]
    cached_tokens: int
    ttft_ms: float
    by_tier: Mapping[str, int] = field(default_factory=dict)


class ServerError(CacheError):
    """Raised when a request gets a wrong answer or none."""


class Client:
    """Sends requests to one server.

    Args:
        http: an HTTP client with the server's address.
        output_length: tokens of an answer.
        vocabulary: token ids of the model.
    """

    def __init__(self, http: httpx.AsyncClient, output_length: int, vocabulary: int = VOCABULARY) -> None:
        self._http = http
        self._output_length = output_length
        self._tokens = ByteTokenizer(vocabulary)

    async def ask(self, prompt: list[int], salt: str) -> ServeTurn:
        """Run one turn.

        Raises:
            ServerError: the answer is missing or incomplete.
        """
        body = {
            "prompt": prompt,
            "max_tokens": self._output_length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            "return_cached_tokens_details": True,
        }
        try:
            return await self._stream(body)
        except httpx.HTTPError as error:
            raise ServerError(repr(error)) from error

    async def _stream(self, body: Mapping[str, object]) -> ServeTurn:
        sent, first = time.perf_counter(), 0.0
        text, usage, ended = "", None, False
        by_tier: Mapping[str, int] = {}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ServerError(f"status {answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                first = first or time.perf_counter()
                ended = ended or line == "data: [DONE]"
                chunk = _chunk(line)
                text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                usage = chunk.get("usage") or usage
                by_tier = chunk.get("sglext", {}).get("cached_tokens_details", by_tier)
        tokens = self._tokens.encode(text)
        if not ended or usage is None or len(tokens) != self._output_length:
            raise ServerError(f"an answer of {len(tokens)} tokens, {self._output_length} were asked for")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return ServeTurn(tokens, cached, (first - sent) * 1e3, by_tier)


def _chunk(line: str) -> Mapping[str, Any]:
    data = line.removeprefix("data: ")
    return msgspec.json.decode(data) if data.startswith("{") else {}


def questions(options: ServeBenchOptions) -> list[list[list[int]]]:
    """New prompt tokens by client and round. All conversations begin differently."""
    draw = random.Random(options.seed)
    lengths = [options.first_length] + [options.request_length] * (options.num_rounds - 1)
    return [
        [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
        for _ in range(options.num_clients)
    ]
