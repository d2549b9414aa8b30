"""What is used of Mooncake's own client, and that it is not asked what would block for seconds."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from asynchicache.backends.mooncake.codes import MooncakeCode, master_is_away, name_of
from asynchicache.backends.mooncake.large_calls import LargeCallLimit
from asynchicache.errors import StorageError

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 1.0


class MooncakeStore(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`; one code a key.

    Every call may block, and releases the GIL. A call after `close`, or during it, ends the process.
    """

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]], config: Any
    ) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def close(self) -> int: ...


class MooncakeClient:
    """A store that is set up. Its methods block; call them from any thread.

    They raise StorageError where Mooncake answers with more or fewer codes than there are keys.

    With its master gone, each call of Mooncake's tries to connect for 4 seconds. So after a call that
    the master did not answer, its port is tried before the next one.

    Args:
        store: the store.
        master: where its master listens, None if that is not known.
        replicas: copies of a page.
        large_bytes: bytes of a read, or write, that waits while two other such are under way.
    """

    def __init__(
        self,
        store: MooncakeStore,
        master: tuple[str, int] | None,
        replicas: int,
        large_bytes: float = math.inf,
    ) -> None:
        self.store = store
        self._master = master
        self._config = _replicate_config(replicas)
        self._reads, self._writes = LargeCallLimit(large_bytes), LargeCallLimit(large_bytes)
        self._master_away = False

    def exists(self, keys: list[str]) -> list[int]:
        """1, 0 or a negative code for each key."""
        return self._ask(keys, partial(self.store.batch_is_exist, keys))

    def get(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """The bytes that were read into each key's buffers, or a negative code."""
        with self._reads.limited(_total(sizes)):
            return self._ask(keys, partial(self.store.batch_get_into_multi_buffers, keys, pointers, sizes))

    def put(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """0, or a negative code, for each key, whose object is what its buffers hold in a row."""
        put = self.store.batch_put_from_multi_buffers
        with self._writes.limited(_total(sizes)):
            return self._ask(keys, partial(put, keys, pointers, sizes, self._config))

    def remove(self, keys: list[str]) -> list[int]:
        """0, or a negative code, for each key; leases of readers do not hinder it."""
        return self._ask(keys, partial(self.store.batch_remove, keys, True))

    def clear(self, glob: str) -> int:
        """Remove every key that a glob of `*` and `?` matches, and say how many.

        Raises:
            StorageError: the master does not answer.
        """
        pattern = f"^{glob.replace('.', '[.]').replace('?', '.').replace('*', '.*')}$"
        (count,) = self._ask([pattern], lambda: [self.store.remove_by_regex(pattern, True)])
        if count < 0:
            raise StorageError(f"Mooncake cannot clear {glob!r}: {name_of(count)}")
        return count

    def close(self) -> None:
        """Leave the cluster; takes a second. No call may be running, and none may follow."""
        self.store.close()

    def _ask(self, keys: Sequence[str], call: Callable[[], list[int]]) -> list[int]:
        if self._master_away and self._master is not None and not _answers(self._master):
            return [MooncakeCode.RPC_FAIL] * len(keys)
        codes = call()
        self._note_master(master_is_away(codes))
        if len(codes) != len(keys):  # which code is whose?
            raise StorageError(f"Mooncake returned {len(codes)} codes for {len(keys)} keys")
        return codes

    def _note_master(self, away: bool) -> None:
        if away != self._master_away:
            logger.warning("Mooncake's master %s", "does not answer" if away else "answers again")
        self._master_away = away


def _total(sizes: list[list[int]]) -> int:
    return sum(map(sum, sizes))


def reach(address: tuple[str, int]) -> None:
    """
    Raises:
        OSError: nobody listens there, or not within a second.
    """
    socket.create_connection(address, _PROBE_SECONDS).close()


def _answers(address: tuple[str, int]) -> bool:
    try:
        reach(address)
    except OSError:
        return False
    return True


def _replicate_config(replicas: int) -> Any:
    from mooncake.store import ReplicateConfig

    config = ReplicateConfig()
    config.replica_num = replicas
    return config
