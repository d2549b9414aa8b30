"""Host memory that several processes map: found by handle, gone with its last process, else refused."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

import forking
from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.pools.host import HostPool, SteppedMemory
from asynchicache.pools.shared import HostHandle, SharedSlab, SlabHandle, attach, attach_pools, share
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(4)

_WRITER = """
import sys, msgspec
from asynchicache.pools.shared import SlabHandle, attach
slab = attach(msgspec.json.decode(sys.argv[1], type=SlabHandle))
assert bytes(slab.memory[:5]) == b"hello", bytes(slab.memory[:5])
slab.memory[5:10] = b"world"
"""

_OWNER = """
import sys, msgspec
from asynchicache.pools.shared import SharedSlab
slab = SharedSlab(1 << 20)
slab.memory[:5] = b"owner"
print(msgspec.json.encode(slab.handle).decode(), flush=True)
sys.stdin.read()
"""


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "asynchicache" in path.name}


def test_another_process_reads_and_writes_the_same_bytes() -> None:
    slab = SharedSlab(1 << 16)
    slab.memory[:5] = b"hello"
    handle = msgspec.json.encode(slab.handle).decode()
    assert forking.run(["-c", _WRITER, handle]).returncode == 0
    assert bytes(slab.memory[:10]) == b"helloworld"
    slab.close()


def test_a_killed_owner_leaves_nothing_and_its_bytes_stay_mapped() -> None:
    before = shared_files()
    ours, theirs = socket.socketpair()
    told = forking.start(["-c", _OWNER], (theirs.fileno(), theirs.fileno(), 2))
    theirs.close()
    with ours, told, ours.makefile() as printed, told.makefile() as heard:
        owner = int(heard.readline())
        handle = msgspec.json.decode(printed.readline(), type=SlabHandle)
        slab = attach(handle)
        os.kill(owner, signal.SIGKILL)
        assert int(heard.readline()) == -signal.SIGKILL
    assert bytes(slab.memory[:5]) == b"owner"
    assert shared_files() == before
    with pytest.raises(ConfigError, match=f"process {handle.pid} cannot be opened .* same pid namespace"):
        attach(handle)


def test_what_another_file_has_become_is_refused() -> None:
    first = SharedSlab(8192)
    handle = first.handle
    first.close()
    files = [SharedSlab(8192) for _ in range(3)]  # one of them gets the number of the closed one
    with pytest.raises(ConfigError, match="another process has its number"):
        attach(handle)
    for file in files:
        file.close()


def test_nobody_can_cut_it_off() -> None:
    slab = SharedSlab(8192)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{slab.handle.fd}", 0)
    slab.close()
    slab.close()


def test_no_room_is_said() -> None:
    with pytest.raises(CapacityError, match="no room for"):
        SharedSlab(1 << 62)
    with pytest.raises(ConfigError, match="1 at least"):
        SharedSlab(0)


def shared_pools(layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT) -> dict[str, HostPool]:
    pools = {}
    for pool in SPEC.pools:
        nbytes = HostPool(pool, 4, 3, pin=False, layout=layout).memory.nbytes
        pools[pool.name] = HostPool(pool, 4, 3, pin=False, layout=layout, memory=SharedSlab(nbytes))
    return pools


@pytest.mark.parametrize("layout", list(HostLayout))
def test_attached_pools_have_the_same_slots(layout: HostLayout) -> None:
    ours = shared_pools(layout)
    handle = msgspec.json.decode(msgspec.json.encode(share(ours)), type=HostHandle)
    with ExitStack() as kept:
        theirs, shared = attach_pools(SPEC, handle, None, kept)
        assert shared is None
        for name, items in (("kv", "keys"), ("mamba", "recurrent")):
            ours[name].items(items)[:, 2] = 7
            assert (theirs[name].items(items)[:, 2] == 7).all()
            assert (theirs[name].slots, theirs[name].layout) == (ours[name].slots, ours[name].layout)
            ours[name].close()


def test_pools_that_share_a_memory_share_it_where_it_is_attached() -> None:
    memory = SteppedMemory(SharedSlab(8 * 4096), 4096)
    ours = {pool.name: HostPool(pool, 4, 8, pin=False, memory=memory) for pool in SPEC.pools}
    handle = msgspec.json.decode(msgspec.json.encode(share(ours, 4096)), type=HostHandle)
    with ExitStack() as kept:
        theirs, shared = attach_pools(SPEC, handle, None, kept)
        assert shared is not None
        assert theirs["kv"].memory is theirs["mamba"].memory is shared.slab
        ours["mamba"].items("recurrent")[:, 5] = 9
        assert bytes(theirs["kv"].page(5)) == bytes(ours["mamba"].page(5))
        ours["kv"].move([5], [1])
        assert (theirs["mamba"].items("recurrent")[:, 1] == 9).all()
        ours["kv"].close()  # the others still have the memory
        assert ours["mamba"].page(5)[0] == 9
    memory.close()


def test_pools_of_another_model_are_refused(tmp_path: Path) -> None:
    ours = shared_pools()
    handle = share(ours)
    with ExitStack() as kept:
        with pytest.raises(ConfigError, match="the same model and page size"):
            attach_pools(synthetic_spec(8), handle, None, kept)
        with pytest.raises(ConfigError, match="has pools \\['kv'\\], not 'mamba'"):
            attach_pools(SPEC, share({"kv": ours["kv"]}), None, kept)
    with pytest.raises(ConfigError, match="is not shared"):
        share({"kv": HostPool(SPEC.pool("kv"), 4, 3, pin=False)})
    with pytest.raises(ConfigError, match="3 slots take 12288"):
        HostPool(SPEC.pool("kv"), 4, 3, pin=False, memory=SharedSlab(4096))
    memory = SteppedMemory(SharedSlab(4096), 4096)
    with pytest.raises(ConfigError, match="3 slots in layout 'page_first' do not fit into shared memory"):
        HostPool(SPEC.pool("kv"), 4, 3, pin=False, layout=HostLayout.PAGE_FIRST, memory=memory)
    for pool in ours.values():
        pool.close()
