"""The storage of a server: opened when it can be, attached and detached while requests go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

import msgspec

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, StorageNames, StorageOptions
from asynchicache.errors import StorageError, UsageError

_log = logging.getLogger(__name__)


class ServedStorage:
    """Attaches the configured storage, and tries again while it cannot be opened; until then memory serves.

    Storage that could not be opened again under other weights is tried again too, as it was attached last.

    An async context manager; on exit it tries no more, and leaves the storage attached.

    Attributes:
        name: of the storage that is, or is to be, attached; empty for none.
    """

    def __init__(self, cache: HybridCache, config: CacheConfig, pause: float) -> None:
        """
        Args:
            cache: opened without storage.
            pause: seconds between attempts to open it.
        """
        self.name = config.storage_name
        self._cache = cache
        self._config = config
        self._chosen = config  # with the storage that was attached last
        self._pause = pause
        self._trying: asyncio.Task[None] | None = None
        self._told = ""

    async def __aenter__(self) -> Self:
        """
        Raises:
            ConfigError: the options are invalid, so that trying again cannot help.
        """
        if self.name and not await self._attached():
            self._begin_again()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._give_up()

    async def attach(self, storage: StorageNames | None = None, options: StorageOptions | None = None) -> str:
        """Attach a storage now; returns the name.

        Args:
            storage: name of the engine, or the stages of a chain. Default: as configured, with its options.
            options: of a named engine, or of each stage.

        Raises:
            UsageError: there is storage already, none is configured, or the options do not fit.
            StorageError: it cannot be opened.
        """
        if storage is None:
            storage, options = self._config.storage, self._config.storage_options
        if storage is None:
            raise UsageError("no storage is configured: say which, with storage and storage_options")
        await self._cache.attach_storage(storage, options)
        await self._give_up()
        self._chosen = msgspec.structs.replace(self._config, storage=storage, storage_options=options or {})
        self.name, self._told = self._chosen.storage_name, ""
        return self.name

    async def detach(self) -> tuple[bool, bool]:
        """Go on without storage: whether some was attached, and whether attempts to attach it ended."""
        ended = await self._give_up()
        self.name = ""
        return await self._cache.detach_storage(), ended

    def lost(self, error: StorageError) -> None:
        """The weights changed, and then storage could not be opened: begin to try again, unless it has been
        detached or attached since."""
        if self.name and not self._cache.statistics().storage:
            self._tell(error)
            self._begin_again()

    def _begin_again(self) -> None:
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._try_again())

    async def _give_up(self) -> bool:
        """Try no more; False if nothing was being tried."""
        task, self._trying = self._trying, None
        if task is None or task.done():
            return False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # another attempt may have been quicker
        return True

    async def _attached(self) -> bool:
        try:
            await self._cache.attach_storage(self._chosen.storage or "", self._chosen.storage_options)
        except StorageError as error:
            self._tell(error)
            return False
        self._told = ""
        return True

    def _tell(self, error: StorageError) -> None:
        if self._told != str(error):  # the log has it once, not every few seconds for a night
            self._told = str(error)
            _log.warning(
                "storage %s cannot be opened, so nothing is kept there for now; trying every %g s: %s",
                self.name,
                self._pause,
                error,
            )

    async def _try_again(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            if await self._attached():
                _log.warning("storage %s is open now", self.name)
                return
