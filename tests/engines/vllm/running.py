"""vLLM in this process: starts over one folder are restarts of one server."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

Prompt = list[int]

BLOCK = 32
GATED_DELTA_NETS = frozenset({"qwen3_next", "qwen3_5"})
CHOOSES_BLOCKS = GATED_DELTA_NETS | {"granite_hybrid", "nemotron_h"}
"""Models with states: vLLM makes their blocks as large as a state, whatever it is told."""


class Answer(NamedTuple):
    """What a request got.

    Attributes:
        tokens: what was generated.
        cached: tokens of the prompt that were not computed.
        ttft: seconds to the first token.
    """

    tokens: list[int]
    cached: int
    ttft: float


class Engine:
    """One `LLM` in this process, which a `with` block shuts down.

    Args:
        checkpoint: folder of the model.
        transfer: `kv_transfer_config`; None for none.
        arguments: further ones of `LLM`.
    """

    def __init__(self, checkpoint: Path, transfer: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        if checkpoint.name not in CHOOSES_BLOCKS:
            arguments.setdefault("block_size", BLOCK)
        try:
            self.llm = LLM(**(_arguments(checkpoint, transfer) | arguments))
        except BaseException:
            _forget()
            raise

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        new: int = 12,
        hints: Mapping[str, Any] | None = None,
        afresh: bool = False,
        lora: LoRARequest | None = None,
    ) -> list[Answer]:
        """Answer prompts, which run together; greedily. With `afresh` nothing that is cached is used."""
        extra = {"kv_transfer_params": {"asynchicache": dict(hints)}} if hints else None
        parameters = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
            skip_reading_prefix_cache=afresh,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            parameters,
            use_tqdm=False,
            lora_request=lora,
        )
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(prompts)
        return [
            Answer(
                list(output.outputs[0].token_ids),
                output.num_cached_tokens or 0,
                output.metrics.first_token_latency if output.metrics else 0.0,
            )
            for output in outputs
        ]

    def ask_in_turn(
        self, prompts: Sequence[Prompt], *, new: int = 12, hints: Mapping[str, Any] | None = None
    ) -> list[Answer]:
        """Answer prompts, one after the other."""
        return [self.ask([prompt], new=new, hints=hints)[0] for prompt in prompts]

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return values by metric name and the values of its own labels."""
        return {
            (
                metric.name,
                *(value for name, value in metric.labels.items() if name not in _SHARED),
            ): metric.value
            for metric in self.llm.get_metrics()
            if hasattr(metric, "value")
        }

    def held_blocks(self) -> int:
        """Blocks of the device that requests or copies refer to, without number 0."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        return sum(block.ref_cnt > 0 for block in blocks if not block.is_null)

    def close(self) -> None:
        """Shut the engine down as `LLM` does at its end."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        _forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_SHARED = frozenset({"model_name", "engine"})


def _arguments(checkpoint: Path, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        "kv_transfer_config": transfer and dict(transfer),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
        # Both of these together spare the warm-up.
        "enforce_eager": True,
        "kv_cache_memory_bytes": 128 << 20,
        # In bfloat16 a hit, vLLM's own too, rounds differently and changes tokens. GDN layers have no other.
        "dtype": "bfloat16" if checkpoint.name in GATED_DELTA_NETS else "float32",
        "disable_log_stats": False,
        "seed": 0,
    }


def _forget() -> None:
    """Drop what an engine leaves in vLLM's modules, or the next one of this process uses its connector."""
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def prompts(count: int, length: int, *, seed: int = 5) -> list[Prompt]:
    """Return prompts that share nothing; each is 37 tokens longer than the one before."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 500) for _ in range(length + 37 * place)] for place in range(count)]


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]
