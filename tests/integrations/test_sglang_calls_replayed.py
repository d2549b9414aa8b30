"""Calls of whole SGLang servers, recorded by `make engines-e2e`, played again: same answers, same bytes."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from hashlib import shake_128
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asynchicache.integrations.sglang.device_pools import device_pools
from asynchicache.integrations.sglang.linker import AsynchicacheLinker, linker_options
from asynchicache.integrations.sglang.options import RankIdentity
from asynchicache.integrations.sglang.storage import AsynchicacheStorage
from integrations.sglang_pools import storage_config

CALLS = Path(__file__).parents[1] / "data" / "calls"
PAGE, PAGES, STATES = 64, 33, 44


def recorded(adapter: str) -> list[dict[str, Any]]:
    return list(json.loads((CALLS / f"sglang-0.5.23-{adapter}.json").read_text()))


def content(name: str, key: str, nbytes: int) -> torch.Tensor:
    """Bytes that stand for what a model computes for a page or a state."""
    return torch.frombuffer(bytearray(shake_128(f"{name} {key}".encode()).digest(nbytes)), dtype=torch.uint8)


class NoEvent:
    def record(self) -> None:
        """A CPU has nothing to wait for."""

    def synchronize(self) -> None:
        """It was reached."""


class Server:
    """Device memory of a model with one full and one recurrent layer, and the linker below it."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(2, PAGES * PAGE, 2, 8)
        self.states = torch.zeros(1, STATES, 2, 4, 4)
        kvcache = SimpleNamespace(
            full_kv_pool=SimpleNamespace(k_buffer=[self.tokens[0]], v_buffer=[self.tokens[1]]),
            full_attention_layer_id_mapping={1: 0},
            start_layer=0,
        )
        pool = SimpleNamespace(mamba_cache=SimpleNamespace(conv=[], temporal=self.states))
        params = SimpleNamespace(
            page_size=PAGE,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
            req_to_token_pool=SimpleNamespace(mamba_map={0: 0}, mamba_pool=pool),
            sidecar_draft_device_pools=(),
            mtp_draft_device_pools=(),
        )
        config = linker_options({"host_bytes": "4MiB"}, RankIdentity(storage_config({})))
        self.linker = AsynchicacheLinker.__new__(AsynchicacheLinker)
        described = device_pools(params, ["FULL", "MAMBA"], model="toy", identity="test")
        self.linker._begin(described, config, SimpleNamespace(Event=NoEvent))

    def parts(self, name: str, slot: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Bytes of a page in each tensor, or of a state."""
        if name == "mamba":
            yield "state", self.states[0, slot].view(torch.uint8).flatten()
            return
        for part, tensor in zip(("keys", "values"), self.tokens, strict=True):
            yield part, tensor[slot * PAGE : (slot + 1) * PAGE].view(torch.uint8).flatten()

    def compute(self, name: str, keys: Sequence[str], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            for part, memory in self.parts(name, slot):
                memory.copy_(content(part, key, len(memory)))

    def holds(self, name: str, keys: Sequence[str], slots: Sequence[int]) -> bool:
        return all(
            torch.equal(memory, content(part, key, len(memory)))
            for key, slot in zip(keys, slots, strict=True)
            for part, memory in self.parts(name, slot)
        )


def indices(name: str, slots: Sequence[int] | None) -> torch.Tensor | None:
    """SGLang's indices, of tokens or of states."""
    if slots is None or name == "mamba":
        return None if slots is None else torch.tensor(slots)
    return torch.cat([torch.arange(slot * PAGE, (slot + 1) * PAGE) for slot in slots])


def transfers(given: Sequence[dict[str, Any]]) -> list[Any]:
    return [
        SimpleNamespace(
            name=one["name"],
            keys=one["keys"],
            hit_policy=one["hit_policy"],
            device_indices=indices(one["name"], one["device_indices"]),
            host_indices=indices(one["name"], one["host_indices"]),
        )
        for one in given
    ]


def test_a_conversation_over_the_linker() -> None:
    """Between its turns SGLang forgot what the device held; every byte comes from host memory."""
    server, loading = Server(), list[dict[str, Any]]()
    linker, answers = server.linker, list[tuple[str, Any, Any]]()
    for call in recorded("linker"):
        name, given = call["call"], call["arguments"]
        if name == "path_of":
            server.compute("kv", *given)
            given = [given[0], indices("kv", given[1])]
        elif name == "offload":
            for one in given[0]:
                if one["name"] == "mamba":
                    server.compute("mamba", one["keys"], one["device_indices"])
            given = [transfers(given[0])]
        elif name in ("lookup", "load"):
            loading += given[1] if name == "load" else []
            given = [given[0], transfers(given[1])]
        elif name == "start_layer_wise_loading":
            server.tokens.zero_()
            server.states.zero_()
        answer = getattr(linker, name)(*given)
        if name == "offload":
            linker._bridge.drain()
        if name == "finish_layer_wise_loading":
            assert all(server.holds(one["name"], one["keys"], one["device_indices"]) for one in loading)
        answers.append((name, answer, call["answer"]))
    linker.close()

    assert loading, "nothing was loaded in the record"
    assert [(name, ours) for name, ours, _ in answers] == [(name, theirs) for name, _, theirs in answers]


class HostPool:
    """A host pool of SGLang: pages that lie one after the other."""

    layout, start_layer, end_layer, storage_format_tag = "page_first_direct", 0, 2, None
    dtype, page_num, nbytes = torch.float32, 64, 4096

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.memory = np.frombuffer(mmap.mmap(-1, self.page_num * self.nbytes), np.uint8)

    def get_page_buffer_meta(self, given: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [index // self.page_size for index in given.tolist()[:: self.page_size]]
        return [self.memory.ctypes.data + page * self.nbytes for page in pages], [self.nbytes] * len(pages)

    def page(self, number: int) -> Any:
        return self.memory[number * self.nbytes : (number + 1) * self.nbytes]


def test_a_conversation_over_the_storage_backend(tmp_path: Path) -> None:
    """What the server wrote in its first turns it reads in the next, after its host pool was emptied."""
    pools = {"kv": HostPool(PAGE), "mamba": HostPool(1)}
    options = {"interface_v1": 1, "weight_version": "1", "storage": "file"}
    backend = AsynchicacheStorage(storage_config(options | {"storage_options": {"path": str(tmp_path)}}), {})
    for name, pool in pools.items():
        if name == "kv":
            backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, name)
    answers = list[tuple[str, Any, Any]]()
    for call in recorded("storage"):
        name, given = call["call"], call["arguments"]
        moved = (
            [{"name": "kv", "keys": given[0], "host_indices": given[1]}] if name.endswith("v1") else given[0]
        )
        if "set" in name or "get" in name:
            for one in moved:
                for key, page in zip(one["keys"], one["host_indices"], strict=True):
                    fresh = content(one["name"], key, HostPool.nbytes).numpy() if "set" in name else 0
                    pools[one["name"]].page(page)[:] = fresh
        if name.endswith("v1"):
            answer: Any = getattr(backend, name)(given[0], indices("kv", given[1]))
        elif name == "batch_exists_v2":
            found = backend.batch_exists_v2(given[0], transfers(given[1]))
            answer = [found.kv_hit_pages, found.restorable_prefix_pages]
        else:
            answer = getattr(backend, name)(transfers(given[0]))
        answers.append((name, answer, call["answer"]))
        for one in moved if "get" in name else ():
            for key, page in zip(one["keys"], one["host_indices"], strict=True):
                expected = content(one["name"], key, HostPool.nbytes).numpy()
                assert np.array_equal(pools[one["name"]].page(page), expected)
    backend.close()

    assert {"batch_get_v1", "batch_get_v2"} <= {name for name, _, _ in answers}
    assert [(name, ours) for name, ours, _ in answers] == [(name, theirs) for name, _, theirs in answers]
