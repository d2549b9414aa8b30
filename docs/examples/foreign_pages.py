"""Pages of an engine that has no event loop: its own memory, its own keys, our storage."""

import mmap
import tempfile

from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.page_memory import PageMemory
from asynchicache.integrations.page_store import PageIdentity, PageStore, PageStoreConfig

PAGES, PAGE_BYTES = 8, 8192

memory_of_the_engine = mmap.mmap(-1, PAGES * PAGE_BYTES)
view = memoryview(memory_of_the_engine).cast("B", (PAGES, PAGE_BYTES))
identity = PageIdentity(engine="mine", model="toy", weight_version="1", dtype="bfloat16", layout="page_first")

with tempfile.TemporaryDirectory() as folder:
    config = PageStoreConfig(storage="file", storage_options={"path": folder})
    bridge = LoopBridge(max_bytes=1 << 30)
    memory = PageMemory.of_view(view)
    store = bridge.call(PageStore.open(config))
    pool = bridge.call(store.open_pool("kv", memory, identity))

    memory_of_the_engine[: 2 * PAGE_BYTES] = b"a" * PAGE_BYTES + b"b" * PAGE_BYTES
    writing = pool.put(["page 0", "page 1"], [0, 1])
    bridge.submit(writing, nbytes=2 * memory.page_bytes, tag="my request")
    bridge.drain()
    for job in bridge.finished():
        print(job.tag, [outcome.value for outcome in job.result()])

    print(bridge.call(pool.exists(["page 0", "page 2"])))
    print([outcome.value for outcome in bridge.call(pool.get(["page 1"], [7]))])
    print(memory_of_the_engine[7 * PAGE_BYTES : 7 * PAGE_BYTES + 4], "staged:", pool.staged)

    bridge.call(store.aclose())
    bridge.close()
