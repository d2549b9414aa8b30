"""vLLM's part around the connector's halves: its scheduler's and its worker's calls, and its blocks.

Blocks have a few bytes, which follow from their key: what is loaded into a block is compared with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import shake_128
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from asynchicache.integrations.vllm.connector_scheduler import ConnectorScheduler
from asynchicache.integrations.vllm.connector_worker import ConnectorWorker, StepOrders, StepResults
from asynchicache.integrations.vllm.kv_groups import KvGroup, KvGroups, kv_groups
from asynchicache.integrations.vllm.options import read_options
from asynchicache.transfer.remote import CopyResult
from integrations.vllm_groups import FullAttentionSpec, MambaSpec, SlidingWindowSpec, group, kv_cache_config

PATIENCE = 60.0  # of a wait that ends by itself

Call = dict[str, Any]


@dataclass(slots=True)
class Block:
    """vLLM's `KVCacheBlock`."""

    block_id: int
    block_hash: bool = False
    references: int = 0

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class BlockPool:
    """vLLM's pool, as far as the connector holds references in it."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            assert not block.is_null
            block.references += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.references -= 1
            assert block.references >= 0

    @property
    def held(self) -> int:
        return sum(block.references for block in self.blocks)


def groups_of(record: Call, workers: int = 1) -> KvGroups:
    """Groups like the recorded ones, with two small layers each."""
    size = record["block_size"]
    made: dict[int, Any] = {}
    for one in record["groups"]:
        layers = [f"layer {one['number']}.{number}" for number in range(2)]
        window = one["window"]
        if one["states"]:
            spec: Any = MambaSpec(size, 24, 32)
        elif window:
            spec = SlidingWindowSpec(size, 2 * size, sliding_window=window * size)
        else:
            spec = FullAttentionSpec(size, 2 * size)
        made[one["number"]] = group(spec, *layers)
    groups = [made[number] for number in sorted(made)]
    config = kv_cache_config(groups, hash_block_size=size, num_blocks=record["blocks"])
    return kv_groups(config, model="tiny", dtype="float32", layout="LBHNC", workers=workers)


class Player:
    """vLLM's part: its scheduler's calls, its workers', and their blocks.

    Args:
        record: of one model.
        workers: that share the model.
        options: of the connector.
    """

    def __init__(self, record: Call, workers: int = 1, **options: Any) -> None:
        self.groups = groups_of(record, workers)
        self.hashes = [bytes.fromhex(text) for text in record["hashes"]]
        self.pool = BlockPool(record["blocks"])
        self.memories = [
            {
                layer.name: torch.zeros(record["blocks"], 1, 1, _padded(layer.nbytes), dtype=torch.uint8)
                for one in self.groups.groups
                for layer in one.layers
            }
            for _ in range(workers)
        ]
        config = read_options(options, replica=0)
        self.scheduler = ConnectorScheduler(self.groups, config.cache, 0.0)
        self.scheduler.bind(self.pool)
        self.workers = [ConnectorWorker(self.groups, 0.0, rank) for rank in range(workers)]
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.register(memory)
        self.restored = Counter[str]()
        self.failing: int | None = None  # rank of a worker whose copies fail
        self.parameters: dict[str, object] | None = None  # `kv_transfer_params` of requests

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    # Blocks

    def content(self, one: KvGroup, key: bytes, layer: int, rank: int) -> torch.Tensor:
        name = f"{one.part(rank).name} {layer}".encode() + key
        named = shake_128(name).digest(one.layers[layer].nbytes)
        return torch.frombuffer(bytearray(named), dtype=torch.uint8)

    def compute(self, one: KvGroup, block: int, key: bytes) -> None:
        """A forward fills a block; others may still have the rest of it."""
        for rank, memory in enumerate(self.memories):
            for number, layer in enumerate(one.layers):
                memory[layer.name][block, 0, 0, : layer.nbytes] = self.content(one, key, number, rank)

    def check(self, one: KvGroup, block: int, key: bytes) -> None:
        for rank, memory in enumerate(self.memories):
            for number, layer in enumerate(one.layers):
                got = memory[layer.name][block, 0, 0, : layer.nbytes]
                assert torch.equal(got, self.content(one, key, number, rank)), (
                    f"wrong bytes in block {block} of {one}, worker {rank}"
                )

    # Calls

    def play(self, call: Call) -> None:
        getattr(self, f"_{call['call']}")(call)

    def request(self, call: Call) -> SimpleNamespace:
        known = self.scheduler._requests.get(call["id"])
        request = known.request if known else SimpleNamespace(request_id=call["id"])
        request.num_tokens, request.num_prompt_tokens = call["tokens"], call["prompt"]
        request.num_computed_tokens = call["computed"]
        request.block_hashes = [self.hashes[number] for number in call["hashes"]]
        request.kv_transfer_params, request.skip_reading_prefix_cache = self.parameters, False
        return request

    def _new_request(self, call: Call) -> None:
        self.scheduler.new_request(self.request(call))

    def _matched(self, call: Call) -> None:
        request = self.request(call)
        while (answer := self.scheduler.matched(request, call["local"]))[0] is None:
            assert self.scheduler._bridge.wait_finished(PATIENCE)
        assert answer == (call["answer"], bool(call["answer"])), call

    def _allocated(self, call: Call) -> None:
        request, tracked = self.request(call), self.scheduler._requests[call["id"]]
        whole = tracked.hit.tokens // self.groups.block_size if tracked.hit else 0
        tables = [[Block(*one) for one in table] for table in call["tables"]]
        self.scheduler.allocated(request, tables, call["external"])
        if not call["external"]:
            return
        places = [(one, place) for one in self.groups.groups for place in range(whole)]
        own = [(one, place) for one, place in places if tables[one.number][place].block_hash]
        for one, place in own:
            self.compute(one, tables[one.number][place].block_id, b"of another request")
        assert self.step([]) == {call["id"]}
        for one, place in own:  # loads leave blocks that vLLM has itself alone
            self.check(one, tables[one.number][place].block_id, b"of another request")
            self.compute(one, tables[one.number][place].block_id, request.block_hashes[place])
        for one in self.groups.groups:
            for place in range(whole - (one.pool.coverage.pages or whole), whole):
                block = tables[one.number][place]
                if not block.is_null and not block.block_hash:
                    self.check(one, block.block_id, request.block_hashes[place])
                    self.restored[one.pool.name] += 1

    def _step(self, call: Call) -> None:
        size = self.groups.block_size
        for described in call["requests"]:
            request = self.request(described)
            end = described["computed"] + described["scheduled"]
            for one in self.groups.groups:
                for place in range(
                    described["computed"] // size, min(end // size, len(request.block_hashes))
                ):
                    block = described["tables"][one.number][place]
                    if block and not one.states:
                        self.compute(one, block, request.block_hashes[place])
                    assert block == 0 or one.states or not self.pool.blocks[block].references, (
                        "vLLM writes to a block that the connector reads"
                    )
            for number, block, tokens in described["offers"]:
                one = next(one for one in self.groups.groups if one.number == number)
                self.compute(one, block, request.block_hashes[tokens // size - 1])
        assert self.step(call["requests"]) == set()

    def step(self, requests: Sequence[Call]) -> set[str]:
        """One step of vLLM's; returns the requests whose loads have ended."""
        tables = {one["id"]: one["tables"] for one in requests}
        state = SimpleNamespace(
            get_block_ids=tables.get, boundary_state_offloads={one["id"]: one["offers"] for one in requests}
        )
        scheduled = {one["id"]: one["scheduled"] for one in requests}
        output = SimpleNamespace(
            kv_connector_block_state=state,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        return self.work(self.scheduler.step(output))

    def work(self, orders: StepOrders) -> set[str]:
        """The workers' part of a step; vLLM joins their answers."""
        reported: list[StepResults] = []
        loaded: list[set[str]] = []
        for rank, worker in enumerate(self.workers):
            worker.start_loads(orders)
            worker.start_backups(orders)
            worker._bridge.drain()
            loaded.append(worker.ended(idle=orders.idle).finished_recving)
            results = worker.results()
            if results is not None:
                if rank == self.failing:
                    results.results[rank] = [CopyResult(one.id, "planted") for one in results.results[rank]]
                reported.append(results)
        if reported:
            self.scheduler.reported(reduce(StepResults.aggregate, reported))
        return set.intersection(*loaded)

    def _request_finished(self, call: Call) -> None:
        self.scheduler.request_finished(self.request(call), call["tables"])
        while self.scheduler.busy:
            self.step([])
            self.scheduler._bridge.wait_finished(PATIENCE)
        assert self.pool.held == 0


def _padded(nbytes: int) -> int:
    return nbytes + 8


def options(folder: Path) -> dict[str, Any]:
    return {
        "host_bytes": 4 << 20,
        "storage": "file",
        "storage_options": {"path": str(folder), "direct": False},
        "weight_version": "w1",
        "prefetch": {"policy": "wait_complete"},
    }
