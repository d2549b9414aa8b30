"""Records what a running vLLM asks the connector, for tests/integrations/test_vllm_replay.py.

    make engines-e2e ARGS="vllm --run record.py"

Hashes and tables are vLLM's own; sizes of blocks are not recorded.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import vllm
from connecting import connector
from models import checkpoint
from running import Engine, prompts

from asynchicache.integrations.vllm.connector_scheduler import ConnectorScheduler

TARGET = Path(__file__).parents[2] / "data" / "calls"
MODELS = {"gemma3": (150, 60, 448), "qwen3_next": (530, 20, 768)}
"""By model: tokens of the prompts, blocks of the device, and most tokens of a request."""

Call = dict[str, Any]


class Recorder:
    """Keeps calls of `ConnectorScheduler` as plain values. Hashes are numbered in the order they come."""

    def __init__(self) -> None:
        self.hashes: dict[str, int] = {}
        self.starts: list[list[Call]] = []
        self.groups: list[Call] = []

    def number(self, hashes: Sequence[bytes]) -> list[int]:
        return [self.hashes.setdefault(bytes(one).hex(), len(self.hashes)) for one in hashes]

    def watch(self) -> None:
        """Record the calls of every scheduler half that this process makes from now on."""
        for name, describe in (
            ("new_request", lambda _, request: self._request(request)),
            ("matched", self._matched),
            ("allocated", self._allocated),
            ("step", self._step),
            ("request_finished", self._finished),
        ):
            self._wrap(name, describe)
        opened = ConnectorScheduler.__init__
        recorder = self

        def begin(scheduler: ConnectorScheduler, groups: Any, *rest: Any) -> None:
            recorder.starts.append([])
            recorder.groups = [
                {"number": one.number, "window": one.pool.coverage.pages, "states": one.states}
                for one in groups.groups
            ]
            opened(scheduler, groups, *rest)

        ConnectorScheduler.__init__ = begin  # type: ignore[method-assign]

    def _wrap(self, name: str, describe: Callable[..., Call]) -> None:
        real = getattr(ConnectorScheduler, name)

        def called(scheduler: ConnectorScheduler, *arguments: Any) -> Any:
            described = {"call": name, **describe(scheduler, *arguments)}
            answer = real(scheduler, *arguments)
            if name == "matched":
                described["answer"] = answer[0]
            if name != "matched" or answer[0] is not None:  # how often it is asked again is a matter of time
                self.starts[-1].append(described)
            return answer

        setattr(ConnectorScheduler, name, called)

    def _request(self, request: Any) -> Call:
        return {
            "id": request.request_id,
            "tokens": request.num_tokens,
            "prompt": request.num_prompt_tokens,
            "computed": request.num_computed_tokens,
            "hashes": self.number(request.block_hashes),
        }

    def _matched(self, _: Any, request: Any, computed: int) -> Call:
        return self._request(request) | {"local": computed}

    def _allocated(self, _: Any, request: Any, tables: Any, external: int) -> Call:
        blocks = [[[one.block_id, bool(one.block_hash)] for one in table] for table in tables]
        return self._request(request) | {"tables": blocks, "external": external}

    def _step(self, scheduler: ConnectorScheduler, output: Any) -> Call:
        state = output.kv_connector_block_state
        requests = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request = scheduler._requests[name].request
            more = {"scheduled": scheduled, "tables": [list(table) for table in state.get_block_ids(name)]}
            offers = state.boundary_state_offloads.get(name, [])
            requests.append(self._request(request) | more | {"offers": [list(offer) for offer in offers]})
        return {"requests": requests}

    def _finished(self, _: Any, request: Any, tables: Any) -> Call:
        return self._request(request) | {"tables": [list(table) for table in tables]}

    def result(self, model: str, blocks: int, block_size: int) -> Call:
        return {
            "vllm": vllm.__version__,
            "model": model,
            "blocks": blocks,
            "block_size": block_size,
            "groups": self.groups,
            "hashes": list(self.hashes),
            "starts": [[call for call in start if call.get("requests") != []] for start in self.starts],
        }


def record(model: Path, length: int, blocks: int, longest: int) -> Call:
    """Two turns of three conversations at once, and the same after a restart."""
    recorder = Recorder()
    recorder.watch()
    first = prompts(3, length)
    second = [prompt + prompt[:100] for prompt in first]
    sizes = {"num_gpu_blocks_override": blocks, "max_model_len": longest}
    with TemporaryDirectory() as folder:
        for _ in range(2):
            with Engine(model, connector(Path(folder)), **sizes) as engine:
                engine.ask(first, new=4)
                engine.ask(second, new=4)
                size = engine.llm.llm_engine.vllm_config.cache_config.block_size
    return recorder.result(model.name, blocks, size)


def main() -> None:
    models = Path(os.environ["ASYNCHICACHE_ENGINE_FOLDER"]) / "models"
    methods = dict(vars(ConnectorScheduler))
    for name, sizes in MODELS.items():
        found = record(checkpoint(models, name), *sizes)
        for method, real in methods.items():
            if callable(real):
                setattr(ConnectorScheduler, method, real)
        target = TARGET / f"vllm-connector-{name}.json"
        target.write_text(json.dumps(found, separators=(",", ":")) + "\n")
        sys.stdout.write(f"wrote {target}, {target.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
