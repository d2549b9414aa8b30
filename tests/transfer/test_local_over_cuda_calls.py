"""Transfers over the CUDA driver of streams, whose runtime fails at each of its calls in turn."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType, NoneType, SimpleNamespace

import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import CacheError, CallRefusedError, CopyEndedError, TransferError
from asynchicache.kernels.pointers import SamePointers
from asynchicache.kernels.select import CopyMethods, copy_by_driver
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import PoolTransfer
from streams.played_cuda import PlayedCuda
from transfer.conftest import LAYERS, make_memories

PATIENCE = 30.0
NEVER = 3600.0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    made = PlayedCuda()
    made.install(monkeypatch)
    monkeypatch.setattr(CudaDevice, "name", "cpu")  # where the bytes are
    return made


class _Run:
    """Transfers that move two pages to the host and back, with so many calls of the runtime that succeed.

    Attributes:
        outcomes: what `done` was told, of the backup and of the load.
        right: whether the pages that came back are those that left.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, list[BaseException | None]] = {"backup": [], "load": []}
        self.right = False

    async def run(self, operation: Callable[..., CacheOperation], runtime: PlayedCuda, calls: int) -> None:
        runtime.calls_left = sys.maxsize
        port, device, memories = AsyncioPort(threads=1), CudaDevice(0), make_memories()
        keys = memories["kv"].device.items("keys")
        keys.copy_(torch.arange(keys.numel()).view(keys.shape))
        reactor = CompletionReactor(port, sweep_seconds=0.01)
        transfers = LocalTransfers(device, memories, LAYERS, port, reactor, group_bytes=1)
        compute = device.stream("compute")
        runtime.calls_left = calls
        backup = operation(Direction.BACKUP, kv=([0, 1], [2, 3]))
        load = operation(Direction.LOAD, kv=([2, 3], [5, 6]))
        for name, wish in (("backup", backup), ("load", load)):
            await _use(transfers.submit(wish, done=self.outcomes[name].append), compute)
        assert await transfers.aclose(PATIENCE) == 0
        assert await reactor.aclose(PATIENCE) == 0
        device.close()
        await port.aclose()
        self.right = torch.equal(keys[:, [0, 1]], keys[:, [5, 6]])


async def _use(ticket: Ticket, compute: object) -> None:
    try:
        await ticket.submitted()
        ticket.fence(LAYERS - 1).wait_on(compute)
        await ticket
    except TransferError as error:
        failure = error
        assert isinstance(failure.__cause__, CacheError)
        assert not ticket.ok
    assert ticket.done


@asynccontextmanager
async def _open(device: CudaDevice, path: CopyPath | None = None) -> AsyncIterator[LocalTransfers]:
    """Transfers whose every layer with bytes is a group, and which no sweeper disturbs."""
    port = AsyncioPort(threads=1)
    reactor = CompletionReactor(port, sweep_seconds=NEVER)
    transfers = LocalTransfers(device, make_memories(), LAYERS, port, reactor, group_bytes=1, copy_path=path)
    yield transfers
    assert await transfers.aclose(PATIENCE) == 0
    assert await reactor.aclose(PATIENCE) == 0
    device.close()
    await port.aclose()


@pytest.mark.asyncio
async def test_a_layer_group_costs_one_record_and_a_transfer_one_question(
    runtime: PlayedCuda, operation: Callable[..., CacheOperation]
) -> None:
    async with _open(CudaDevice(0)) as transfers:

        async def cost(**slots: object) -> Counter[str]:
            before = runtime.counted
            await transfers.submit(operation(Direction.LOAD, **slots), done=lambda error: None)
            return runtime.counted - before - Counter(other=9)  # events, as long as none can be used again

        kv, mamba = ([0], [0]), ([0], [0])
        await cost(kv=kv)  # whose threads enter their contexts
        three, five = await cost(kv=kv), await cost(kv=kv, mamba=mamba)

    assert three == Counter(record=3, query=1, stream=1)
    assert five == Counter(record=5, query=1, stream=1)


@pytest.mark.asyncio
async def test_events_are_used_again_however_long_tickets_are_kept(
    runtime: PlayedCuda, operation: Callable[..., CacheOperation]
) -> None:
    async with _open(CudaDevice(0)) as transfers:
        tickets = []
        for _ in range(50):
            tickets.append(
                transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=lambda error: None)
            )
            await tickets[-1]
        assert all(ticket.done and ticket.ok for ticket in tickets)

    assert runtime.made <= 6, "three of a transfer, and what the waiter's thread still held of the one before"


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [CopyPath.BATCH, CopyPath.KERNEL])
@pytest.mark.parametrize("error", [CallRefusedError("error 801"), RuntimeError("Failed to find C compiler")])
async def test_a_refused_copy_costs_its_transfer_and_its_path(
    runtime: PlayedCuda,
    operation: Callable[..., CacheOperation],
    path: CopyPath,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    device, outcomes = CudaDevice(0), list[BaseException | None]()
    async with _open(device, path) as transfers:
        kv = transfers._copier._pools["kv"]
        await transfers.submit(operation(Direction.BACKUP, kv=([0], [2])), done=outcomes.append)
        refusing = SimpleNamespace(copy=refuse)
        kv.methods = (
            replace(kv.methods, batch=refuse)
            if path is CopyPath.BATCH
            else replace(kv.methods, kernels=refusing)
        )
        wishes = [operation(Direction.LOAD, kv=([2], [page])) for page in (5, 6, 7)]
        for wish in wishes:
            try:
                await transfers.submit(wish, done=outcomes.append)
            except TransferError as failure:
                assert str(error) in str(failure)  # noqa: PT017
        nbytes = transfers.statistics().paths["kv"]

    assert [type(outcome) for outcome in outcomes] == [NoneType, CopyEndedError, NoneType, NoneType]
    assert device.error is None
    assert nbytes[path] == sum(nbytes.values()) // 2, "the backup and the first load"
    assert [record.message for record in caplog.records] == [
        f"pool kv: no more copies by {path.value}: {error}"
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord"])
async def test_without_events_the_host_waits_for_the_stream(
    runtime: PlayedCuda, operation: Callable[..., CacheOperation], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    device, outcomes = CudaDevice(0), list[BaseException | None]()
    async with _open(device) as transfers:
        runtime.refused = {call}
        for direction in (Direction.BACKUP, Direction.LOAD):
            await transfers.submit(operation(direction, kv=([0], [0])), done=outcomes.append)

    assert outcomes == [None, None]
    assert runtime.counted["drain"] >= 1 + 3, "of the backup, and of each group of the load"
    assert [record.message for record in caplog.records] == [
        f"cpu: the host waits where streams should: {call} returned error 2"
    ]


def test_a_wait_that_is_refused_is_the_hosts(runtime: PlayedCuda) -> None:
    device = CudaDevice(0)
    stream, event = device.stream("ours"), device.event()
    stream.record(event)
    runtime.refused = {"cuStreamWaitEvent"}

    stream.wait_event(event)

    assert runtime.asked[-1] == "synchronize"
    assert device.error is None
    device.close()


@pytest.mark.asyncio
async def test_a_question_that_is_refused_costs_its_transfer_alone(
    runtime: PlayedCuda, operation: Callable[..., CacheOperation]
) -> None:
    """Whose pages the device may still write to, for all that is known."""
    device, outcomes = CudaDevice(0), list[BaseException | None]()
    async with _open(device) as transfers:
        for refused in ({"cuEventQuery"}, set[str]()):
            runtime.refused = refused
            with suppress(TransferError):
                await transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=outcomes.append)

    assert [type(outcome) for outcome in outcomes] == [CallRefusedError, NoneType]
    assert device.error is None


@pytest.mark.asyncio
async def test_whichever_call_fails_everybody_is_told_once_and_nothing_hangs(
    runtime: PlayedCuda, operation: Callable[..., CacheOperation]
) -> None:
    whole = _Run()
    await whole.run(operation, runtime, sys.maxsize)
    assert (whole.outcomes, whole.right) == ({"backup": [None], "load": [None]}, True)

    failed = 0
    for calls in range(sys.maxsize - runtime.calls_left):
        run = _Run()
        async with asyncio.timeout(PATIENCE):
            await run.run(operation, runtime, calls)
        assert [len(told) for told in run.outcomes.values()] == [1, 1]
        failed += run.outcomes != whole.outcomes
        assert run.right or run.outcomes["load"] != [None]
    assert failed > 5


# What a layer costs the host.


class _Profiled:
    """Calls that the submit thread makes into torch and numpy, as it runs a tick."""

    def __init__(self, transfers: LocalTransfers) -> None:
        self.foreign: list[str] = []
        self._run_tick = transfers._run_tick
        transfers._run_tick = self  # type: ignore[assignment]

    def __call__(self, tick: object) -> None:
        sys.setprofile(self._see)
        try:
            self._run_tick(tick)
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, what: str, called: object) -> None:
        name = ""
        if what == "call":
            name = frame.f_code.co_filename
        elif what == "c_call":
            owner = getattr(called, "__self__", None)
            name = f"{getattr(called, '__module__', '')} {type(owner).__module__} {called}"
        if "torch" in name.replace("torch_event", "") or "numpy" in name:
            self.foreign.append(name)


async def _cost(
    runtime: PlayedCuda, layers: int, pages: int, path: CopyPath
) -> tuple[Counter[str], list[str], list[str], int]:
    """Of one load in groups of one layer: calls of the driver, those that released the interpreter's lock,
    calls into torch and numpy, and what the reactor tracked."""
    keys, values = (TensorSpec(name, tuple(range(layers)), (8,), "uint8") for name in ("keys", "values"))
    spec, port, device = PoolSpec("kv", (keys, values)), AsyncioPort(threads=1), CudaDevice(0)
    memory = PoolMemory(DevicePool(spec, 1, 64), HostPool(spec, 1, 64, pin=False))
    reactor = CompletionReactor(port, sweep_seconds=NEVER)
    transfers = LocalTransfers(device, {"kv": memory}, layers, port, reactor, group_bytes=1, copy_path=path)
    pool = transfers._copier._pools["kv"]
    launch = partial(_launch, device.driver)
    kernels = None
    if path is CopyPath.KERNEL:
        kernels = pytest.importorskip("asynchicache.kernels.triton_copy").TritonKernels(
            pool.items, SamePointers(), launch
        )
    pool.methods = CopyMethods(kernels, partial(copy_by_driver, device.driver))
    slots = list(range(pages))
    wish = CacheOperation(Direction.LOAD, (PoolTransfer("kv", slots, slots[::-1]),))
    for _ in range(2):
        await transfers.submit(wish, done=lambda error: None)
    profiled, before, released = _Profiled(transfers), runtime.counted, len(runtime.released)
    tracked = reactor.statistics().tracked
    await transfers.submit(wish, done=lambda error: None)
    calls, tracked = runtime.counted - before, reactor.statistics().tracked - tracked
    assert await transfers.aclose(PATIENCE) == 0
    assert await reactor.aclose(PATIENCE) == 0
    device.close()
    await port.aclose()
    if path is CopyPath.BATCH:
        assert torch.equal(
            memory.device.items("keys")[:, slots], memory.host.items("keys")[:, slots[::-1], 0]
        )
    return calls, runtime.released[released:], profiled.foreign, tracked


def _launch(driver: CudaDriver, to_device: bool, programs: int, arguments: object, stream: int) -> None:
    assert to_device
    driver.launch(1, programs, 256, 0, stream)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "call"), [(CopyPath.BATCH, "batch"), (CopyPath.KERNEL, "kernel")])
async def test_a_layer_is_one_call_and_one_event_and_hands_no_lock_over(
    runtime: PlayedCuda, path: CopyPath, call: str
) -> None:
    few, many = [await _cost(runtime, layers, 32, path) for layers in (6, 40)]

    for layers, (calls, released, _, tracked) in ((6, few), (40, many)):
        assert calls[call] == calls["record"] == layers
        assert sum(calls.values()) <= 2 * layers + 4, "a question, and of torch a stream"
        assert released == []
        assert tracked == 1
    assert len(few[2]) == len(many[2]), "no call into torch or numpy, and so no room is made, for a layer"


@pytest.mark.asyncio
async def test_a_long_batch_releases_the_lock(runtime: PlayedCuda) -> None:
    calls, released, _, _ = await _cost(runtime, 4, 60, CopyPath.BATCH)

    assert calls["batch"] == 4 + 1, "the first pages go alone"
    assert runtime.runs[-5:] == [64, 56, *[120] * 3]
    assert released == ["cuMemcpyBatchAsync"] * 3
