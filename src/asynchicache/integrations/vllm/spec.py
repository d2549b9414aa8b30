"""vLLM's tiering spec, extended: workers tell the tier which bytes of a row belong to a chunk."""

from __future__ import annotations

from typing import Any

from asynchicache.integrations.vllm import rows
from asynchicache.integrations.vllm.rows import GroupRuns
from asynchicache.integrations.vllm.seam import TieringOffloadingSpec


class AsynchicacheTieringSpec(TieringOffloadingSpec):
    """vLLM's spec, plus the row layout. Set in `kv_connector_extra_config`; see docs/howto/vllm_tier.md.

    vLLM creates one spec in each worker and one in the scheduler. Only workers know the layout of rows,
    and vLLM does not pass it to tiers, so this class does.
    """

    _asked = False
    _rows: GroupRuns | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """Publish the worker's row layout for the scheduler, and return vLLM's worker."""
        groups, blocks = self.config.groups, self.config.cache.blocks_per_chunk
        if self.config.canonical_layout:
            runs = rows.canonical_runs(kv_caches, groups, blocks)
        else:
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            runs = rows.worker_runs(kv_caches, groups, rank * self.cpu_page_size_per_worker, blocks)
        rows.tell(self.config.engine_id, self.config.parallel.rank, runs)
        return super().get_worker(kv_caches)

    def get_manager(self) -> Any:
        """Return vLLM's manager."""
        self.group_runs()  # consumes the workers' files, so that none remain if a tier fails to start
        return super().get_manager()

    def group_runs(self) -> GroupRuns | None:
        """Return the byte ranges of a row that all workers fill, by group; for the scheduler's tiers.

        Raises:
            ConfigError: a worker did not publish its layout.
        """
        if not self._asked:
            world = range(self.config.parallel.world_size)
            self._rows = rows.join([rows.ask(self.config.engine_id, rank) for rank in world])
            self._asked = True
        return self._rows
