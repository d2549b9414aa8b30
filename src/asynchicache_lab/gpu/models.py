"""First tokens of real model classes at real sizes, with random weights: computed, and from each tier.

    python -m asynchicache_lab.gpu.models --device cuda:0 --lengths 2048,8192,32768 --seconds 290

For each model and length a row says how long the first token took: `plain` (transformers alone, the whole
prompt in one forward), `computed` (through the cache, which has nothing), and a next turn, of some tokens
more, from `device`, `host` (after other prompts), `storage` (after both were emptied) and `restart` (opened
again). `tiers` says where the tokens came from, and `same` whether the answer is that of the turn from the
device; in 16 bits it may differ where chunks end elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from asynchicache import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.errors import CacheError
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.specs import ModelSpec
from asynchicache_lab.gpu.rows import Deadline, tell

TURN = 48  # tokens that a next turn adds
_COMMON = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 65536}
_FULL = {"vocab_size": 32_000, **_COMMON}
_SMALL = {
    **_COMMON,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

MODELS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    # An 8B: 144 KiB of keys and values a token.
    "dense": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        {"num_hidden_layers": 4},
    ),
    # A 4B: 24 gated delta nets and 8 layers of attention; 32 KiB a token, and a state of some 50 MiB.
    "hybrid": (
        "Qwen3_5",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    # Windows of 1,024 tokens in five of six layers.
    "windows": (
        "Gemma3",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
        {"num_hidden_layers": 6, "sliding_window": 32},
    ),
}
"""By name, the prefix of the model's class, its sizes, and what differs from `_SMALL` in a small one."""


def build(name: str, device: str, *, small: bool) -> PreTrainedModel:
    """A model with random weights, made on the device, in bfloat16 or, a small one, in float32."""
    prefix, full, few = MODELS[name]
    sizes = {**_SMALL, **few} if small else {**_FULL, **full}
    config_name = f"{prefix}Config" if prefix == "Qwen3" else f"{prefix}TextConfig"
    config = getattr(transformers, config_name)(**sizes)
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    try:
        with torch.device(device):
            model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


@dataclass(slots=True, eq=False)
class Trial:
    """One model and its prompts.

    Attributes:
        name: of the model.
        small: whether it is a small one, for a CPU.
        turns: by length of the prompt, the tokens of its next turn.
        answers: to these turns, from the device.
    """

    name: str
    model: PreTrainedModel
    small: bool
    device: str
    folder: Path
    end: Deadline
    lengths: Sequence[int]
    turns: dict[int, list[int]] = field(init=False)
    answers: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = {length: self.tokens(length + TURN, seed=length) for length in self.lengths}

    def tokens(self, count: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self.model.config.vocab_size) for _ in range(count)]

    @property
    def page_size(self) -> int:
        return 16 if self.small else 64

    @property
    def device_tokens(self) -> int:
        """Two of the longest prompts, and little more."""
        return int(2.2 * (max(self.lengths) + 4 * TURN))

    def config(self) -> CacheConfig:
        """A device that others push the prompts out of, and a host that holds all."""
        spec = ModelSpec.from_config(self.model.config, page_size=self.page_size)
        page = sum(pool.slot_bytes(self.page_size) for pool in spec.pools if pool.per_token)
        state = sum(pool.slot_bytes(self.page_size) for pool in spec.pools if not pool.per_token)
        pages = self.device_tokens // self.page_size
        return CacheConfig(
            device=self.device,
            device_bytes=pages * page + 12 * state,
            host_bytes=3 * pages * page + 40 * state,
            storage="file",
            storage_options={"path": str(self.folder)},
            weight_version="random",
            tokens_per_state=32 if self.small else 512,
            prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        )

    def lengths_left(self) -> Iterator[int]:
        """Those that there is time for."""
        for length in self.lengths:
            if self.end.passed:
                return
            yield length


def plain(trial: Trial) -> None:
    """Transformers alone."""
    for length in trial.lengths_left():
        try:
            seconds = min(_forward(trial, trial.turns[length][:length]) for _ in "12")
        except torch.OutOfMemoryError as error:
            tell(model=trial.name, length=length, what="plain", refused=str(error)[:100])
            continue
        tell(model=trial.name, length=length, what="plain", ttft_ms=round(1e3 * seconds, 1))


@torch.no_grad()
def _forward(trial: Trial, prompt: list[int]) -> float:
    model, started = trial.model, time.perf_counter()
    ids = torch.tensor([prompt], device=trial.device)
    memory = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=memory, use_cache=True, logits_to_keep=1).logits
    int(logits[0, -1].argmax())  # waits for the device
    return time.perf_counter() - started


@asynccontextmanager
async def opened(trial: Trial) -> Any:
    started = time.monotonic()
    chunk = 64 if trial.small else 2048
    async with PrefixCachedModel.open(
        trial.model, config=trial.config(), page_size=trial.page_size, prefill_chunk=chunk
    ) as served:
        tell(model=trial.name, what="opened", seconds=round(time.monotonic() - started, 1))
        yield served


async def ask(trial: Trial, served: PrefixCachedModel, what: str, length: int, prompt: list[int]) -> None:
    """Ask for some tokens, and tell when the first came, and from where the prompt."""
    answer = served.generate(prompt, max_new_tokens=4, stop_token_ids=())
    tokens = [token async for token in answer]
    first = trial.answers.setdefault(length, tokens) if what == "device" else trial.answers.get(length)
    tell(
        model=trial.name,
        length=length,
        what=what,
        ttft_ms=round(1e3 * (answer.ttft_s or 0), 1),
        cached=answer.cached_tokens,
        tiers={tier.name.lower(): count for tier, count in answer.tokens_by_tier.items() if count},
        miss=answer.miss_reason.value,
        same=None if first is None else tokens == first,
    )


async def from_each_tier(trial: Trial) -> None:
    async with opened(trial) as served:
        await _drop(served, trial.tokens(300, seed=0))  # the first forwards of a process take longer
        for length in trial.lengths_left():
            await ask(trial, served, "computed", length, trial.turns[length][:length])
            await ask(trial, served, "device", length, trial.turns[length])
            await served.drain()
        longest = max(trial.lengths)
        for number in range(-(-trial.device_tokens // longest)):
            if not trial.end.passed:
                await _drop(served, trial.tokens(longest, seed=number + 1))
        await served.drain()
        for length in trial.lengths_left():
            await ask(trial, served, "host", length, trial.turns[length])
        await served.drain()
        await served.cache.flush()
        for length in trial.lengths_left():
            await ask(trial, served, "storage", length, trial.turns[length])
        await served.drain()
        tell(model=trial.name, what="verified", problems=[str(one) for one in served.cache.verify()])
    async with opened(trial) as served:
        for length in trial.lengths_left():
            await ask(trial, served, "restart", length, trial.turns[length])
        if not trial.end.passed:
            await _many(trial, served)


async def _drop(served: PrefixCachedModel, prompt: list[int]) -> None:
    async for _ in served.generate(prompt, max_new_tokens=1, stop_token_ids=()):
        pass


async def _many(trial: Trial, served: PrefixCachedModel) -> None:
    """Eight at once that begin alike."""
    shared, started = trial.turns[min(trial.lengths)], time.perf_counter()
    prompts = [[*shared, *trial.tokens(64, seed=number)] for number in range(8)]
    answers = [served.generate(prompt, max_new_tokens=16, stop_token_ids=()) for prompt in prompts]
    for answer in answers:
        async for _ in answer:
            pass
    seconds, cached = time.perf_counter() - started, [answer.cached_tokens for answer in answers]
    tell(model=trial.name, length=len(shared), what="eight at once", seconds=round(seconds, 2), cached=cached)


@contextmanager
def trial_of(name: str, given: argparse.Namespace, end: Deadline) -> Iterator[Trial]:
    started = time.monotonic()
    model = build(name, given.device, small=given.small)
    size = sum(weights.numel() * weights.element_size() for weights in model.parameters())
    tell(model=name, what="built", seconds=round(time.monotonic() - started, 1), gb=round(size / 1e9, 1))
    with tempfile.TemporaryDirectory(prefix="asynchicache-gpu-") as folder:
        yield Trial(name, model, given.small, given.device, Path(folder), end, given.lengths)


def run_model(name: str, given: argparse.Namespace, end: Deadline) -> int:
    """Whether it failed."""
    try:
        with trial_of(name, given, end) as trial:
            plain(trial)
            asyncio.run(from_each_tier(trial))
    except (CacheError, RuntimeError, OSError) as error:  # another model may do
        tell(model=name, failed=f"{type(error).__name__}: {error}")
        return 1
    finally:
        gc.collect()
        if given.device != "cpu":
            peak = torch.cuda.max_memory_allocated()
            tell(model=name, what="memory", peak_gb=round(peak / 1e9, 1))
            torch.cuda.empty_cache()
    return 0


def lengths(text: str) -> list[int]:
    return [int(length) for length in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")
    parser.add_argument("--lengths", type=lengths, default=[2048, 8192, 32768])
    parser.add_argument("--models", default="dense,hybrid,windows")
    parser.add_argument("--seconds", type=float, default=290)
    given = parser.parse_args()
    names, whole = given.models.split(","), Deadline(given.seconds)
    failed = 0
    for index, name in enumerate(names):
        failed += run_model(name, given, Deadline(whole.left / (len(names) - index)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
