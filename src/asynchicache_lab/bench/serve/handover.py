"""First tokens of prompts that another server has computed, beside those of prompts on the decoder's host.

Two servers over one Redis, without a proxy. The decoder is asked for each prompt three times: while the
prefill computes it; when storage has it, with another salt; and when the next one has pushed it to the host.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import transformers
from rich.console import RenderableType

from asynchicache.integrations.transformers.demo_model import VOCABULARY, build_demo_model, randomize_weights
from asynchicache.reports import Advance, facts
from asynchicache.specs import ModelSpec
from asynchicache_lab.bench.serve.clients import Client, ServerError, ServeTurn
from asynchicache_lab.bench.serve.options import HandoverOptions
from asynchicache_lab.bench.serve.outages import open_outage
from asynchicache_lab.bench.serve.server_process import server_process

_SECONDS = 600.0
_ANSWER = 4

_DEEPSEEK_V4: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "sliding_window": 128,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 2,
    "mlp_layer_types": ["moe"] * 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(slots=True, eq=False)
class HandoverReport:
    """Milliseconds to the first token, and what was wrong.

    Attributes:
        host: of prompts on the decoder's host.
        storage: of prompts that storage has.
        waiting: of prompts that the decoder waited for, from the answer of their prefill on.
        misses: answers that had not all whole pages from the tier that is measured.
    """

    options: HandoverOptions
    host: list[float] = field(default_factory=list)
    storage: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    misses: int = 0

    @property
    def ok(self) -> bool:
        return not self.misses

    def as_json(self) -> dict[str, object]:
        host, storage, waiting = (median(each) for each in (self.host, self.storage, self.waiting))
        return {
            "ok": self.ok,
            "model": self.options.model,
            "tokens": self.options.tokens,
            "misses": self.misses,
            "host_ms": host,
            "storage_ms": storage,
            "waiting_ms": waiting,
            "storage_ratio": storage / host,
            "waiting_ratio": waiting / host,
        }

    def present(self) -> RenderableType:
        found = self.as_json()
        rows = [
            (name, str(one) if isinstance(one, str | int) else f"{one:.2f}") for name, one in found.items()
        ]
        return facts(rows, "first tokens, medians")


async def run_handover(options: HandoverOptions, advance: Advance) -> HandoverReport:
    """Measure, one request at a time.

    Raises:
        ConfigError: a server or Redis does not start.
        ServerError: a server does not answer.
    """
    report = HandoverReport(options)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="asynchicache-handover-")))
        flags = [*stack.enter_context(open_outage("redis", folder)).flags, *_model(options, folder)]
        bench = HandoverBench(
            await stack.enter_async_context(_served(folder / "prefill.log", [*flags, "--role", "prefill"])),
            await stack.enter_async_context(
                _served(folder / "decode.log", [*flags, "--role", "decode", "--wait-seconds", "600"])
            ),
            report,
        )
        draw = random.Random(options.seed)
        prompts = [
            [draw.randrange(VOCABULARY) for _ in range(options.tokens)] for _ in range(options.rounds + 2)
        ]
        for number, prompt in enumerate(prompts):
            bench.measures = number > 1  # the first two prompts warm both servers up
            await bench.hand_over(prompt)
            await bench.ask(prompts[max(number - 1, 0)], "storage", "host", report.host)
            advance(max(number - 1, 0), options.rounds)
    return report


class HandoverBench:
    """Asks both servers, one prompt at a time."""

    def __init__(self, prefill: httpx.AsyncClient, decode: httpx.AsyncClient, report: HandoverReport) -> None:
        self.measures = False
        self._prefill = prefill
        self._decode = Client(decode, _ANSWER)
        self._report = report

    async def hand_over(self, prompt: list[int]) -> None:
        """Have the decoder wait for the prompt, and then, with another salt, find it in storage."""
        began = time.perf_counter()
        turn, ended = await asyncio.gather(
            self._decode.ask(prompt, "waiting"), self._compute(prompt, "waiting")
        )
        self._take(turn, "storage", self._report.waiting, late=ended - began)
        await self._compute(prompt, "storage")
        await self.ask(prompt, "storage", "storage", self._report.storage)

    async def ask(self, prompt: list[int], salt: str, tier: str, times: list[float]) -> None:
        self._take(await self._decode.ask(prompt, salt), tier, times)

    def _take(self, turn: ServeTurn, tier: str, times: list[float], late: float = 0.0) -> None:
        if self.measures:
            times.append(turn.ttft_ms - late * 1e3)
            self._report.misses += turn.by_tier.get(tier) != self._report.options.whole

    async def _compute(self, prompt: list[int], salt: str) -> float:
        """Compute a prompt; returns when storage has it, in seconds.

        Raises:
            ServerError: the prefill does not answer.
        """
        try:
            answer = await self._prefill.post("/v1/completions", json={"prompt": prompt, "cache_salt": salt})
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(repr(error)) from error
        return time.perf_counter()


@asynccontextmanager
async def _served(log: Path, flags: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        server_process(log, flags) as server,
        httpx.AsyncClient(base_url=server.address, timeout=_SECONDS, trust_env=False) as http,
    ):
        yield http


def _model(options: HandoverOptions, folder: Path) -> list[str]:
    """Flags of a server for the model, and for a device that holds two prompts and an answer."""
    flags = ["--page-size", str(options.page_size), "--seed", str(options.seed)]
    model, config = build_demo_model(options.seed)
    if options.model == "deepseek_v4":
        config = transformers.DeepseekV4Config(**_DEEPSEEK_V4)
        model = transformers.DeepseekV4ForCausalLM(config).float()
        randomize_weights(model, options.seed)
        model.save_pretrained(folder / "model")
        flags += ["--model", str(folder / "model"), "--tokenizer", "bytes"]
    spec, pages = (
        ModelSpec.from_config(config, page_size=options.page_size),
        options.whole // options.page_size + 2,
    )
    device = {pool.name: 2 * pages if pool.per_token else 6 for pool in spec.owners}
    host = {name: (options.rounds + 3) * count for name, count in device.items()}
    cache = {"device_slots": device, "host_slots": host, "weight_version": "1"}
    return [*flags, "--config", json.dumps(cache)]
