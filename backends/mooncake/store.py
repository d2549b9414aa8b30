"""Wrap Mooncake's client, and skip calls that would block for seconds because the master is away."""

from __future__ import annotations

import ctypes
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from asynchicache.backends.mooncake.codes import MooncakeCode, master_is_away, name_of
from asynchicache.backends.mooncake.large_calls import LargeCallLimit
from asynchicache.errors import StorageError

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 1.0


class MooncakeStore(Protocol):
    """The used part of `mooncake.store.MooncakeDistributedStore`. Batch calls return one code per key.

    Every call may block, and releases the GIL. A call during or after `close` crashes the process.
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

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any) -> int: ...

    def get_size(self, key: str) -> int: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def close(self) -> int: ...


class MooncakeClient:
    """A store that is set up. Its methods block; call them from any thread.

    They raise StorageError if Mooncake does not return exactly one code per key.

    While the master is away, each Mooncake call tries to connect for 4 seconds. So after a call that the
    master did not answer, this client probes the master's port before the next call. If it does not know
    which machine leads, it lets one call at a time find out.

    Args:
        master: the master's host and port; None where one of several masters leads.
        soft_pin_seconds: for how long pages stay while others can be evicted; 0 for no such pin.
        large_bytes: reads or writes of at least this size wait while two others of that size are in flight.
    """

    def __init__(
        self,
        store: MooncakeStore,
        master: tuple[str, int] | None,
        replicas: int,
        large_bytes: float = math.inf,
        soft_pin_seconds: int = 0,
    ) -> None:
        self.store = store
        self._master = master
        self._replicas, self._soft_pin_seconds = replicas, soft_pin_seconds
        self._reads, self._writes = LargeCallLimit(large_bytes), LargeCallLimit(large_bytes)
        self._master_away = False
        self._trying = threading.Lock()

    def exists(self, keys: list[str]) -> list[int]:
        """For each key: 1 if it exists, 0 if not, or a negative code."""
        return self._ask(keys, partial(self.store.batch_is_exist, keys))

    def get(self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """For each key: the number of bytes read into its buffers, or a negative code."""
        with self._reads.limited(_total(sizes)):
            return self._ask(keys, partial(self.store.batch_get_into_multi_buffers, keys, pointers, sizes))

    def put(
        self,
        keys: list[str],
        pointers: list[list[int]],
        sizes: list[list[int]],
        groups: list[str] | None = None,
    ) -> list[int]:
        """Store each key's buffers, concatenated, as its object. Returns 0 or a negative code per key.

        Objects of one group are evicted together, and a use of one is a use of all.
        """
        put, config = self.store.batch_put_from_multi_buffers, _replicate_config(self._replicas)
        if groups is not None:
            config.group_ids = groups
        if self._soft_pin_seconds:
            config.soft_pin_action = type(config.soft_pin_action).ENABLE
            config.soft_pin_ttl_ms = 1000 * self._soft_pin_seconds
        with self._writes.limited(_total(sizes)):
            return self._ask(keys, partial(put, keys, pointers, sizes, config))

    def replace(self, key: str, data: bytes) -> None:
        """Store an object that is never evicted, in place of the one before.

        Raises:
            StorageError: Mooncake refuses.
        """
        config = _replicate_config(self._replicas)
        config.with_hard_pin = True
        with self.memory(len(data)) as memory:
            memory[:] = data
            call = partial(self.store.upsert_from, key, address_of(memory), len(data), config)
            (code,) = self._ask([key], lambda: [call()])
        if code != MooncakeCode.OK:
            raise StorageError(f"Mooncake does not store {key!r}: {name_of(code)}")

    def read(self, key: str, memory: memoryview) -> bytes | None:
        """An object of the size of `memory`, which is registered; None if there is none."""
        (code,) = self.get([key], [[address_of(memory)]], [[memory.nbytes]])
        return bytes(memory) if code == memory.nbytes else None

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[memoryview]:
        """Registered memory for calls that are no cache's.

        Raises:
            StorageError: Mooncake does not register it.
        """
        memory = memoryview(bytearray(nbytes))
        code = self.store.register_buffer(address_of(memory), nbytes)
        if code != MooncakeCode.OK:
            raise StorageError(f"Mooncake does not register {nbytes} bytes: {name_of(code)}")
        try:
            yield memory
        finally:
            self.store.unregister_buffer(address_of(memory))

    def remove(self, keys: list[str]) -> list[int]:
        """Remove keys, ignoring readers' leases. Returns 0 or a negative code per key."""
        return self._ask(keys, partial(self.store.batch_remove, keys, True))

    def clear(self, glob: str) -> int:
        """Remove the keys that match a glob of `*` and `?`, and return their number.

        Raises:
            StorageError: the master does not answer.
        """
        pattern = f"^{glob.replace('.', '[.]').replace('?', '.').replace('*', '.*')}$"
        (count,) = self._ask([pattern], lambda: [self.store.remove_by_regex(pattern, True)])
        if count < 0:
            raise StorageError(f"Mooncake cannot clear {glob!r}: {name_of(count)}")
        return count

    def close(self) -> None:
        """Leave the cluster; takes a second. No call may be running or follow."""
        self.store.close()

    def _ask(self, keys: Sequence[str], call: Callable[[], list[int]]) -> list[int]:
        with self._permission() as allowed:
            if not allowed:
                return [MooncakeCode.RPC_FAIL] * len(keys)
            codes = call()
        self._note_master(master_is_away(codes))
        if len(codes) != len(keys):  # codes cannot be assigned to keys
            raise StorageError(f"Mooncake returned {len(codes)} codes for {len(keys)} keys")
        return codes

    @contextmanager
    def _permission(self) -> Iterator[bool]:
        """Whether a call may be made now."""
        if not self._master_away:
            yield True
        elif self._master is not None:
            yield _answers(self._master)
        elif alone := self._trying.acquire(blocking=False):
            try:
                yield alone
            finally:
                self._trying.release()
        else:
            yield alone

    def _note_master(self, away: bool) -> None:
        if away != self._master_away:
            logger.warning("Mooncake's master %s", "does not answer" if away else "answers again")
        self._master_away = away


def address_of(view: memoryview) -> int:
    """Address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _total(sizes: list[list[int]]) -> int:
    return sum(map(sum, sizes))


def reach(address: tuple[str, int]) -> None:
    """
    Raises:
        OSError: connecting fails or takes longer than a second.
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
