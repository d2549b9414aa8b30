"""The group as its leader opens it: accepts followers, forms the group, and keeps the connections going."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from asynchicache.config import CacheConfig
from asynchicache.controller.statistics import GroupStatistics
from asynchicache.controller.storage_pools import StoragePools
from asynchicache.controller.tasks import OneLoop, OwnedTasks
from asynchicache.errors import RankError, RankLostError, RankProtocolError, StorageError, UsageError
from asynchicache.parts import rank_parts
from asynchicache.pools.host import HostPool
from asynchicache.pools.shared import share
from asynchicache.pools.sizing import FreeMemory
from asynchicache.ranks.frames import FrameReader, FrameWriter
from asynchicache.ranks.group_work import GroupStorage, GroupTransfers
from asynchicache.ranks.handshake import Members, build_of
from asynchicache.ranks.host_sizes import need_of
from asynchicache.ranks.leader import RankLeader
from asynchicache.ranks.links import Address, Link, listen, receive, send
from asynchicache.ranks.messages import (
    EndAnswer,
    FreeSlots,
    Handshake,
    Hello,
    MemoryHandles,
    ProblemsAnswer,
    Ready,
    Refused,
    Welcome,
    pack_slots,
)
from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.sharing import HostShare, share_of, sharing_key
from asynchicache.specs import ModelSpec
from asynchicache.transfer.transfers import Transfers
from asynchicache.types import Tier

logger = logging.getLogger(__name__)

H = TypeVar("H", Ready, MemoryHandles)

MAX_MESSAGE = 16 << 20
"""The most bytes of an engine's message."""

_CLOSE_SECONDS = 1.0
"""How long a leader that closes waits for its followers to close."""

_MAX_HANDSHAKE = 1 << 20  # bytes of a handshake message, from a sender that is not known yet


class HandshakeLink:
    """A link during the handshake: one message at a time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._writer: FrameWriter[Handshake] = FrameWriter(0)
        self._reader: FrameReader[Handshake] = FrameReader(0, Handshake, max_frame=_MAX_HANDSHAKE)

    def send(self, message: Handshake) -> None:
        self._writer.add(message)
        self.link.send(self._writer.take())

    async def receive(self, seconds: float) -> Handshake:
        """
        Raises:
            RankError: no message came in time, or none that is understood.
        """
        try:
            async with asyncio.timeout(seconds):
                data = b""  # another message may have come along with the last one
                while True:
                    for message in self._reader.feed(data):
                        return message
                    data = await self.link.receive()
                    if not data:
                        raise RankLostError("the connection ended during the handshake")
        except TimeoutError as error:
            raise RankLostError(f"no answer for {seconds} s during the handshake") from error

    def rest(self) -> bytes:
        """Bytes that came behind the last message."""
        return self._reader.rest()


class RankGroup:
    """The ranks of a sharded model, as the leader sees them. Give it to `HybridCache.open(group=)`.

    One cache at a time uses it. When a rank is lost, every request is a miss from then on, as after a failed
    device; open a new group to go on.
    """

    def __init__(
        self,
        token: str,
        limits: RankLimits | None = None,
        *,
        ranks: int | None = None,
        share_host: bool = True,
    ) -> None:
        """
        Args:
            token: the group's secret, which every follower must know.
            ranks: how many ranks there are, the leader included. Default: the option `ranks` of the cache. To
                be given if its pools are those of one rank (`ModelSpec.shard`).
            share_host: keep replicated pools once in the memory of each host, not once a rank.
        """
        if not token:
            raise UsageError("a rank group needs a token that its ranks know and others do not")
        self.limits = RankLimits() if limits is None else limits
        self._token = token
        self._ranks = ranks
        self._share_host = share_host
        self._sharing: Mapping[int, list[int]] = {}
        self._share = HostShare()
        self._engine_layers = 0
        self._members: Members | None = None
        self._opened = asyncio.Event()
        self._changed = asyncio.Event()
        self._error: RankError | None = None
        self._links: dict[int, HandshakeLink] = {}
        self._leader: RankLeader | None = None
        self._tasks = OwnedTasks()
        self._loop = OneLoop("the group")
        self._listening: list[asyncio.Task[None]] = []
        self._broken = asyncio.Event()
        self._flushing = False

    @classmethod
    @asynccontextmanager
    async def listen(
        cls,
        address: str,
        token: str,
        limits: RankLimits | None = None,
        *,
        ranks: int | None = None,
        share_host: bool = True,
    ) -> AsyncIterator[RankGroup]:
        """Accept followers at an address for the duration of an `async with`.

        Args:
            address: `unix:PATH`, or `HOST:PORT`. The bytes are not encrypted: use a network that you trust.
            token: the group's secret.
            ranks, share_host: as for the class.

        Raises:
            ConfigError: the address is in use, or cannot be used.
        """
        group = cls(token, limits, ranks=ranks, share_host=share_host)
        server = await listen(Address.parse(address), group.admit)
        try:
            yield group
        finally:
            server.close()
            await group.aclose()

    # Forming

    async def admit(self, link: Link) -> None:
        """Take a connection: a follower that joins, or one to refuse."""
        hand = HandshakeLink(link)
        try:
            hello = await hand.receive(self.limits.joining)
            async with asyncio.timeout(self.limits.joining):
                await self._opened.wait()
            self._join(hand, hello)
        except (RankError, TimeoutError) as error:
            logger.warning("a connection to the rank group is refused: %s", error)
            try:
                hand.send(Refused(str(error) or "the group did not open in time"))
            except RankLostError:
                logger.debug("it has ended already")
            await link.aclose()

    def _join(self, hand: HandshakeLink, hello: Handshake) -> None:
        if not isinstance(hello, Hello):
            raise RankProtocolError(f"the first message is a {type(hello).__name__}, not a Hello")
        if self._members is None or not self._members.admits(hello):
            raise RankError("the token is wrong")
        if self._leader is not None:
            raise RankError(f"rank {hello.rank} is late: the group is complete")
        try:
            self._members.join(hello)
        except RankError as error:
            self._error = error
            self._changed.set()
            raise
        self._links[hello.rank] = hand
        self._changed.set()

    async def agree(
        self,
        spec: ModelSpec,
        config: CacheConfig,
        slots: Mapping[str, tuple[int, int]],
        memory: FreeMemory,
        now: Callable[[], float],
        pages: Mapping[str, int] | None = None,
    ) -> dict[str, tuple[int, int]]:
        """Wait for every follower; returns the slots that all ranks have memory for.

        Args:
            spec, config: of the leader.
            slots: its (device, host) slots, by pool.
            now: a monotonic clock, in seconds.
            pages: by pool, the device pages of its engine, if an engine owns the device memory.

        Raises:
            RankError: a rank does not fit the group, or is missing; names it.
            UsageError: the group has a cache already, or this is not rank 0.
        """
        if self._members is not None:
            raise UsageError("this rank group has a cache already; a new cache needs a new group")
        ranks = config.ranks if self._ranks is None else self._ranks
        if config.rank or ranks < 2:
            raise UsageError(f"a rank group is led by rank 0 of 2 or more, not by {config.rank} of {ranks}")
        if spec.place.count not in (1, ranks):
            raise UsageError(
                f"the model is divided over {spec.place.count} ranks ({spec.place}); this group has {ranks}"
            )
        engine = pages is not None
        self._engine_layers = spec.layers if engine else 0
        if pages is not None:
            slots = {name: (pages[name], host) for name, (_, host) in slots.items()}
        members = self._members = Members(
            self._token,
            build_of(spec, config, engine=engine),
            slots,
            ranks,
            need_of(spec, config, memory, engine=engine),
            rank_parts(spec, config),
            engine=engine,
        )
        self._opened.set()
        try:
            await self._all_joined(members)
            if self._share_host:
                self._sharing = members.sharing(sharing_key(spec, config.host_layout))
            agreed = members.agreed(self._sharing)
        except RankError as error:
            await self._refuse_all(error)
            raise
        incarnation = secrets.randbits(32)
        self._leader = RankLeader(sorted(self._links), incarnation, now)
        self._share = share_of(spec, 0, self._sharing.get(0, []))
        for rank, hand in self._links.items():
            hand.send(Welcome(incarnation, agreed, self.limits.heartbeat, self._sharing.get(rank, [])))
        return agreed

    async def _all_joined(self, members: Members) -> None:
        """
        Raises:
            RankError: a rank does not fit the group, or is missing; names it.
        """
        try:
            async with asyncio.timeout(self.limits.joining):
                while members.missing and self._error is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._error = RankError(
                f"ranks {list(members.missing)} did not join within {self.limits.joining} s"
            )
        if self._error is not None:
            raise self._error

    @property
    def shared_pools(self) -> frozenset[str]:
        """Pools of this rank whose host memory others map; once all have joined."""
        return self._share.pools

    async def share(self, hosts: Mapping[str, HostPool]) -> None:
        """Tell other ranks where the host memory is that they share, of each rank that has some.

        Raises:
            RankError: a rank that others share with could not allocate it, or was too slow.
        """
        if self._share.pools:
            own = MemoryHandles(share({name: hosts[name] for name in self._share.pools}))
            self._pass_on(0, own)
        for rank in sorted({ranks[0] for ranks in self._sharing.values() if ranks} - {0}):
            self._pass_on(rank, await self._receive(rank, MemoryHandles))

    def _pass_on(self, owner: int, memory: MemoryHandles) -> None:
        for rank in self._sharing[owner]:
            if rank != owner:
                self._links[rank].send(memory)

    async def _receive(self, rank: int, expected: type[H]) -> H:
        """
        Raises:
            RankError: the rank sends something else, is too slow, or could not open.
        """
        try:
            message = await self._links[rank].receive(self.limits.joining)
        except RankError as error:
            raise RankError(f"rank {rank}: {error}") from error
        if isinstance(message, Ready) and message.error:
            raise RankError(f"rank {rank} could not open: {message.error}")
        if not isinstance(message, expected):
            raise RankError(f"rank {rank} could not open: it sent a {type(message).__name__}")
        return message

    async def _refuse_all(self, error: RankError) -> None:
        for hand in self._links.values():
            try:
                hand.send(Refused(str(error)))
            except RankLostError:
                logger.debug("a rank left before the group formed")
            await hand.link.aclose()
        self._links.clear()

    # What the cache uses instead of its own

    @property
    def leader(self) -> RankLeader:
        """
        Raises:
            UsageError: the group has not formed: no cache was opened with it.
        """
        if self._leader is None:
            raise UsageError("the rank group has not formed: open a cache with it first")
        return self._leader

    def copies(self, here: Transfers) -> GroupTransfers:
        return GroupTransfers(
            self.leader,
            here,
            self._share,
            seconds=self.limits.copy_seconds,
            engine_layers=self._engine_layers,
        )

    def storage(self, sharing: Callable[[int], Iterable[str]]) -> StoragePools:
        return GroupStorage(sharing, self.leader, self._share, seconds=self.limits.storage_seconds)

    async def start(self, on_failure: Callable[[BaseException], object]) -> None:
        """Wait until every follower has its memory, and begin.

        Raises:
            RankError: a follower could not allocate its memory or open its storage, or was too slow.
        """
        leader = self.leader
        for rank in sorted(self._links):
            await self._receive(rank, Ready)
        leader.on_failure = partial(self._failed, on_failure)
        leader.wake = self._wake
        await self._tasks.ready()
        for rank, hand in self._links.items():
            leader.feed(rank, hand.rest())
            self._listening.append(self._tasks.spawn(self._listen_to(rank, hand.link)))
        self._tasks.spawn(self._beat())

    async def update_weights(self, version: str) -> None:
        """Go on under other weights on every follower; `HybridCache.update_weights` calls it.

        Raises:
            StorageError: followers could not open their storage again; they go on without. Names them.
        """
        answers = await self.leader.begin_epoch(version, self.limits.storage_seconds)
        failed = [
            f"rank {rank}: {answer.error}"
            for rank, (answer, _) in sorted(answers.items())
            if isinstance(answer, EndAnswer) and answer.error
        ]
        if failed:
            raise StorageError("storage could not be opened again: " + "; ".join(failed))

    async def verify(self, free: Mapping[tuple[str, Tier], Sequence[int]], *, idle: bool) -> list[str]:
        """What other ranks do that contradicts this rank's view; `HybridCache.verify_ranks` calls it.

        Args:
            free: by pool and tier, the slots that are free here, as of now.
            idle: the cache is not in use, so report everything that runs too.
        """
        view = [FreeSlots(pool, tier, pack_slots(slots)) for (pool, tier), slots in free.items()]
        answers = await self.leader.verify(view, self.limits.copy_seconds, idle=idle)
        if not answers:
            return [f"other ranks cannot be asked: {self.leader.failure}"]
        found = []
        for rank, (answer, _) in sorted(answers.items()):
            wrong = [f"it answered {answer!r:.80}"]
            problems = answer.problems if isinstance(answer, ProblemsAnswer) else wrong
            found += [f"rank {rank}: {problem}" for problem in problems]
        return found

    # Running

    def mark(self, message: bytes | None = None) -> int:
        """End the copies of a step: what the next forward depends on has been asked for.

        Args:
            message: what the engines of the other ranks need for the forward; `RankWorker.steps` yields it
                there. Default: the engine sends its own messages, with the step's number.

        Returns:
            the step's number, which the other ranks give to `RankWorker.forward`.

        Raises:
            UsageError: the message is not bytes, or longer than `MAX_MESSAGE`.
        """
        self._loop.check()
        if message is None:
            return self.leader.mark()
        if not isinstance(message, bytes | bytearray | memoryview):
            raise UsageError(f"a message must be bytes, not {type(message).__name__}")
        if len(message) > MAX_MESSAGE:
            raise UsageError(f"a message of {len(message)} bytes is longer than {MAX_MESSAGE}")
        step = self.leader.mark(bytes(message))
        self._flush()  # now: other ranks would wait for this one's thread to release the interpreter
        return step

    @property
    def failure(self) -> RankError | None:
        """Why the group goes on cold; None while it is whole."""
        return None if self._leader is None else self._leader.failure

    def statistics(self) -> GroupStatistics:
        """Counters since the group formed; `CacheStatistics.group` has them too."""
        return GroupStatistics() if self._leader is None else self._leader.statistics()

    def lag_seconds(self) -> dict[int, float]:
        """By rank, the longest time to an answer since the last call, in seconds."""
        return self.leader.lag_seconds()

    def _wake(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        data = self.leader.take()
        for rank, hand in self._links.items():
            try:
                if data:
                    send(hand.link, data)
            except RankLostError as error:
                self.leader.lost(rank, str(error))

    async def _listen_to(self, rank: int, link: Link) -> None:
        try:
            while data := await receive(link):
                self.leader.feed(rank, data)
        except RankLostError as error:
            self.leader.lost(rank, str(error))
        else:
            self.leader.lost(rank, "its connection ended")

    async def _beat(self) -> None:
        while self.leader.failure is None:
            await asyncio.sleep(self.limits.heartbeat)
            self.leader.heartbeat()
            self.leader.check(self.limits.silence)

    async def failed(self) -> None:
        """Wait until the group goes on cold; once it has formed."""
        self._loop.check()
        await self._broken.wait()

    def _failed(self, on_failure: Callable[[BaseException], object], error: RankError) -> None:
        self._broken.set()
        logger.error("the rank group goes on cold: %s", error)
        on_failure(error)

    async def aclose(self) -> None:
        """Tell the followers, and close the connections."""
        self._loop.check()
        try:
            await self._tell_the_end()
        finally:
            await self._tasks.aclose()
            for hand in self._links.values():
                await hand.link.aclose()

    async def _tell_the_end(self) -> None:
        if self._leader is None:
            return
        whole = self._leader.failure is None
        self._leader.close()
        self._flush()
        if whole and self._listening:
            # Followers close first: a connection that ends here may end before they have read why.
            await asyncio.wait(self._listening, timeout=_CLOSE_SECONDS)
