"""The caches that are judged, as data: an engine, and what its operator types."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asynchicache_lab.judge.servers import VLLM, JudgedEngine, Serve, SGLang, free_port

Options = Callable[[Path], Sequence[str]]


class Cache(NamedTuple):
    """One that is judged.

    Attributes:
        name: of its column.
        engine: what serves.
        options: arguments of the engine, of the folder that is its storage.
        environment: variables, of the same.
        ours: whether red is a defect of this project.
        storage: whether it says that it keeps what it computes in that folder.
    """

    name: str
    engine: JudgedEngine
    options: Options = lambda folder: ()
    environment: Callable[[Path], Mapping[str, str]] = lambda folder: {}
    ours: bool = False
    storage: bool = True


def _file(folder: Path) -> dict[str, Any]:
    return {"weight_version": "1", "storage": "file", "storage_options": {"path": str(folder)}}


def _offloading(spec: str, tier: Mapping[str, Any]) -> list[str]:
    """vLLM's own host memory and a tier below it; the spec copies on a CPU, as vLLM's does on GPUs."""
    extra = {"spec_name": spec, "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": 64 << 20}
    return _transfer(
        kv_connector="OffloadingConnector", kv_connector_extra_config={**extra, "secondary_tiers": [tier]}
    )


def _transfer(**config: Any) -> list[str]:
    return [f"--kv-transfer-config={json.dumps({'kv_role': 'kv_both', **config})}"]


def _vllm_tier(folder: Path) -> Sequence[str]:
    module = "asynchicache.integrations.vllm.tier"
    tier = {"type": "AsynchicacheTier", "module_path": module, **_file(folder)}
    return _offloading("CpuTieringSpec", tier)


def _vllm_connector(folder: Path) -> Sequence[str]:
    return _transfer(
        kv_connector="AsynchicacheConnector",
        kv_connector_module_path="asynchicache.integrations.vllm.connector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"host_bytes": 64 << 20, **_file(folder)},
    )


def _vllm_lmcache(folder: Path) -> Sequence[str]:
    """LMCache's server in a process of its own, which its connector starts."""
    disk = shlex.quote(json.dumps({"type": "fs", "base_path": str(folder)}))
    memory = "--l1-size-gb=1 --l1-init-size-gb=1 --eviction-policy=LRU"
    on_cpu = f"--supported-transfer-mode=auto --http-port={free_port()}"
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": free_port(),
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": f"{memory} {on_cpu} --l2-adapter={disk}",
    }
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    return _transfer(
        kv_connector="LMCacheMPConnector", kv_connector_module_path=module, kv_connector_extra_config=extra
    )


def _hicache(backend: str, extra: Mapping[str, Any]) -> list[str]:
    return [
        "--enable-hierarchical-cache",
        "--hicache-ratio=4",
        "--hicache-mem-layout=page_first_direct",
        "--hicache-io-backend=direct",
        "--hicache-write-policy=write_through",
        "--hicache-storage-prefetch-policy=wait_complete",
        f"--hicache-storage-backend={backend}",
        f"--hicache-storage-backend-extra-config={json.dumps({'prefetch_threshold': 1, **extra})}",
    ]


def _sglang_storage(folder: Path) -> Sequence[str]:
    extra = {
        "backend_name": "asynchicache",
        "module_path": "asynchicache.integrations.sglang.storage",
        "class_name": "AsynchicacheStorage",
        "interface_v1": 1,
        **_file(folder),
    }
    return _hicache("dynamic", extra)


def _sglang_linker(folder: Path) -> Sequence[str]:
    config = {
        "linker": "AsynchicacheLinker",
        "linker_module_path": "asynchicache.integrations.sglang.linker",
        "linker_extra_config": {"host_bytes": "64MiB", **_file(folder)},
    }
    return [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=dynamic",
        f"--unified-cache-external-linker-config={json.dumps(config)}",
    ]


CACHES = (
    Cache("serve", Serve(), lambda folder: (f"--storage-path={folder}",), ours=True),
    Cache("vllm", VLLM(), storage=False),
    Cache("vllm-fs", VLLM(), lambda folder: _offloading("OnHost", {"type": "fs", "root_dir": str(folder)})),
    Cache("vllm-tier", VLLM(), _vllm_tier, ours=True),
    Cache("vllm-connector", VLLM(), _vllm_connector, ours=True),
    Cache("vllm-lmcache", VLLM(), _vllm_lmcache),
    Cache(
        "sglang-file",
        SGLang(),
        lambda folder: _hicache("file", {}),
        lambda folder: {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)},
    ),
    Cache("sglang-storage", SGLang(), _sglang_storage, ours=True),
    Cache("sglang-linker", SGLang(), _sglang_linker, ours=True),
)
