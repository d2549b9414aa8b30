"""What Mooncake's own store does with single keys, which the engine's mapping of codes stands on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from urllib.request import urlopen

import pytest

from asynchicache.backends.mooncake.codes import MooncakeCode
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.options import MooncakeOptions
from asynchicache.backends.mooncake.slots import RegisteredMemory, RegisteredSlots
from asynchicache.backends.mooncake.store import MooncakeClient, MooncakeStore, address_of
from asynchicache.testing.backends import SlotSlab, slab_of
from storage.mooncake_cluster import Cluster, binding_of, cluster, own_network

pytestmark = pytest.mark.engine("mooncake")

SIZE = 4096
names = (f"object {number}" for number in count())


class Memory:
    """Registered memory in cells of 4,096 bytes."""

    def __init__(self, store: MooncakeStore) -> None:
        self.slab: SlotSlab = slab_of("cells", SIZE, 16)
        _, self.view = self.slab.regions()
        self.store = store
        self.client = MooncakeClient(store, None, 1)
        self.base = address_of(self.view)
        assert store.register_buffer(self.base, self.view.nbytes) == MooncakeCode.OK

    def fill(self, cell: int, byte: int) -> None:
        self.slab.page(cell)[:] = bytes([byte]) * SIZE

    def holds(self, cell: int, byte: int) -> bool:
        return bytes(self.slab.page(cell)) == bytes([byte]) * SIZE

    def put(self, keys: Sequence[str], cells: Sequence[int], size: int = SIZE) -> list[int]:
        return self.client.put(list(keys), *self.buffers(cells, size))

    def get(self, keys: Sequence[str], cells: Sequence[int], size: int = SIZE) -> list[int]:
        return self.client.get(list(keys), *self.buffers(cells, size))

    def buffers(self, cells: Sequence[int], size: int) -> tuple[list[list[int]], list[list[int]]]:
        return [[self.base + cell * SIZE] for cell in cells], [[size]] * len(cells)


@pytest.fixture
def memory(mooncake_store: MooncakeStore) -> Iterator[Memory]:
    memory = Memory(mooncake_store)
    yield memory
    mooncake_store.unregister_buffer(memory.base)


def test_the_first_put_wins_and_the_second_says_ok(memory: Memory) -> None:
    key = next(names)
    memory.fill(0, 1)
    memory.fill(1, 2)

    assert memory.put([key], [0]) == [MooncakeCode.OK]
    assert memory.put([key], [1]) == [MooncakeCode.OK]
    assert memory.get([key], [2]) == [SIZE]
    assert memory.holds(2, 1)


def test_what_is_missing(memory: Memory) -> None:
    key = next(names)

    assert memory.client.exists([key]) == [0]
    assert memory.get([key], [0]) == [MooncakeCode.OBJECT_NOT_FOUND]
    assert memory.client.remove([key]) == [MooncakeCode.OBJECT_NOT_FOUND]


def test_a_buffer_of_another_size_than_the_object(memory: Memory) -> None:
    key = next(names)
    memory.put([key], [0], size=1000)

    assert memory.get([key], [1], size=999) == [MooncakeCode.INVALID_PARAMS]
    assert memory.get([key], [1], size=1001) == [MooncakeCode.TRANSFER_FAIL]
    assert memory.get([key], [1], size=1000) == [1000]


def test_an_empty_key_or_object_is_refused_and_its_neighbours_are_not(memory: Memory) -> None:
    key = next(names)

    assert memory.put(["", key], [0, 1]) == [MooncakeCode.INVALID_PARAMS, MooncakeCode.OK]
    assert memory.put([next(names)], [0], size=0) == [MooncakeCode.INVALID_PARAMS]


def test_one_key_twice_in_a_read_fills_one_buffer_only(memory: Memory) -> None:
    key = next(names)
    memory.fill(0, 7)
    memory.put([key], [0])
    memory.fill(1, 0)
    memory.fill(2, 0)

    assert memory.get([key, key], [1, 2]) == [SIZE, SIZE]
    assert memory.holds(1, 7) != memory.holds(2, 7)


def test_a_read_leases_the_object_and_only_force_removes_it(memory: Memory) -> None:
    key = next(names)
    memory.put([key], [0])
    memory.get([key], [1])

    assert memory.store.batch_remove([key], False) == [MooncakeCode.OBJECT_HAS_LEASE]
    assert memory.store.batch_remove([key], True) == [MooncakeCode.OK]


def test_an_object_of_several_buffers_is_their_bytes_in_a_row(memory: Memory) -> None:
    key = next(names)
    memory.fill(0, 1)
    memory.fill(9, 2)
    pointers = [[memory.base, memory.base + 9 * SIZE]]

    assert memory.client.put([key], pointers, [[SIZE, 1000]]) == [MooncakeCode.OK]
    assert memory.get([key], [3], size=SIZE + 1000) == [SIZE + 1000]
    assert memory.holds(3, 1)
    assert bytes(memory.slab.page(4)[:1000]) == b"\2" * 1000


def test_tcp_moves_unregistered_memory_too(mooncake_store: MooncakeStore) -> None:
    """So only our own check of addresses shows what RDMA would refuse."""
    _, view = slab_of("cells", SIZE, 1).regions()
    client = MooncakeClient(mooncake_store, None, 1)

    assert client.put([next(names)], [[address_of(view)]], [[SIZE]]) == [MooncakeCode.OK]


def test_pools_in_one_memory_register_it_together(mooncake_store: MooncakeStore) -> None:
    memory, binding = RegisteredMemory(mooncake_store), binding_of()
    first, second = RegisteredSlots(memory, binding), RegisteredSlots(memory, binding)
    (address, *_), *_ = first.buffers([0])[0]

    first.close()
    assert mooncake_store.register_buffer(address, 1) == MooncakeCode.INVALID_PARAMS, "the second needs it"
    second.close()
    assert mooncake_store.register_buffer(address, 1) == MooncakeCode.OK
    assert mooncake_store.unregister_buffer(address) == MooncakeCode.OK


def test_memory_is_registered_once(mooncake_store: MooncakeStore) -> None:
    slots = RegisteredSlots(RegisteredMemory(mooncake_store), binding_of())
    address = slots.buffers([0])[0][0][0]

    assert mooncake_store.register_buffer(address, 1) == MooncakeCode.INVALID_PARAMS
    slots.close()
    slots.close()
    assert mooncake_store.register_buffer(address, 1) == MooncakeCode.OK
    assert mooncake_store.unregister_buffer(address) == MooncakeCode.OK


def test_a_ranged_read_asks_the_master_about_one_object_at_a_time(mooncake: Cluster, memory: Memory) -> None:
    """So an object has one page: what is in larger ones would be read at each lookup."""
    keys = [next(names) for _ in range(8)]
    memory.put(keys, [0] * 8)
    before = requests(mooncake)
    offsets, sizes = [[[0]] * 8], [[[64]] * 8]
    read = memory.store.get_into_ranges([memory.base], [keys], offsets, offsets, sizes)  # type: ignore[attr-defined]
    assert read == [[[64]] * 8]
    ranged = requests(mooncake) - before
    memory.get(keys, range(8))
    assert (ranged >= 8, requests(mooncake) - before - ranged) == (True, 1)


def requests(mooncake: Cluster) -> int:
    """How often the master was asked where objects are."""
    with urlopen(f"http://127.0.0.1:{mooncake.admin_port}/metrics") as answer:
        return sum(
            int(count)
            for count in re.findall(
                r"^master_(?:batch_)?get_replica_list_requests_total ([0-9]+)$", answer.read().decode(), re.M
            )
        )


def test_a_read_slower_than_its_lease_says_so(mooncake: Cluster) -> None:
    """Such bytes may be torn: the room of an object without a lease may be used again."""
    with own_network(), cluster(master_flags=("--default_kv_lease_ttl=0",)) as made:
        store = join(MooncakeOptions.of(made.options()))
        try:
            memory = Memory(store)
            key = next(names)
            memory.put([key], [0])
            assert memory.get([key], [1]) == [MooncakeCode.LEASE_EXPIRED]
        finally:
            store.close()
