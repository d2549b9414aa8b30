"""Times to the first token of prompts that were computed before, from each place they can come from.

Not a test: it prints a table. Run it with `make engines-e2e ARGS="vllm --run speed.py"`, on a machine that
does nothing else. Cases take turns in every round, so that a change of load meets all of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from connecting import connector
from models import checkpoint
from running import Engine, prompts

ROUNDS = 3
MODEL = "qwen3_76m"
PROMPTS = prompts(3, 1850)
HOST_BYTES = 512 << 20
SPACE = {"max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20}


class Sample(NamedTuple):
    """One prompt: seconds to its first token, processor seconds of the process, and tokens not computed."""

    ttft: float
    cpu: float
    cached: int


def ask(engine: Engine) -> list[Sample]:
    samples = []
    for prompt in PROMPTS:
        started = time.process_time()
        (answer,) = engine.ask([prompt], new=1)
        samples.append(Sample(answer.ttft, time.process_time() - started, answer.cached))
    return samples


def settle(engine: Engine) -> None:
    """Let copies and writes end: vLLM reports them in steps of later requests."""
    for _ in range(3):
        engine.ask([[5] * 40])
        time.sleep(0.5)


def tiering(tier: dict[str, Any], spec: tuple[str, str]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec[0],
            "spec_module_path": spec[1],
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [tier],
        },
    }


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Configurations by name, each over a folder of its own."""
    ours = {
        "type": "AsynchicacheTier",
        "module_path": "asynchicache.integrations.vllm.tier",
        "storage": "file",
        "storage_options": {"path": str(folder / "tier")},
        "weight_version": "w1",
    }
    theirs = {"type": "fs", "root_dir": str(folder / "fs")}
    buffered = {"path": str(folder / "buffered"), "direct": False}
    return {
        "connector": connector(folder / "connector", host_bytes=HOST_BYTES),
        "connector, page cache": connector(folder, host_bytes=HOST_BYTES, storage_options=buffered),
        "AsynchicacheTier": tiering(ours, ("CpuTieringSpec", "cpu_tiering")),
        "vLLM fs tier": tiering(theirs, ("OnHost", "cpu_tiering")),
    }


def measure(model: Path, folder: Path) -> dict[tuple[str, str], list[Sample]]:
    found: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    configurations = cases(folder)
    for transfer in configurations.values():
        with Engine(model, transfer, **SPACE) as engine:
            ask(engine)
            settle(engine)
    for number in range(ROUNDS):
        with Engine(model, **SPACE) as plain:
            found["vLLM alone", "computed"] += ask(plain)
            found["vLLM alone", "its prefix cache"] += ask(plain)
        names = list(configurations)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with Engine(model, configurations[name], **SPACE) as engine:
                engine.ask([[7] * 40])  # the first request of a process pays for imports
                found[name, "disk"] += ask(engine)
                settle(engine)
                engine.llm.reset_prefix_cache()
                found[name, "host memory"] += ask(engine)
    return found


def main() -> None:
    model = checkpoint(Path(os.environ["ASYNCHICACHE_ENGINE_FOLDER"]) / "models", MODEL)
    with TemporaryDirectory() as folder:
        found = measure(model, Path(folder))
    load = os.getloadavg()[0]
    sys.stdout.write(f"{MODEL}, {[len(prompt) for prompt in PROMPTS]} tokens, load {load:.1f}\n")
    sys.stdout.write(
        "| from | place | hit tokens | first token, s: median (range) | processor, s |\n"
        "|---|---|---|---|---|\n"
    )
    for (name, place), samples in found.items():
        times = [sample.ttft for sample in samples]
        hits = sorted({sample.cached for sample in samples})
        cpu = statistics.median(sample.cpu for sample in samples)
        sys.stdout.write(
            f"| {name} | {place} | {', '.join(map(str, hits))} | {statistics.median(times):.3f} "
            f"({min(times):.3f} to {max(times):.3f}) | {cpu:.2f} |\n"
        )


if __name__ == "__main__":
    main()
