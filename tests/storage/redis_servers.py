"""A real Redis server, and the engine over it, as tests open them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

from msgspec import structs

from asynchicache.backends.redis import RedisBackend, open_backend
from asynchicache.backends.redis.engine import RedisEngine
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from engines import Server, executable, free_port, module

PAGE_BYTES = 5000
FRAME_BYTES = 4096 + PAGE_BYTES


class RedisServer(Server):
    """A server in a folder of its own that keeps nothing on disk.

    Args:
        folder: where its socket lies.
        arguments: more of its options, e.g. `--requirepass secret`.
        program: `redis-server`, or `valkey-server`, which takes the same options.
    """

    def __init__(self, folder: Path, *arguments: str, program: str = "redis-server") -> None:
        self.port = free_port()
        self.socket = folder / "redis.sock"
        command = [executable(program), "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        command += [
            "--repl-diskless-sync-delay",
            "0",
            "--appendonly",
            "no",
            "--dir",
            str(folder),
            "--unixsocket",
            str(self.socket),
        ]
        super().__init__([*command, *arguments], ready="Ready to accept connections")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@asynccontextmanager
async def backend_at(url: str, **options: object) -> AsyncIterator[RedisBackend]:
    """The redis backend of a server; closed in the end. Calls may take a minute, unless told otherwise."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2, seed=0)
        stack.push_async_callback(port.aclose)
        backend = open_backend({"url": url, "timeout_seconds": 60, **options}, port)
        stack.push_async_callback(backend.aclose)
        yield backend


async def open_bench(
    backend: RedisBackend,
    pool: str = "kv",
    *,
    page_bytes: int = PAGE_BYTES,
    slots: int = 64,
    weights: str = "w1",
) -> PoolUnderTest:
    """One pool of the backend, and slots."""
    binding = SlotBinding(slab_of(pool, page_bytes, slots), fingerprint_of(weights))
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(
    url: str, *, page_bytes: int = PAGE_BYTES, slots: int = 64, **options: object
) -> AsyncIterator[PoolUnderTest]:
    """One pool of the redis backend of a server; closed in the end."""
    async with backend_at(url, **options) as backend:
        yield await open_bench(backend, page_bytes=page_bytes, slots=slots)


@contextmanager
def impatient(bench: PoolUnderTest, seconds: float) -> Iterator[None]:
    """Give the engine's calls this deadline within the block only: what comes before and after it may take
    as long as the machine needs."""
    engine = bench.engine
    assert isinstance(engine, RedisEngine)
    before = engine._options
    engine._options = structs.replace(before, timeout_seconds=seconds)
    try:
        yield
    finally:
        engine._options = before


class RedisCluster:
    """Masters that share the hash slots, and a replica of each; keeps nothing on disk.

    Args:
        folder: of all of them.
        programs: of a master and of its replica, for each share of the slots.
    """

    def __init__(self, folder: Path, programs: Sequence[tuple[str, str]], *, timeout_ms: int = 1000) -> None:
        self._folder = folder
        self._arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(timeout_ms)]
        self.masters = [self._node(f"m{number}", master) for number, (master, _) in enumerate(programs)]
        self.replicas = [self._node(f"r{number}", replica) for number, (_, replica) in enumerate(programs)]
        self.nodes = [*self.masters, *self.replicas]

    def _node(self, name: str, program: str) -> RedisServer:
        (self._folder / name).mkdir()
        bus = ["--cluster-port", str(free_port())]
        return RedisServer(self._folder / name, *self._arguments, *bus, program=program)

    @property
    def url(self) -> str:
        """Of one master."""
        return self.masters[0].url

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._form()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _form(self) -> None:
        clients = [redis_at(node) for node in self.nodes]
        count = len(self.masters)
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bus = self.nodes[0].command[self.nodes[0].command.index("--cluster-port") + 1]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, bus)
        for number, client in enumerate(clients[:count]):
            ends = [16384 * number // count, 16384 * (number + 1) // count - 1]
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *ends)
        ids = {client.execute_command("CLUSTER", "MYID").decode() for client in clients}
        until(
            lambda: all(
                {node["node_id"] for node in client.cluster("NODES").values()} == ids for client in clients
            )
        )
        for number, client in enumerate(clients[count:]):
            client.execute_command("CLUSTER", "REPLICATE", clients[number].execute_command("CLUSTER", "MYID"))
        until(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients))
        until(lambda: all(client.info("replication")["role"] != "master" for client in clients[count:]))
        until(
            lambda: all(
                client.info("replication")["master_link_status"] == "up" for client in clients[count:]
            )
        )
        for client in clients:
            client.close()


class Sentinels(Server):
    """One Sentinel that decides alone."""

    def __init__(self, folder: Path, master: RedisServer, name: str = "pages", *words: str) -> None:
        self.port = free_port()
        (folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 2000\n"
            + "".join(f"{word}\n" for word in words)
        )
        command = [executable("redis-server"), str(folder / "sentinel.conf"), "--sentinel"]
        super().__init__(command, ready=r"\+monitor master")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def redis_at(server: RedisServer | Sentinels) -> Any:
    return module("redis").Redis(port=server.port)


def until(condition: Callable[[], object]) -> None:
    """Wait for what servers do among themselves."""
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit, "this never comes"
        time.sleep(0.02)
