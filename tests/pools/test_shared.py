"""Host memory that several processes map: found by handle, gone with its last process, else refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.pools.host import HostPool
from asynchicache.pools.shared import HostHandle, SharedSlab, SlabHandle, attach, attach_pool, share
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
    subprocess.run([sys.executable, "-c", _WRITER, handle], check=True)
    assert bytes(slab.memory[:10]) == b"helloworld"
    slab.close()


def test_a_killed_owner_leaves_nothing_and_its_bytes_stay_mapped() -> None:
    before = shared_files()
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    with owner.stdout, owner.stdin:
        handle = msgspec.json.decode(owner.stdout.readline(), type=SlabHandle)
        slab = attach(handle)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
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


def shared_pool(layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT) -> HostPool:
    pool = SPEC.pool("kv")
    nbytes = HostPool(pool, 4, 3, pin=False, layout=layout).memory.nbytes
    return HostPool(pool, 4, 3, pin=False, layout=layout, memory=SharedSlab(nbytes))


@pytest.mark.parametrize("layout", list(HostLayout))
def test_an_attached_pool_has_the_same_slots(layout: HostLayout) -> None:
    ours = shared_pool(layout)
    handle = msgspec.json.decode(msgspec.json.encode(share({"kv": ours})), type=HostHandle)
    theirs = attach_pool(SPEC, "kv", handle, None)
    ours.items("keys")[:, 2] = 7
    assert (theirs.items("keys")[:, 2] == 7).all()
    assert (theirs.slots, theirs.layout) == (ours.slots, ours.layout)
    theirs.close()
    ours.close()


def test_a_pool_of_another_model_is_refused(tmp_path: Path) -> None:
    ours = shared_pool()
    handle = share({"kv": ours})
    with pytest.raises(ConfigError, match="the same model and page size"):
        attach_pool(synthetic_spec(8), "kv", handle, None)
    with pytest.raises(ConfigError, match="has pools \\['kv'\\], not 'mamba'"):
        attach_pool(SPEC, "mamba", handle, None)
    with pytest.raises(ConfigError, match="is not shared"):
        share({"kv": HostPool(SPEC.pool("kv"), 4, 3, pin=False)})
    with pytest.raises(ConfigError, match="3 slots take 12288"):
        HostPool(SPEC.pool("kv"), 4, 3, pin=False, memory=SharedSlab(4096))
    ours.close()
