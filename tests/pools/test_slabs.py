"""Slabs of host memory, pinned by a CUDA runtime that is played: what is pinned when, what refusals cost."""

from __future__ import annotations

import mmap
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asynchicache.errors import CapacityError, ClosedError, ConfigError, DeviceError
from asynchicache.layouts import HostLayout
from asynchicache.pools import slabs
from asynchicache.pools.host import HostPool, grow_pool
from asynchicache.pools.numa import device_node, prefer_node
from asynchicache.pools.slabs import HostRegistration, Pinner, PinningWarning, Slab, allocate_slab
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec, TensorSpec
from pools.cuda_runtime import Code, PlayedRuntime

KV = PoolSpec(
    "kv", (TensorSpec("keys", (0, 1), (256,), "float32"), TensorSpec("scales", (1,), (), "float32"))
)


def _resident_bytes() -> int:
    """Memory that the process has pages for."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_slab_is_aligned_zero_and_shared_by_its_views() -> None:
    slab = allocate_slab(3 * 4096, pin=False)

    assert slab.tensor.data_ptr() % 4096 == 0
    assert not slab.tensor.any()
    slab.memory[5] = 7
    assert slab.tensor[5] == 7
    assert not slab.memory.readonly
    slab.close()


def test_views_outlive_a_closed_slab() -> None:
    slab = allocate_slab(4096, pin=False)
    mapping = weakref.ref(slab.memory.obj)
    view = slab.tensor[:16]

    slab.close()
    slab.close()
    view.fill_(3)

    assert mapping() is not None
    with pytest.raises(ClosedError):
        _ = slab.memory
    with pytest.raises(ClosedError):
        _ = slab.tensor
    del view
    assert mapping() is None


def test_slabs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="slab of 0 bytes"):
        allocate_slab(0, pin=False)
    with pytest.raises(CapacityError, match="no room"):
        allocate_slab(1 << 60, pin=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_cuda_nothing_is_pinned_and_nobody_is_warned() -> None:
    slab = allocate_slab(4096, pin=True)

    assert not slab.pinned
    slab.close()


def test_a_slab_is_unpinned_when_it_is_closed() -> None:
    runtime, slab = PlayedRuntime(), Slab(3 * 4096)

    slab.pin(Pinner(runtime), 4096, 8192)
    assert slab.pinned
    assert runtime.pinned == {slab.tensor.data_ptr() + 4096: 8192}
    slab.close()

    assert not runtime.pinned


def test_a_fork_does_not_copy_pinned_memory() -> None:
    slab = Slab(2 * 4096)
    slab.pin(Pinner(PlayedRuntime()), 4096, 4096)

    flags = [_flags(slab.tensor.data_ptr() + offset) for offset in (0, 4096)]

    assert ["dc" in some for some in flags] == [False, True]
    slab.close()


def test_a_fork_copies_what_could_not_be_pinned_or_is_pinned_no_longer() -> None:
    slab = Slab(4096)
    address = slab.tensor.data_ptr()

    with pytest.raises(DeviceError):
        slab.pin(Pinner(PlayedRuntime(refuse=0)), 0, 4096)
    assert "dc" not in _flags(address)

    slab.pin(Pinner(PlayedRuntime()), 0, 4096)
    assert "dc" in _flags(address)
    slab.unpin()
    assert "dc" not in _flags(address)
    slab.close()


def _flags(address: int) -> list[str]:
    """Of the mapping that an address lies in, see `man proc_pid_smaps`."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            start, stop = (int(number, 16) for number in name.split("-"))
            found = start <= address < stop
        elif found and name == "VmFlags:":
            return values
    return []


def test_a_refused_registration_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cudaHostRegister of 4096 bytes returned error 2"):
        HostRegistration(PlayedRuntime(refuse=0)).add(4096, 4096)


def test_memory_that_cannot_be_unpinned_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runtime = PlayedRuntime()
    registration = HostRegistration(runtime)
    for address in (0x1000, 0x2000):
        registration.add(address, 4096)
    del runtime.pinned[0x2000]  # as after an error that ended the context

    registration.close()

    assert "cudaHostUnregister of 0x2000 returned error 713" in caplog.text
    assert not runtime.pinned


def test_calls_are_made_with_the_pinners_gpu_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """They make no context on the GPU that is current here, and break no capture."""
    current = [-1]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    class Watched(PlayedRuntime):
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Code:  # noqa: N802
            seen.append(current[-1])
            return super().cudaHostRegister(pointer, size, flags)

        def cudaHostUnregister(self, pointer: int) -> Code:  # noqa: N802
            seen.append(current[-1])
            return super().cudaHostUnregister(pointer)

    @contextmanager
    def relaxed_capture_mode() -> Iterator[None]:
        current.append(current[-1] + 10)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(slabs, "relaxed_capture_mode", relaxed_capture_mode)
    seen: list[int] = []
    slab = Slab(4096)
    slab.pin(Pinner(Watched(), index=1), 0, 4096)
    slab.close()

    assert seen == [11, 11]


def test_steps_hold_whole_units() -> None:
    assert list(Pinner(PlayedRuntime(), step_bytes=7).steps(10, 3)) == [(0, 6), (6, 4)]
    assert list(Pinner(PlayedRuntime(), step_bytes=7).steps(10, 8)) == [(0, 8), (8, 2)]


@pytest.mark.parametrize("advice", [slabs._POPULATE_WRITE, 9999])
def test_touched_memory_has_pages_with_and_without_the_advice(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(slabs, "_POPULATE_WRITE", advice)  # 9999: as on a system that does not know it
    slab = Slab(64 << 20)
    before = _resident_bytes()

    Pinner(PlayedRuntime()).touch(slab.tensor)

    assert _resident_bytes() - before >= 60 << 20
    slab.close()


def test_touching_more_than_there_is_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab(4096)
    monkeypatch.setattr(slabs, "_UNKNOWN_ADVICE", set())
    monkeypatch.setattr(slabs, "_POPULATE_WRITE", 9999)

    with pytest.raises(CapacityError, match="no pages for 4096 bytes of host memory: EINVAL"):
        Pinner(PlayedRuntime()).touch(slab.tensor)
    slab.close()


# NUMA.


def _system(root: Path, online: str, node: str) -> Path:
    for name, text in (
        ("sys/devices/system/node/online", online),
        ("sys/bus/pci/devices/0000:3b:00.0/numa_node", node),
    ):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("online", "node", "found"), [("0-1", "1", 1), ("0-1", "-1", None), ("0", "0", None)]
)
def test_the_node_of_a_device_matters_where_there_are_several(
    tmp_path: Path, online: str, node: str, found: int | None
) -> None:
    assert device_node("0000:3B:00.0", _system(tmp_path, online, node)) == found


def test_nobody_knows_the_node_of_an_unknown_device(tmp_path: Path) -> None:
    assert device_node("", tmp_path) is None


def test_a_node_that_is_not_there_costs_nothing_but_speed(caplog: pytest.LogCaptureFixture) -> None:
    slab = Slab(4096)

    assert not prefer_node(slab.tensor.data_ptr(), 4096, 1000)
    assert "not bound to NUMA node 1000" in caplog.text
    Pinner(PlayedRuntime(), node=1000).touch(slab.tensor)
    slab.close()


# Host pools.

SLOT_BYTES = HostPool(KV, 4, 1, pin=False).layout.slot_bytes


def _pool(
    runtime: PlayedRuntime, *, slots: int = 5, layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT
) -> HostPool:
    """A pool that is pinned two slots at a time."""
    return HostPool(KV, 4, slots, pin=Pinner(runtime, step_bytes=2 * SLOT_BYTES), layout=layout)


def test_a_pool_starts_with_its_first_step_and_grows() -> None:
    runtime = PlayedRuntime()
    pool = _pool(runtime)
    slot_bytes = pool.layout.slot_bytes

    assert (pool.ready, pool.growing, pool.pinned) == (2, True, True)
    assert list(runtime.pinned.values()) == [2 * slot_bytes]
    assert [pool.grow(), pool.grow(), pool.grow()] == [4, 5, 5]
    assert not pool.growing
    assert sum(runtime.pinned.values()) == 5 * slot_bytes
    pool.close()
    assert not runtime.pinned


def test_a_pool_opens_with_more_than_a_step_and_grows_by_small_ones() -> None:
    """A call for all that is pinned at once would stop an engine that shares the process as long."""
    runtime = PlayedRuntime()
    pin = Pinner(runtime, step_bytes=SLOT_BYTES, first_bytes=3 * SLOT_BYTES)
    pool = HostPool(KV, 4, 5, pin=pin)

    assert (pool.ready, pool.growing, pool.step_bytes) == (3, True, SLOT_BYTES)
    assert [pool.grow(), pool.grow(), pool.growing] == [4, 5, False]
    assert list(runtime.pinned.values()) == [SLOT_BYTES] * 5
    pool.close()

    all_at_once = HostPool(KV, 4, 2, pin=pin)
    assert (all_at_once.ready, all_at_once.growing) == (2, False)
    all_at_once.close()
    assert 64 << 20 <= slabs.STEP_BYTES <= 256 << 20


def test_layers_that_come_first_are_pinned_at_once() -> None:
    runtime = PlayedRuntime()
    pool = _pool(runtime, layout=HostLayout.LAYER_FIRST)

    assert (pool.ready, pool.growing) == (5, False)
    assert list(runtime.pinned.values()) == [size for _, size in pool.layout.layer_arrays(5)]
    pool.close()


@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_pool_that_cannot_be_pinned_warns_of_the_slower_path_and_serves(layout: HostLayout) -> None:
    runtime = PlayedRuntime(refuse=1 if layout is HostLayout.LAYER_FIRST else 0)

    words = (
        r"pool 'kv' is not pinned .*error 2: \d+ bytes are available.* ulimit -l is .*, or lower host_bytes"
    )
    with pytest.warns(PinningWarning, match=rf"{words}\): copies take path 'plain'"):
        pool = _pool(runtime, layout=layout)

    assert (pool.ready, pool.pinned, pool.growing) == (5, False, False)
    assert not runtime.pinned
    pool.items("keys").fill_(1)
    pool.close()


def test_a_pool_that_cannot_grow_stays_as_large_as_it_is() -> None:
    runtime = PlayedRuntime(refuse=1)
    pool = _pool(runtime)

    with pytest.warns(PinningWarning, match="pool 'kv' has 2 of 5 host slots: cudaHostRegister"):
        assert pool.grow() == 2

    assert not pool.growing
    assert pool.pinned
    pool.close()
    assert not runtime.pinned


class _Threadless(Pinner):
    """Finds no threads for any step after so many."""

    steps_left = 0

    def touch(self, memory: torch.Tensor, *, fresh: bool = True) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise RuntimeError("can't start new thread")
        super().touch(memory)


@pytest.mark.parametrize(("steps", "words"), [(0, "is not pinned"), (1, "has 2 of 5 host slots")])
def test_a_system_without_threads_refuses_to_pin(steps: int, words: str) -> None:
    pinner = _Threadless(PlayedRuntime(), step_bytes=2 * SLOT_BYTES)
    pinner.steps_left = steps

    with pytest.warns(PinningWarning, match=f"{words}.*can't start new thread"):
        assert HostPool(KV, 4, 5, pin=pinner).grow() == 5 - 3 * steps


class _Pageless(Pinner):
    """Has no pages for the second run."""

    runs = 0

    def touch(self, memory: torch.Tensor, *, fresh: bool = True) -> None:
        self.runs += 1
        if self.runs == 2:
            raise CapacityError("no pages")


def test_a_pool_that_finds_no_pages_unpins_what_it_pinned() -> None:
    runtime = PlayedRuntime()

    with pytest.raises(CapacityError, match="no pages"):
        HostPool(KV, 4, 5, pin=_Pageless(runtime), layout=HostLayout.LAYER_FIRST)

    assert (runtime.most, runtime.pinned, runtime.lost) == (1, {}, [])


def test_a_closed_pool_does_not_grow() -> None:
    runtime = PlayedRuntime()
    pool = _pool(runtime)

    pool.close()

    assert pool.grow() == 2
    assert not runtime.pinned


def test_closing_waits_for_a_step_under_way() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(PlayedRuntime):
        def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Code:  # noqa: N802
            if self.pinned:  # the first step is pinned by the constructor
                begun.set()
                assert go_on.wait(30)
            return super().cudaHostRegister(pointer, size, flags)

    runtime = Slow()
    pool = _pool(runtime)
    threads = [threading.Thread(target=pool.grow), threading.Thread(target=pool.close)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    assert pool.pinned  # not closed under the hands of the step

    go_on.set()
    for thread in threads:
        thread.join(30)

    assert not runtime.pinned
    with pytest.raises(ClosedError):
        pool.page(0)


def test_steps_share_no_page_of_a_system_with_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)  # as on many an Arm server
    runtime = PlayedRuntime()

    pool = _pool(runtime, slots=100)
    while pool.growing:
        pool.grow()

    assert pool.ready == 100
    starts = [address - min(runtime.pinned) for address in runtime.pinned]
    assert len(starts) > 1
    assert not any(start % mmap.PAGESIZE for start in starts)
    pool.close()


@pytest.mark.asyncio
async def test_a_pool_grows_off_the_loop_and_tells() -> None:
    port, pool, told = AsyncioPort(threads=1), _pool(PlayedRuntime()), []

    await grow_pool(port, pool, told.append)

    assert told == [4, 5]
    pool.close()
    await port.aclose()


def test_a_pool_that_needs_no_pinning_is_ready() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = HostPool(KV, 4, 3, pin=False)

    assert (pool.ready, pool.growing, pool.pinned) == (3, False, False)
    pool.close()
