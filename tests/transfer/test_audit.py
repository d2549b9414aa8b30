"""Audits: what is sampled, what is noticed, and what a page that came back wrong costs."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from asynchicache.errors import AuditError, TransferError
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.base import Stream
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer import audit as audit_module
from asynchicache.transfer.audit import AuditStatistics, PageAudit
from asynchicache.transfer.copies import PageCopier, PlanCopies, PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.plan import (
    CacheOperation,
    Direction,
    PoolShape,
    TransferPlan,
    merge,
)
from asynchicache.transfer.record import TransferRecord

pytestmark = pytest.mark.asyncio

KEYS = TensorSpec("keys", (0, 1, 2), (7,), "bfloat16")
KV = PoolSpec("kv", (KEYS, TensorSpec("scales", (1,), (), "float32")))
LAYERS, PAGE_SIZE, SLOTS = 3, 4, 8
Build = Callable[..., CacheOperation]


class _Rig:
    """Audited transfers over one pool of random bytes."""

    def __init__(self, transfers: LocalTransfers, memory: PoolMemory, audit: PageAudit) -> None:
        self.transfers = transfers
        self.memory = memory
        self.audit = audit
        self.outcomes: list[BaseException | None] = []

    async def run(self, operation: CacheOperation) -> None:
        await self.transfers.submit(operation, done=self.outcomes.append)

    @property
    def counts(self) -> AuditStatistics:
        return self.transfers.statistics().audit


@asynccontextmanager
async def _open(share: float = 1.0, *, inline: bool = False) -> AsyncIterator[_Rig]:
    port = AsyncioPort(threads=1)
    device = EmulatedDevice(InlineDriver() if inline else ThreadDriver())
    reactor = CompletionReactor(port)
    memory = PoolMemory(DevicePool(KV, PAGE_SIZE, SLOTS), HostPool(KV, PAGE_SIZE, SLOTS, pin=False))
    generator = torch.Generator().manual_seed(1)
    for tensor in KV.tensors:
        items = memory.device.items(tensor.name)
        items.copy_(torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator))
    audit = PageAudit({"kv": memory.device}, share, random.Random(2))
    transfers = LocalTransfers(
        device, {"kv": memory}, LAYERS, port, reactor, group_bytes=1, submit_inline=inline, audit=audit
    )
    try:
        yield _Rig(transfers, memory, audit)
    finally:
        await transfers.aclose(10)
        await reactor.aclose(10)
        device.close()
        memory.host.close()
        await port.aclose()


@pytest.mark.parametrize("inline", [True, False])
async def test_pages_that_come_back_as_they_left_are_counted(operation: Build, inline: bool) -> None:
    async with _open(inline=inline) as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0, 1, 5], [3, 4, 0])))
        await rig.run(operation(Direction.LOAD, kv=([4, 0], [6, 7])))

        assert rig.outcomes == [None, None]
        assert rig.counts == AuditStatistics(recorded=3, compared=2, mismatched=0)


@pytest.mark.parametrize("inline", [True, False])
async def test_a_page_that_changed_on_the_host_fails_its_transfer(
    operation: Build, inline: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with _open(inline=inline) as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0, 1], [3, 4])))
        rig.memory.host.items("keys")[2, 4, 0, 5] ^= 1

        with pytest.raises(TransferError, match="not what they were"):
            await rig.run(operation(Direction.LOAD, kv=([3, 4], [6, 7])))

        assert isinstance(rig.outcomes[1], AuditError)
        assert rig.counts == AuditStatistics(recorded=2, compared=2, mismatched=1)
    assert "host slot 4 came to device slot 7 with other bytes" in caplog.text


async def test_a_forward_may_overwrite_a_layer_whose_fence_it_has_passed(
    operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with the states that it was given, while the last layers are still being copied."""
    async with _open() as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0, 1], [3, 4])))
        items, enqueue = rig.memory.device.items("keys"), PageCopier.enqueue

        def overtaken(self: PageCopier, stream: Stream, copies: PlanCopies, layers: range) -> None:
            enqueue(self, stream, copies, layers)
            if layers.start:
                stream.launch(lambda: items[0, 6].fill_(0))

        monkeypatch.setattr(PageCopier, "enqueue", overtaken)
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))

        assert rig.outcomes == [None, None]
        assert rig.counts == AuditStatistics(recorded=2, compared=1, mismatched=0)


async def test_a_copy_to_the_wrong_place_is_noticed(
    operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only damage on the host: what the copies themselves do wrong as well."""
    async with _open() as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0, 1], [3, 4])))
        monkeypatch.setattr("asynchicache.transfer.copies.PageCopier.enqueue", lambda *_: None)

        with pytest.raises(TransferError, match="not what they were"):
            await rig.run(operation(Direction.LOAD, kv=([3], [6])))


async def test_slots_that_were_given_back_are_forgotten(operation: Build) -> None:
    async with _open() as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0], [3])))
        rig.audit.forget("kv", [3])  # as when storage is about to read another page into it
        rig.memory.host.items("keys")[:, 3] = 9
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))

        assert rig.counts == AuditStatistics(recorded=1, compared=0, mismatched=0)


async def test_a_slot_that_is_written_again_is_looked_at_again(operation: Build) -> None:
    async with _open() as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0], [3])))
        await rig.run(operation(Direction.BACKUP, kv=([1], [3])))
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))

        assert rig.counts == AuditStatistics(recorded=2, compared=1, mismatched=0)


async def test_a_share_of_the_pages_is_looked_at(operation: Build) -> None:
    async with _open(0.5) as rig:
        for _ in range(20):
            await rig.run(operation(Direction.BACKUP, kv=(range(SLOTS), range(SLOTS))))

        assert 50 < rig.counts.recorded < 110  # of 160


async def test_no_more_is_copied_aside_than_there_is_room_for(
    operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _open() as rig:
        monkeypatch.setattr(audit_module, "MAX_BYTES", 3 * KV.slot_bytes(PAGE_SIZE))
        await rig.run(operation(Direction.BACKUP, kv=(range(SLOTS), range(SLOTS))))

        assert rig.counts.recorded == 3


async def test_forks_are_not_looked_at(operation: Build) -> None:
    async with _open() as rig:
        await rig.run(operation(Direction.FORK, kv=([0], [1])))

        assert rig.counts == AuditStatistics()


class _Draws(random.Random):
    """Draws these numbers."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("second", [0.0, 0.9])
async def test_of_two_backups_to_one_slot_the_second_counts(
    operation: Build, inline: bool, second: float
) -> None:
    async with _open(0.5, inline=inline) as rig:
        rig.audit._rng = _Draws(0.0, second)
        drawn = threading.Event()
        if (
            rig.transfers._auditor is not None
        ):  # which could else have seen the first before the second is drawn
            rig.transfers._auditor.submit(drawn.wait)
        backups = [
            rig.transfers.submit(operation(Direction.BACKUP, kv=([slot], [3])), done=rig.outcomes.append)
            for slot in (0, 1)
        ]
        try:
            await backups[1].submitted()
        finally:
            drawn.set()
        for backup in backups:
            await backup
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))

        assert rig.outcomes == [None] * 3
        looked_at = int(second < 0.5)
        assert rig.counts == AuditStatistics(recorded=looked_at, compared=looked_at, mismatched=0)


def _hold_first(
    transfers: LocalTransfers, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The next transfer of a direction is known once what is in the list is called."""
    held: list[Any] = []
    reached = transfers._on_group_reached

    def hold(record: TransferRecord, *what: Any) -> None:
        if record.direction is direction and held[:1] in ([], [record]):
            held[:1] = [record]
            held.append(partial(reached, record, *what))
        else:
            reached(record, *what)

    monkeypatch.setattr(transfers, "_on_group_reached", hold)
    return held


def _let_go(held: list[Any]) -> None:
    for call in held[1:]:
        call()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_load_is_compared_with_what_its_slot_had_when_it_was_enqueued(
    operation: Build, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another page has gone to the slot, and its fingerprint is there, when the load is looked at."""
    async with _open(inline=inline) as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0], [3])))
        held = _hold_first(rig.transfers, Direction.LOAD, monkeypatch)
        load = rig.transfers.submit(operation(Direction.LOAD, kv=([3], [6])), done=rig.outcomes.append)
        await load.submitted()
        await rig.run(operation(Direction.BACKUP, kv=([1], [3])))
        _let_go(held)
        await load

        assert rig.outcomes == [None] * 3
        assert rig.counts == AuditStatistics(recorded=2, compared=1, mismatched=0)


@pytest.mark.parametrize("inline", [True, False])
async def test_of_two_backups_the_one_enqueued_last_counts_whichever_is_looked_at_first(
    operation: Build, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _open(inline=inline) as rig:
        held = _hold_first(rig.transfers, Direction.BACKUP, monkeypatch)
        first = rig.transfers.submit(operation(Direction.BACKUP, kv=([0], [3])), done=rig.outcomes.append)
        await first.submitted()
        await rig.run(operation(Direction.BACKUP, kv=([1], [3])))
        _let_go(held)
        await first
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))

        assert rig.outcomes == [None] * 3
        assert rig.counts == AuditStatistics(recorded=1, compared=1, mismatched=0)


@pytest.mark.parametrize("inline", [True, False])
async def test_a_load_of_what_has_no_fingerprint_yet_is_not_compared(
    operation: Build, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Least of all with that of the page which lay there before."""
    async with _open(inline=inline) as rig:
        await rig.run(operation(Direction.BACKUP, kv=([0], [3])))
        held = _hold_first(rig.transfers, Direction.BACKUP, monkeypatch)
        backup = rig.transfers.submit(operation(Direction.BACKUP, kv=([1], [3])), done=rig.outcomes.append)
        await backup.submitted()
        await rig.run(operation(Direction.LOAD, kv=([3], [6])))
        _let_go(held)
        await backup

        assert rig.outcomes == [None] * 3
        assert rig.counts == AuditStatistics(recorded=2, compared=0, mismatched=0)


async def test_a_backup_enqueued_while_another_is_remembered_is_not_mistaken_for_it(operation: Build) -> None:
    """Copies are chosen on one thread and remembered on another: between any two steps of it."""
    async with _open() as rig:
        audit, plan = rig.audit, _plan(operation(Direction.BACKUP, kv=([0], [3])))
        first = audit.choose(plan)
        assert first is not None
        second = None

        class Interrupted(dict):  # type: ignore[type-arg]
            def get(self, *key: Any) -> Any:
                nonlocal second
                found = super().get(*key)
                second = second or audit.choose(plan)
                return found

        for name, table in list(vars(audit).items()):
            if isinstance(table, dict) and name != "_devices":
                setattr(audit, name, Interrupted(table))
        first.finish([b"first"])
        assert second is not None
        second.finish([b"second"])
        load = audit.choose(_plan(operation(Direction.LOAD, kv=([3], [6]))))

        assert load is not None
        assert load.finish([b"second"]) == []


def _plan(operation: CacheOperation) -> TransferPlan:
    return merge([operation], {"kv": PoolShape(KV, PAGE_SIZE, SLOTS, SLOTS)}, LAYERS, None)
