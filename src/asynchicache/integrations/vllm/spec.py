"""vLLM's tiering, whose workers tell the tier which bytes of a row belong to a chunk."""

from __future__ import annotations

from typing import Any

from asynchicache.integrations.vllm import rows
from asynchicache.integrations.vllm.rows import GroupRuns
from asynchicache.integrations.vllm.seam import TieringOffloadingSpec


class AsynchicacheTieringSpec(TieringOffloadingSpec):
    """vLLM's own, with one thing more; named in `kv_connector_extra_config`, see docs/howto/vllm.md.

    vLLM makes one in each worker and one in the scheduler, and gives tiers none of what workers know.
    """

    _asked = False
    _rows: GroupRuns | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """vLLM's worker, after the scheduler was told how it lays out rows."""
        groups, blocks = self.config.groups, self.config.cache.blocks_per_chunk
        if self.config.canonical_layout:
            runs = rows.canonical_runs(kv_caches, groups, blocks)
        else:
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            runs = rows.worker_runs(kv_caches, groups, rank * self.cpu_page_size_per_worker, blocks)
        rows.tell(self.config.engine_id, self.config.parallel.rank, runs)
        return super().get_worker(kv_caches)

    def get_manager(self) -> Any:
        """vLLM's manager."""
        self.group_runs()  # now, so that nothing is left behind if a tier refuses to start
        return super().get_manager()

    def group_runs(self) -> GroupRuns | None:
        """For the scheduler's tiers: what all workers fill of a row, by group.

        Raises:
            ConfigError: a worker did not tell.
        """
        if not self._asked:
            world = range(self.config.parallel.world_size)
            self._rows = rows.join([rows.ask(self.config.engine_id, rank) for rank in world])
            self._asked = True
        return self._rows
