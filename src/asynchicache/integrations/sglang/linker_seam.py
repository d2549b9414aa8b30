"""SGLang's classes for linkers, or stand-ins without SGLang, and what its wrapper does not pass on."""

from __future__ import annotations

from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from asynchicache.errors import ConfigError
from asynchicache.integrations.sglang.seam import SUPPORTED
from asynchicache.integrations.sglang.waiting import Arrivals

_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
_TREE = "sglang.srt.mem_cache.unified_radix_cache"


class StandInLinker:
    """`UnifiedCacheLinker` without SGLang."""

    forward_stream: Any = None

    def record_offload_ready(self) -> list[Any]:
        """Return the events behind which the pages of an offload are complete."""
        return []


class StandInLoadCounter:
    """`LayerWiseLoadCounter` without SGLang: a future for each layer of each batch."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = -1
        self.futures: dict[int, list[Future[None]]] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures.get(index, ()):
            if not future.done():
                future.set_exception(error)

    def finish(self, index: int) -> bool:
        landed = all(future.exception() is None for future in self.futures.get(index, ()))
        self.futures.pop(index, None)  # after the wait: layers are still being completed
        return landed

    def reset(self) -> None:
        self.producer_index = -1
        self.futures.clear()


def load_linker_seam() -> tuple[Any, Any]:
    """Return `UnifiedCacheLinker` and `LayerWiseLoadCounter`.

    Raises:
        ConfigError: the installed SGLang has a different interface.
    """
    if find_spec("sglang") is None:
        return StandInLinker, StandInLoadCounter
    try:
        module = import_module(_LINKER)
        classes = module.UnifiedCacheLinker, module.LayerWiseLoadCounter
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the SGLang that is installed has no linkers of this kind: {error}; install "
            f"sglang=={SUPPORTED}, which this one is made for"
        ) from error
    return classes


def follow_paths() -> None:
    """Make SGLang tell linkers which pages come before those that it names.

    Its wrapper names pages of the end of a prefix only; a tree that begins at the root needs those before.
    For `hold_requests` it knows which requests have arrived.
    Subclassing is not foreseen, so the class is replaced where SGLang looks it up. Other linkers see no
    difference.

    Raises:
        ConfigError: SGLang is another version.
    """
    tree: Any = import_module(_TREE)
    wrapper = tree.UnifiedCacheLinkerWrapper
    if not getattr(wrapper, "follows_paths", False):
        if not (hasattr(wrapper, "_tail_hashes") and hasattr(wrapper, "_offload_node")):
            raise ConfigError(f"this linker is made for sglang=={SUPPORTED}; another version is installed")
        tree.UnifiedCacheLinkerWrapper = _following(wrapper)


def _following(wrapper: Any) -> Any:
    class PathFollowingWrapper(wrapper):  # type: ignore[misc]
        """Calls `path_before` and `path_of` of a linker that has them, and has `Arrivals`."""

        follows_paths = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.arrivals = Arrivals(self.cache, self.cache_linker)

        def release_request(self, rid: str) -> None:
            super().release_request(rid)
            self.arrivals.forget(rid)

        def _tail_hashes(self, key: Any, result: Any, device_hit_len: int) -> Any:
            tail = super()._tail_hashes(key, result, device_hit_len)
            if tail and hasattr(self.cache_linker, "path_before"):
                node = result.last_device_node if device_hit_len else None
                self.cache_linker.path_before(self._path(node))
            return tail

        def _offload_node(self, node_id: Any, transfers: Any) -> None:
            if hasattr(self.cache_linker, "path_of"):
                root = self.cache.root_node_handle()
                table = self.cache.tree_core.collect_full_device_indices(node_id, root)
                self.cache_linker.path_of(self._path(node_id), table)
            super()._offload_node(node_id, transfers)

        def _path(self, node: Any) -> list[str]:
            """Return the hashes of all pages from the root to the end of a node."""
            if node is None:
                return []
            core = self.cache.tree_core
            return [*core.get_prefix_hash_values(node), *core.get_hash_values(node)]

    return PathFollowingWrapper


UnifiedCacheLinker, LayerWiseLoadCounter = load_linker_seam()
