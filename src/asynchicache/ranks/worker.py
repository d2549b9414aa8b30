"""A follower's process: joins a group, opens its memory and storage, and carries out the leader's log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
import torch

from asynchicache.config import CacheConfig
from asynchicache.controller.storage_pools import StoragePools
from asynchicache.controller.tasks import OneLoop, OwnedTasks
from asynchicache.errors import CacheError, RankError, RankLostError, UsageError
from asynchicache.parts import (
    OpenedDevice,
    allocate_memories,
    attach_storage,
    engine_config,
    free_memory,
    rank_parts,
)
from asynchicache.pools.device import DevicePool
from asynchicache.pools.engine import EngineMemory
from asynchicache.pools.host import HostPool, grow_pool
from asynchicache.pools.shared import HostHandle
from asynchicache.pools.shared import share as handle_of
from asynchicache.pools.sizing import FreeMemory, plan_host_slots, plan_slots
from asynchicache.ports import Port
from asynchicache.ranks.follower import AppliedStep, RankFollower
from asynchicache.ranks.group import HandshakeLink
from asynchicache.ranks.handshake import build_of
from asynchicache.ranks.host_sizes import need_of
from asynchicache.ranks.links import Address, Link, connect, receive, send
from asynchicache.ranks.messages import PROTOCOL, Hello, MemoryHandles, Ready, Refused, Welcome
from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.shared_storage import SharedStorage
from asynchicache.ranks.sharing import share_of, sharing_key
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device, Stream
from asynchicache.transfer.copies import PoolMemory

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1


class RankWorker:
    """A rank that carries out what the leader decides: it has device memory, host memory and storage, and no
    tree.

    Its engine runs each forward inside `forward`, with the step number that the leader's engine sent along.
    Confined to one event loop.

    Attributes:
        memories: by pool, its memory on device and host.
    """

    def __init__(self, spec: ModelSpec, memories: Mapping[str, PoolMemory], follower: RankFollower) -> None:
        self.spec = spec
        self.memories = memories
        self._follower = follower
        self._ended = asyncio.Event()
        self._loop = OneLoop("the worker")

    @classmethod
    @asynccontextmanager
    async def join(
        cls,
        spec: ModelSpec,
        config: CacheConfig,
        address: str,
        token: str,
        *,
        rank: int | None = None,
        limits: RankLimits | None = None,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
        engine: EngineMemory | None = None,
        link: Link | None = None,
    ) -> AsyncIterator[RankWorker]:
        """Join a group for the duration of an `async with`.

        Args:
            config: as the leader's, with this `rank`.
            address: where the leader listens. A leader that does not listen yet is waited for.
            token: the group's secret.
            rank: this rank's number. Default: the option `rank`; to be given if `spec` is that of one rank.
            storage: an open backend to use instead of the configured one; the caller closes it.
            port: clock and threads; the real ones if None.
            device: an open device to use instead of the configured one; the caller closes it.
            engine: device memory that an engine owns, with at least the pages of the leader's. The numbers
                that the leader's requests name are pages of it too. Default: device memory is allocated.
            link: a connection to use instead of `address`.

        Raises:
            RankError: the leader refuses this rank, or does not answer; says why.
            ConfigError: options contradict each other or the model.
            StorageError: storage cannot be used.
        """
        limits = RankLimits() if limits is None else limits
        config = config if engine is None else engine_config(config, engine)
        async with AsyncExitStack() as stack:
            if link is None:
                link = await _connect(Address.parse(address), limits.joining)
            stack.push_async_callback(link.aclose)
            hand = HandshakeLink(link)
            opened = OpenedDevice(stack, config, port, device)
            number = config.rank if rank is None else rank
            welcome = await _greet(hand, spec, config, number, token, opened.device, engine, limits)
            opening = _open(stack, spec, config, hand, opened, storage, engine, limits, number, welcome)
            worker = await _ready(hand, opening)
            tasks = OwnedTasks()
            stack.push_async_callback(tasks.aclose)
            await tasks.ready()
            stack.callback(worker.run(hand, tasks, welcome.heartbeat, limits.silence))
            yield worker

    def run(
        self, hand: HandshakeLink, tasks: OwnedTasks, heartbeat: float, silence: float
    ) -> Callable[[], None]:
        """Carry out the log in tasks of `tasks`; `join` calls it. Returns what ends it."""
        self._follower.spawn = tasks.spawn
        self._follower.wake = partial(self._flush, hand.link)
        tasks.spawn(self._listen(hand))
        tasks.spawn(self._beat(heartbeat, silence))
        return self._follower.leave

    def _flush(self, link: Link) -> None:
        data = self._follower.take()
        try:
            if data and not self._follower.closed:
                send(link, data)
        except RankLostError as error:
            self._follower.fail(RankLostError(f"rank 0 is lost: {error}"))

    async def _listen(self, hand: HandshakeLink) -> None:
        self._follower.feed(hand.rest())
        why = "its connection ended"
        try:
            while not self._follower.closed and (data := await receive(hand.link)):
                self._follower.feed(data)
        except RankLostError as error:
            why = str(error)
        if self._follower.closed:
            await hand.link.aclose()  # the leader waits for it
        else:
            self._follower.fail(RankLostError(f"rank 0 is lost: {why}"))
        self._ended.set()

    async def _beat(self, heartbeat: float, silence: float) -> None:
        while self._follower.failure is None and not self._follower.closed:
            await asyncio.sleep(heartbeat)
            self._follower.heartbeat()
            self._follower.check(silence)

    # What the rank's engine uses

    def device_tensor(self, pool: str, tensor: str) -> torch.Tensor:
        """One tensor of one pool on the device, `[layers, slots, ...]`; the slot numbers are the leader's.

        Raises:
            KeyError: no such pool or tensor.
        """
        memory = self.memories[pool].device
        if isinstance(memory, DevicePool):
            return memory.tensor(tensor)
        raise UsageError("device_tensor(): an engine owns the device memory here")

    async def steps(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the number and the message of each step that the leader's engine marks with one, in order.
        Ends when the leader closes the group.

        Raises:
            RankError: the group has failed.
        """
        self._loop.check()
        while (step := await self._follower.next_message()) is not None:
            yield step

    @asynccontextmanager
    async def forward(self, step: int, stream: Stream) -> AsyncIterator[AppliedStep]:
        """Run one forward: the body makes `stream` wait for what it reads, and enqueues it.

        Before the body, all copies that the forward depends on are enqueued. After it, copies of what it
        writes may begin, also if no step follows. If the body raises, the group fails.

        Args:
            step: the number that the leader's engine sent along (`RankGroup.mark`).
            stream: this rank's compute stream, with every earlier forward enqueued on it.

        Raises:
            RankError: the step was run before or is out of order, or the group has failed or is closed.
            UsageError: `stream` is not one of this rank's device.
        """
        self._loop.check()
        applied = await self._follower.apply(step, stream)
        try:
            yield applied
        except BaseException as error:
            # The forward may have written a part: the leader must not take its pages for whole.
            self._follower.fail(RankError(f"forward {step} failed: {error!r:.200}"))
            raise
        self._follower.launched(stream)

    @property
    def failure(self) -> RankError | None:
        """Why this rank stopped; None while it runs."""
        return self._follower.failure

    async def ended(self) -> None:
        """Wait until the leader has closed the group, or is lost."""
        self._loop.check()
        await self._ended.wait()


async def _connect(address: Address, seconds: float) -> Link:
    """
    Raises:
        RankError: no leader listens there, `seconds` long.
    """
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await connect(address)
                except OSError:
                    await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError as error:
        raise RankLostError(f"no leader listened at {address} for {seconds} s") from error


async def _greet(
    hand: HandshakeLink,
    spec: ModelSpec,
    config: CacheConfig,
    rank: int,
    token: str,
    device: Device,
    engine: EngineMemory | None,
    limits: RankLimits,
) -> Welcome:
    """
    Raises:
        RankError: the leader refuses this rank, or does not answer.
    """
    memory = free_memory(device)
    slots = _proposed_slots(spec, config, memory, engine)
    shares = sharing_key(spec, config.host_layout)
    build = build_of(spec, config, engine=engine is not None)
    need = need_of(spec, config, memory, engine=engine is not None)
    hand.send(Hello(PROTOCOL, token, rank, build, slots, shares, need, rank_parts(spec, config)))
    answer = await hand.receive(2 * limits.joining)
    if isinstance(answer, Refused):
        raise RankError(f"the leader refuses rank {rank}: {answer.error}")
    if not isinstance(answer, Welcome):
        raise RankError(f"the leader answered with {type(answer).__name__}, not with Welcome")
    return answer


def _proposed_slots(
    spec: ModelSpec, config: CacheConfig, memory: FreeMemory, engine: EngineMemory | None
) -> dict[str, tuple[int, int]]:
    """The (device, host) slots that this rank has memory for, by pool that owns slots."""
    if engine is None:
        slots = plan_slots(spec, config, memory)
        return {pool.name: slots[pool.name] for pool in spec.owners}
    pages = engine.pages(spec)
    on_host = plan_host_slots(spec, config, pages, memory)
    return {name: (count, on_host[name]) for name, count in pages.items()}


async def _ready(hand: HandshakeLink, opening: Coroutine[object, object, RankWorker]) -> RankWorker:
    """Open, and tell the leader how it went."""
    try:
        worker = await opening
    except CacheError as error:
        hand.send(Ready(f"{type(error).__name__}: {error}"))
        raise
    hand.send(Ready())
    return worker


async def _open(
    stack: AsyncExitStack,
    spec: ModelSpec,
    config: CacheConfig,
    hand: HandshakeLink,
    opened: OpenedDevice,
    storage: StorageBackend | None,
    engine: EngineMemory | None,
    limits: RankLimits,
    rank: int,
    welcome: Welcome,
) -> RankWorker:
    """Allocate the agreed memory and open storage, from the bottom up."""
    port, share = opened.port, share_of(spec, rank, welcome.sharing)
    attached = await _shared_memory(hand, limits) if share.place else None
    allocate = partial(
        allocate_memories,
        spec,
        welcome.slots,
        opened.device.name,
        config.host_layout,
        pages=None if engine is None else engine.pools,
        mapped=share.pools,
        attached=attached,
    )
    memories, _ = await opened.allocate(allocate)
    if share.pools and attached is None:
        own = {name: memories[name].host for name in share.pools}
        hand.send(MemoryHandles(handle_of(own)))
    copies = await opened.transfers(memories, spec.layers)
    for memory in memories.values():  # the leader hands out slots only once every rank has all of them
        if memory.host.growing:
            await grow_pool(port, memory.host, lambda _: None)
    hosts = {name: memory.host for name, memory in memories.items()}
    stored = SharedStorage(lambda _: (), share)
    stack.push_async_callback(stored.aclose)
    follower = RankFollower(welcome.incarnation, opened.device, copies, memories, stored, port.now, share)
    if storage is not None or config.storage is not None:
        stored.attach(await attach_storage(spec, config, hosts, storage, port))
        follower.update_weights = partial(_open_again, stored, spec, config, hosts, storage, port)
    return RankWorker(spec, memories, follower)


async def _shared_memory(hand: HandshakeLink, limits: RankLimits) -> HostHandle:
    """Where the rank that this one shares host memory with has it.

    Raises:
        RankError: the leader does not say.
    """
    message = await hand.receive(2 * limits.joining)
    if not isinstance(message, MemoryHandles):
        raise RankError(f"the leader sent a {type(message).__name__}, not MemoryHandles")
    return message.pools


async def _open_again(
    stored: StoragePools,
    spec: ModelSpec,
    config: CacheConfig,
    hosts: Mapping[str, HostPool],
    storage: StorageBackend | None,
    port: Port,
    weight_version: str,
) -> None:
    """Use storage under another weight version. Calls that come meanwhile find none, and miss.

    Raises:
        CacheError: storage cannot be opened again; there is none then.
    """
    attachment = stored.detach()
    if attachment is not None:  # else it could not be opened the last time
        await attachment.aclose()
    config = msgspec.structs.replace(config, weight_version=weight_version)
    stored.attach(await attach_storage(spec, config, hosts, storage, port))
