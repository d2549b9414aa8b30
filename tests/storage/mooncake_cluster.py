"""A Mooncake cluster for tests: a master and nodes that lend memory, real, in a network of their own.

Mooncake's clients listen on every address of the machine, whatever they are told; where this process may,
the cluster and the client live in a network namespace that only they see.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake.store import MooncakeStore
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from engines import Server, executable, free_ports, module

NODE = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup({
    "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "rdma_devices": "",
    "global_segment_size": sys.argv[2], "local_buffer_size": "0", "master_server_addr": sys.argv[1],
})
assert code == 0, code
print("the node lends its memory", flush=True)
threading.Event().wait()
"""

SEGMENT_BYTES = 64 << 20
PAGE_BYTES = 5000

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACE = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


class Cluster:
    """A master and one node; either may be killed and started again.

    Attributes:
        address: the master's.
        master, node: their processes.
    """

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES, master_flags: tuple[str, ...] = ()) -> None:
        rpc, self.admin_port = free_ports(2)
        self.address = f"127.0.0.1:{rpc}"
        command = master_command(rpc, self.admin_port, *master_flags)
        self.master = Server(command, ready="Master service started", port=rpc)
        self.node = self.another_node(segment_bytes)

    def another_node(self, segment_bytes: int = SEGMENT_BYTES) -> Server:
        """A node that is not started yet."""
        command = [sys.executable, "-c", NODE, self.address, str(segment_bytes)]
        return Server(command, ready="lends its memory")

    def options(self, **more: object) -> dict[str, object]:
        """What `open_backend` needs to join."""
        return {"master": self.address, "local_hostname": "127.0.0.1", "open_seconds": 120, **more}


class Fleet(Cluster):
    """An etcd, a leading master, one that stands by, and two nodes; any may be killed.

    Attributes:
        etcd: its process.
        standby: that of the other master.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        client, peer, *ports = _etcd_port(), *free_ports(5)
        self.address = f"etcd://127.0.0.1:{client}"
        clients = f"http://127.0.0.1:{client}"
        command = [executable("etcd"), "--data-dir", folder, "--listen-client-urls", clients]
        command += ["--advertise-client-urls", clients, "--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        self.etcd = Server(command, ready="ready to serve client requests")
        flags = ("--enable_ha=true", f"--etcd_endpoints=127.0.0.1:{client}", *flags)
        self.master = Server(master_command(*ports[:2], *flags), ready="state -> serving")
        self.standby = Server(master_command(*ports[2:], *flags), ready="state -> standby")
        self.admin_port = ports[1]
        self.node = self.another_node()


@cache
def _etcd_port() -> int:
    """Mooncake's client speaks to one etcd in the life of a process, even after it has left."""
    return free_ports(1)[0]


def master_command(rpc: int, admin: int, *flags: str) -> list[str | Path]:
    """Start a master that listens on these ports."""
    addresses = [f"--rpc_port={rpc}", f"--metrics_port={admin}"]
    addresses += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    return [
        Path(module("mooncake.store").__file__).parent / "mooncake_master",
        *addresses,
        "--logtostderr=true",
        *flags,
    ]


@contextmanager
def fleet(folder: Path, *flags: str) -> Iterator[Fleet]:
    """A cluster that fails over, and serves."""
    made = Fleet(folder, *flags)
    with made.etcd, made.master, made.standby, made.node, made.another_node():
        yield made


@contextmanager
def cluster(*, nodes: bool = True, **options: object) -> Iterator[Cluster]:
    """A cluster that serves, with or without a node."""
    made = Cluster(**options)
    with made.master:
        if nodes:
            made.node.start()
        try:
            yield made
        finally:
            made.node.kill()


@contextmanager
def own_network() -> Iterator[None]:
    """A network with a loopback device only, for this thread and the threads and processes that it
    starts; the machine's own network where this process may have no other.
    """
    namespace = _own_namespace()
    if namespace is None:
        yield
        return
    before = os.open(_NAMESPACE, os.O_RDONLY)
    _enter(namespace)
    try:
        yield
    finally:
        _enter(before)
        os.close(before)


@cache
def _own_namespace() -> int | None:
    """One for the whole process: Mooncake keeps threads, which stay in the network of their first use."""
    before = os.open(_NAMESPACE, os.O_RDONLY)
    try:
        if _LIBC.unshare(_CLONE_NEWNET) != 0:
            return None
        _loopback_up()
        made = os.open(_NAMESPACE, os.O_RDONLY)
        _enter(before)
        return made
    finally:
        os.close(before)


def _enter(namespace: int) -> None:
    assert _LIBC.setns(namespace, _CLONE_NEWNET) == 0


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


with own_network(), suppress(ImportError):
    import_module("mooncake.store")  # the threads of its etcd client stay where it was imported first


class Watched:
    """A store that notes every call's beginning and end, and goes on.

    Attributes:
        log: `("batch_put_from_multi_buffers", "begins")` and the like, in order.
        arguments: of each call, by the method's name.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self.log: list[tuple[str, str]] = []
        self.arguments: dict[str, list[tuple[object, ...]]] = {}
        self.begun = threading.Condition()
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self._store, name)

        def watched(*arguments: object) -> object:
            with self.begun:
                self.log.append((name, "begins"))
                self.arguments.setdefault(name, []).append(arguments)
                self.begun.notify_all()
            result = call(*arguments)
            self.log.append((name, "ends"))
            return result

        return watched

    def count(self, name: str) -> int:
        """How often the method was called."""
        return len(self.arguments.get(name, ()))

    def wait_for(self, name: str, calls: int = 1) -> None:
        """Block until the method was called so often."""
        with self.begun:
            assert self.begun.wait_for(lambda: self.count(name) >= calls, timeout=60)


@asynccontextmanager
async def backend_of(
    made: Cluster, store: MooncakeStore | None = None, **more: object
) -> AsyncIterator[MooncakeBackend]:
    """The backend on a cluster; closed in the end."""
    backend = MooncakeBackend(MooncakeOptions.of(made.options(**more)), store)
    try:
        yield backend
    finally:
        await backend.aclose()


def binding_of(pool: str = "kv", *, page_bytes: int = PAGE_BYTES, slots: int = 32) -> SlotBinding:
    """Slots of a pool in memory of their own."""
    return SlotBinding(slab_of(pool, page_bytes, slots), fingerprint_of("w1"))


async def open_bench(backend: MooncakeBackend, binding: SlotBinding | None = None) -> PoolUnderTest:
    """One pool of the backend."""
    binding = binding or binding_of()
    return PoolUnderTest(await backend.open_pool(binding), binding)
