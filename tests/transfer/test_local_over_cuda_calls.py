"""Transfers over the CUDA driver of streams, whose runtime fails at each of its calls in turn."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import NoneType, SimpleNamespace

import pytest
import torch

from asynchicache.errors import CacheError, CallRefusedError, CopyEndedError, TransferError
from asynchicache.ports import AsyncioPort
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
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
