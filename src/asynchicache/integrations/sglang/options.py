"""Options from `--hicache-storage-backend-extra-config`, and the identity of a rank's pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.integrations.page_store import PageStoreConfig
from asynchicache.options import Positive
from asynchicache.storage.limits import PoolLimits

_FLAG = "--hicache-storage-backend-extra-config"
_EXAMPLE = (
    '{"backend_name": "asynchicache", "module_path": "asynchicache.integrations.sglang.storage", '
    '"class_name": "AsynchicacheStorage", "interface_v1": 1, "weight_version": "...", '
    '"storage": "file", "storage_options": {"path": "..."}}'
)
_LIMITS: dict[str, Any] = {"deadline": 3.0, "closing": 3.0, "clearing": 3.0}
_OF_ONE_PROCESS = frozenset({"file", "memory"})


class SGLangOptions(PageStoreConfig, frozen=True, kw_only=True):
    """Options in addition to those of `PageStoreConfig`.

    Attributes:
        weight_version: identifies the weights, so that pages of other weights never match.
        storage_limits: deadlines of the backend. Default: 3 s per call, for closing and for clearing:
            SGLang abandons a backend that takes 10 s to detach.
        salt: separates the pages of deployments that share a storage. Default: empty.
        max_bytes: most bytes of pages in flight; further calls wait. Default: 1 GiB.
        interface_v1: read by SGLang: with 1, SGLang passes pages in place; with 0, it makes one more copy
            of each page. Default: 0.
        backend_name, module_path, class_name: read by SGLang to find this backend.
    """

    weight_version: str
    storage_limits: PoolLimits = PoolLimits(**_LIMITS)
    salt: str = ""
    max_bytes: Positive = 1 << 30
    interface_v1: int = 0
    backend_name: str = ""
    module_path: str = ""
    class_name: str = ""

    def check(self) -> None:
        if not self.weight_version:
            raise ConfigError("weight_version is empty; name the weights, for example by a commit hash")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """
        Raises:
            ConfigError: invalid options; says what is wrong and shows a minimal example.
        """
        given = dict(options)
        if isinstance(given.get("interface_v1"), bool):
            given["interface_v1"] = int(bool(given["interface_v1"]))
        limits = given.get("storage_limits", {})
        if isinstance(limits, Mapping):
            given["storage_limits"] = {**_LIMITS, **limits}
        try:
            return super().of(given)
        except ConfigError as error:
            raise ConfigError(f"{_FLAG}: {error}; the least that is needed: {_EXAMPLE}") from error

    def for_rank(self, rank: RankIdentity) -> Self:
        """Return the options of one rank: storage that is local to a process gets a folder per rank.

        Raises:
            ConfigError: ranks must share pages, and the storage is local to one process.
        """
        if self.storage not in _OF_ONE_PROCESS:
            return self
        if rank.replicated and rank.tp_size > 1:
            raise ConfigError(
                f"storage {self.storage!r} is one process's own, but with MLA rank 0 writes the pages of "
                f"all {rank.tp_size} ranks; use hf3fs, redis, mooncake or object"
            )
        options = path_of_rank(self.storage, self.storage_options, rank)
        return msgspec.structs.replace(self, storage_options=options)


def path_of_rank(storage: str, options: Mapping[str, Any], rank: RankIdentity) -> dict[str, Any]:
    """Return storage options with a folder of this rank, if the storage is one process's own."""
    if storage not in _OF_ONE_PROCESS or "path" not in options:
        return dict(options)
    return dict(options) | {"path": str(Path(str(options["path"]), f"rank-{rank.folder}"))}


class RankIdentity:
    """One process of a sharded model, from SGLang's `HiCacheStorageConfig`.

    Attributes:
        model: the model's name.
        replicated: every tensor-parallel rank holds the same KV (MLA), and one rank writes it.
        writer: whether this rank writes replicated pages.
        tp_rank, tp_size: this tensor-parallel rank, and their number.
        folder: folder name of this process's own storage.
    """

    def __init__(self, config: Any) -> None:
        """
        Raises:
            ConfigError: an unsupported kind of sharding; names the flag.
        """
        if not config.model_name:
            raise ConfigError("SGLang gave no model name; set --served-model-name or --model-path")
        if getattr(config, "dcp_size", 1) > 1:
            raise ConfigError("decode context parallelism works with SGLang's file and mooncake storage only")
        if getattr(config, "should_split_heads", False):
            raise ConfigError("tp_lcm_size splits pages by heads, which is not supported; remove it")
        self.model: str = config.model_name
        self.replicated = bool(config.is_mla_model)
        self.writer = not self.replicated or config.tp_rank == 0
        self.tp_rank: int = config.tp_rank
        self.tp_size: int = config.tp_size
        self._tp = (config.tp_rank, config.tp_size)
        self._others = {
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
        }
        self.folder = f"dp{config.dp_rank}-tp{config.tp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}"

    def shard(self, *, replicated: bool) -> str:
        """Return the name of the part of a page that this rank holds; empty for a whole page.

        Args:
            replicated: all tensor-parallel ranks hold the same content.
        """
        parts = self._others if replicated else {"tp": self._tp} | self._others
        return "-".join(f"{name}{rank}/{size}" for name, (rank, size) in parts.items() if size > 1)


def text_of(name: Any) -> str:
    """Return the text of a `PoolName` (a string enum) or of a plain string."""
    return str(getattr(name, "value", name))
