"""A server that lies, in every way that RESP allows and some that it does not: never other bytes, never a
hang, and the next call, once the server is honest, is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from storage.hostile_redis import MARKER, HostileServer, bulk, hostile_server
from storage.redis_servers import FRAME_BYTES, backend_at, bench_at, impatient, open_bench

STORED, HIT, MISS = Outcome.STORED, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED, REJECTED = Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED
FEW, MANY = 2, 20
"""Pages of a put that are sent at once, and of one that asks first which are there."""


@asynccontextmanager
async def scene(**options: object) -> AsyncIterator[tuple[HostileServer, PoolUnderTest]]:
    """A server that is honest so far and holds pages 0 to 3, and one pool over it, on one connection."""
    async with hostile_server() as server, bench_at(server.url, **options) as bench:
        assert await bench.put(bench.keys(*range(4)), range(4)) == [STORED] * 4
        server.connections = 1
        yield server, bench


async def recovers(server: HostileServer, bench: PoolUnderTest) -> None:
    """Once the server tells the truth again, so does the engine."""
    server.lies.clear()
    keys = bench.keys(*range(4))
    await bench.engine.put(keys, range(4))
    bench.fill(keys, range(4))
    assert set(await bench.put(keys, range(4))) <= {STORED, Outcome.EXISTS}
    assert await bench.get(keys, range(8, 12)) == [HIT] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"$-1\r\n", MISS),
        (b"$0\r\n\r\n", CORRUPT),
        (b"$5\r\nhello\r\n", CORRUPT),
        (bulk(b"x" * (FRAME_BYTES - 1)), CORRUPT),
        (bulk(b"x" * FRAME_BYTES), CORRUPT),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", CORRUPT),
        (b"-LOADING Redis is loading the dataset in memory\r\n", FAILED),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", FAILED),
        (b"-NOPERM no permissions\r\n", FAILED),
        (b"-\r\n", FAILED),
        (b"-\xff\xfe\r\n", FAILED),
    ],
)
async def test_answers_that_leave_the_connection_in_step(answer: bytes, outcome: Outcome) -> None:
    async with scene(connections=1) as (server, bench):
        server.say(b"GET", answer)

        assert await bench.get(bench.keys(0, 1, 2), [5, 6, 7]) == [outcome] * 3

        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*-1\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+5\r\nhello\r\n",
        b"$ 5\r\nhello\r\n",
        b"$1_0\r\n",
        b"$99999999999999999999999\r\n",
        b"$abc\r\n",
        b"\r\n",
        b"\0\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"_\r\n",  # RESP3
        b"$%d\r\n" % FRAME_BYTES + b"x" * (FRAME_BYTES + 2),  # no end
        b"x" * 10_000,  # a line without end
    ],
)
async def test_what_is_no_answer_to_get_fails_the_rest_and_the_connection(answer: bytes) -> None:
    async with scene(connections=1) as (server, bench):
        server.say(b"GET", answer)

        outcomes = await bench.get(bench.keys(0, 1, 2), [5, 6, 7])

        assert set(outcomes) == {FAILED}
        await recovers(server, bench)
        assert server.connections == 2


@pytest.mark.asyncio
async def test_a_value_that_is_too_long_is_dropped_and_not_read() -> None:
    async with scene(connections=1) as (server, bench):
        server.say(b"GET", b"$1000000000000\r\nabc")

        assert await bench.get(bench.keys(0, 1), [5, 6]) == [CORRUPT, FAILED]

        assert bench.keys(0)[0] not in server.values
        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", [0, 3, 100, 4096 + 2000, FRAME_BYTES, FRAME_BYTES + 8])
async def test_a_server_that_goes_in_the_middle_of_a_value(sent: int) -> None:
    async with scene(connections=1) as (server, bench):
        (first, *_) = [key for key in server.values if key.endswith(bench.keys(0)[0].digest.hex().encode())]
        server.say(b"GET", bulk(server.values[first])[:sent], close=True)

        assert await bench.get(bench.keys(0, 1), [5, 6]) == [FAILED] * 2

        await recovers(server, bench)


@pytest.mark.asyncio
async def test_pages_before_the_fault_count() -> None:
    async with scene(connections=1) as (server, bench):
        truth = bulk(server.values[next(key for key in server.values if b"kv" in key)])
        answers = [truth, b"garbage\r\n"]

        async def lie(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(answers.pop(0) if answers else b"")

        server.lies[b"GET"] = lie

        assert await bench.get(bench.keys(0, 1, 2), [5, 6, 7]) == [HIT, FAILED, FAILED]


@pytest.mark.asyncio
async def test_answers_in_the_wrong_order_are_corrupt_and_end_the_connection() -> None:
    async with scene(connections=1) as (server, bench):
        held = [server.values[key] for key in server.values]

        async def lie(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(bulk(held.pop()))

        server.lies[b"GET"] = lie

        assert await bench.get(bench.keys(*range(4)), range(5, 9)) == [CORRUPT] * 4

        await recovers(server, bench)
        assert server.connections >= 2


@pytest.mark.asyncio
async def test_an_answer_too_many_is_not_taken_for_the_next_call() -> None:
    async with scene(connections=1) as (server, bench):
        values = list(server.values.values())

        async def twice(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(bulk(values[0]) * 2)

        server.lies[b"GET"] = twice
        assert await bench.get(bench.keys(0), [5]) == [HIT]
        server.lies.clear()

        assert await bench.get(bench.keys(1), [6]) == [HIT]
        assert server.connections == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", REJECTED),
        (b"-READONLY You can't write against a read only replica.\r\n", REJECTED),
        (b"-MISCONF Redis is configured to save RDB snapshots\r\n", REJECTED),
        (b"-LOADING Redis is loading the dataset in memory\r\n", FAILED),
        (b"-ERR unknown\r\n", FAILED),
        (b"$-1\r\n", Outcome.EXISTS),
        (b":1\r\n", FAILED),
        (b"+NOT OK\r\n", FAILED),
        (b"what?\r\n", FAILED),
    ],
)
@pytest.mark.parametrize("count", [FEW, MANY])
async def test_puts_that_are_not_stored(answer: bytes, outcome: Outcome, count: int) -> None:
    async with scene(connections=1) as (server, bench):
        server.say(b"SET", answer)

        assert await bench.put(bench.keys(*range(10, 10 + count)), range(10, 10 + count)) == [outcome] * count

        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer", [b":2\r\n", b":-1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"$-1\r\n", b"?\r\n", b"*1\r\n:1\r\n"]
)
async def test_counts_that_mean_nothing(answer: bytes) -> None:
    async with scene(connections=1) as (server, bench):
        server.say(b"EXISTS", answer)
        server.say(b"UNLINK", answer)
        keys = bench.keys(*range(4))

        with pytest.raises(StorageError):
            await bench.engine.exists(keys)
        assert await bench.engine.put(bench.keys(*range(MANY)), range(MANY)) == [FAILED] * MANY
        assert await bench.engine.delete(keys) == [FAILED] * 4

        await recovers(server, bench)


@pytest.mark.asyncio
async def test_a_server_that_never_answers_costs_the_deadline() -> None:
    async with scene(connections=2) as (server, bench):
        for verb in (b"GET", b"SET", b"EXISTS", b"UNLINK"):
            server.say(verb, b"")
        keys = bench.keys(*range(4))

        with impatient(bench, 0.2):
            assert await bench.get(keys, range(5, 9)) == [FAILED] * 4
            with pytest.raises(StorageError, match="no answer in time"):
                await bench.engine.exists(keys)
            del server.lies[b"EXISTS"]
            for count in (FEW, MANY):
                assert await bench.put(bench.keys(*range(10, 10 + count)), range(count)) == [FAILED] * count

        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize("start", [b"", b"$", b"$%d\r\n" % FRAME_BYTES, b"-ERR "])
async def test_a_server_that_drips_costs_the_deadline(start: bytes) -> None:
    async with scene(connections=1) as (server, bench):

        async def drip(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(start)
            while True:  # each byte comes long before a wait for one would end
                writer.write(b"0")
                await writer.drain()
                await asyncio.sleep(0.01)

        server.lies = {b"GET": drip, b"SET": drip, b"EXISTS": drip}
        with impatient(bench, 0.2):
            assert await bench.get(bench.keys(0), [5]) == [FAILED]
            assert await bench.put(bench.keys(9), [9]) == [FAILED]
            with pytest.raises(StorageError, match=r"no answer in time|Protocol error"):
                await bench.engine.exists(bench.keys(0))
        await recovers(server, bench)


@pytest.mark.asyncio
async def test_a_server_that_stops_reading_costs_the_deadline_of_a_put() -> None:
    async with (
        hostile_server() as server,
        bench_at(server.url, connections=1, page_bytes=16 << 20, slots=2) as bench,
    ):
        server.connections = 1

        async def answer_and_stop(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(b":0\r\n:0\r\n")
            await asyncio.Event().wait()

        server.lies[b"EXISTS"] = answer_and_stop
        keys = bench.keys(1, 2)
        with impatient(bench, 0.5):
            assert await bench.engine.put(keys, [0, 1]) == [FAILED] * 2  # more than the kernel keeps

        server.lies.clear()
        assert await bench.get(keys, [0, 1]) == [MISS] * 2
        assert server.connections == 2


@pytest.mark.asyncio
async def test_a_cancelled_get_touches_its_slot_no_more() -> None:
    async with scene(connections=1) as (server, bench):
        value = bulk(server.values[next(key for key in server.values if b"kv" in key)])
        half, more = asyncio.Event(), asyncio.Event()

        async def lie(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(value[:6000])
            await writer.drain()
            half.set()
            await more.wait()
            writer.write(value[6000:])

        server.lies[b"GET"] = lie
        bench.poison([5])
        before = bytes(bench.binding.page(5))
        call = asyncio.create_task(bench.engine.get(bench.keys(0), [5]))
        await half.wait()
        while bytes(bench.binding.page(5)) == before:  # noqa: ASYNC110 - nothing tells when bytes arrive
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        bench.poison([5])

        more.set()
        await server.left.wait()

        assert bytes(bench.binding.page(5)) == before
        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize(("count", "first"), [(FEW, b"SET"), (MANY, b"EXISTS")])
async def test_a_cancelled_put_stores_nothing_and_harms_nobody(count: int, first: bytes) -> None:
    async with scene(connections=1) as (server, bench):
        reached = asyncio.Event()

        async def hold(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            reached.set()
            await asyncio.Event().wait()

        server.lies[first] = hold
        keys = bench.keys(*range(20, 20 + count))
        call = asyncio.create_task(bench.engine.put(keys, range(20, 20 + count)))
        await reached.wait()
        call.cancel()
        await asyncio.wait([call])

        server.lies.clear()
        assert await bench.get(keys, range(20, 20 + count)) == [MISS] * count
        await recovers(server, bench)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("verb", "answer", "message"),
    [
        (b"SELECT", b"-LOADING Redis is loading the dataset in memory\r\n", "does not let us in: LOADING"),
        (b"GET", b"-MOVED 1 10.0.0.1:6379\r\n", "is part of a cluster"),
        (b"GET", b"-ERR unknown command 'GET'\r\n", "cannot be used: ERR unknown command"),
        (b"HELLO", b"-ERR unknown command 'HELLO'\r\n", "is a Sentinel"),
        (b"HELLO", b"-ERR unknown command 'HELLO'\r\n", "does not speak Redis: an answer that means"),
        (b"GET", bulk(MARKER[:-1] + b"77"), "format 77"),
        (b"GET", bulk(b"\xff" * 100), "something else"),
        (b"GET", b":5\r\n", "something else"),
        (b"GET", b"HTTP/1.1 400\r\n", "does not speak Redis: Protocol error"),
        (b"GET", b"", "does not answer within 0.2 s"),
        (b"SELECT", b"", "does not answer within 0.2 s"),
    ],
)
async def test_opening_says_what_is_wrong(verb: bytes, answer: bytes, message: str) -> None:
    async with hostile_server() as server:
        server.say(verb, answer)
        server.say(b"INFO", bulk(b"redis_mode:sentinel\r\n"))  # as an old server says it
        server.say(b"SENTINEL", b"*0\r\n" if message == "is a Sentinel" else b":1\r\n")
        url = f"{server.url}/1" if verb == b"SELECT" else server.url
        async with backend_at(url, timeout_seconds=60 if answer else 0.2) as backend:
            with pytest.raises(StorageError, match=message) as caught:
                await open_bench(backend)
            assert isinstance(caught.value, StorageFormatError) == ("format" in message or "else" in message)


@pytest.mark.asyncio
async def test_calls_send_pages_by_turns_and_a_cancelled_one_gives_its_turn_away() -> None:
    async with hostile_server() as server, bench_at(server.url, page_bytes=8 << 20, slots=8) as bench:
        asked, taken, go_on = asyncio.Semaphore(0), asyncio.Semaphore(0), asyncio.Event()

        async def none_is_there(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(b":0\r\n")
            asked.release()

        async def stand_still(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            taken.release()
            await go_on.wait()

        server.lies = {b"EXISTS": none_is_there, b"SET": stand_still}
        first = asyncio.create_task(bench.put(bench.keys(0, 1, 2, 3), range(4)))
        await taken.acquire()  # of 32 MiB the kernel has a part: the rest is not sent yet
        second = asyncio.create_task(bench.put(bench.keys(4), [4]))
        for _ in range(5):
            await asked.acquire()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(taken.acquire(), 0.1)
        server.lies.clear()
        first.cancel()
        await asyncio.wait([first])

        assert await second == [STORED]
        assert first.cancelled()
        go_on.set()


@settings(max_examples=25)
@given(
    answer=st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from([b"$", b"*", b":", b"+", b"-", b"\r\n", b"1", b"9096", b"-1", b"x" * 50, b"\0"]),
            max_size=12,
        ).map(b"".join),
    ),
    close=st.booleans(),
)
def test_whatever_a_server_says(answer: bytes, close: bool) -> None:
    async def play() -> None:
        async with scene(connections=1) as (server, bench):
            for verb in (b"GET", b"SET", b"UNLINK"):
                server.say(verb, answer, close=close)

            with impatient(bench, 0.2):
                assert set(await bench.get(bench.keys(0, 1), [5, 6])) <= {MISS, CORRUPT, FAILED}
                assert set(await bench.put(bench.keys(9), [5])) <= {STORED, REJECTED, FAILED}

            await recovers(server, bench)

    asyncio.run(play())
