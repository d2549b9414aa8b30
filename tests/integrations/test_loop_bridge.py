"""The bridge under real threads: every job ends once, whatever host, loop or process does meanwhile.

More than 400 lines: one promise, held against threads, deadlines, limits, forks and the interpreter's end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial

import pytest

from asynchicache.errors import CapacityError, ClosedError, ConfigError, UsageError
from asynchicache.integrations import bridge as bridge_module
from asynchicache.integrations.bridge import ByteGate, Job, JobState, LoopBridge

PATIENCE = 30.0  # of a test that waits for what must come; it never runs out


@pytest.fixture(autouse=True)
def patient_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coroutines that obey may take as long as the machine needs."""
    monkeypatch.setattr(bridge_module, "_OBEY_SECONDS", PATIENCE)


@pytest.fixture
def impatient_closing(monkeypatch: pytest.MonkeyPatch, patient_closing: None) -> None:
    """For those that never obey."""
    monkeypatch.setattr(bridge_module, "_OBEY_SECONDS", 0.5)
    monkeypatch.setattr(bridge_module, "_TIDY_SECONDS", 0.05)


@pytest.fixture
def bridge() -> Iterator[LoopBridge]:
    bridge = LoopBridge()
    yield bridge
    bridge.close(0.0)


async def answer(value: int = 42) -> int:
    return value


async def fail(text: str = "no") -> int:
    raise ValueError(text)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


class Held:
    """A coroutine that says when it has begun and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self.ended = False

    async def run(self, value: int = 1) -> int:
        self.begun.set()
        await asyncio.get_running_loop().run_in_executor(None, self._go.wait)
        self.ended = True
        return value

    def release(self) -> None:
        self._go.set()


def test_a_job_runs_and_gives_its_result(bridge: LoopBridge) -> None:
    job = bridge.submit(answer(7), tag="seven")
    assert job.result(PATIENCE) == 7
    assert (job.done(), job.state, job.tag) == (True, JobState.DONE, "seven")
    assert job.exception() is None
    assert not job.cancel(), "it has ended"


def test_an_exception_reaches_the_submitter_as_it_is(bridge: LoopBridge) -> None:
    job = bridge.submit(fail("its own words"))
    with pytest.raises(ValueError, match="its own words"):
        job.result(PATIENCE)
    assert job.state is JobState.FAILED
    assert isinstance(job.exception(), ValueError)


def test_a_failure_that_is_never_read_is_logged(bridge: LoopBridge, caplog: pytest.LogCaptureFixture) -> None:
    job = bridge.submit(fail("unheard"), queued=False)
    assert job.wait(PATIENCE)
    assert bridge.drain(PATIENCE)
    with caplog.at_level(logging.ERROR):
        del job
        gc.collect()
    assert "its error was never read" in caplog.text
    assert "unheard" in caplog.text


def test_submit_waits_for_nothing_even_if_the_loop_is_blocked(bridge: LoopBridge) -> None:
    go, begun = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        go.wait()

    blocking = bridge.submit(block())
    assert begun.wait(PATIENCE)
    job = bridge.submit(answer())
    assert not job.done()
    with pytest.raises(TimeoutError, match="has not ended in 0"):
        job.result(0)
    go.set()
    assert job.result(PATIENCE) == 42
    assert blocking.wait(PATIENCE)


def test_the_queue_gives_each_job_once(bridge: LoopBridge) -> None:
    assert bridge.finished() == []
    jobs = [bridge.submit(answer(n), tag=n) for n in range(20)]
    waited = bridge.submit(answer(), queued=False)
    assert bridge.drain(PATIENCE)
    assert [job.tag for job in bridge.finished()] == [job.tag for job in jobs]
    assert bridge.finished() == []
    assert waited.done()


def test_a_poller_waits_for_the_first_job_that_ends(bridge: LoopBridge) -> None:
    assert bridge.wait_finished(PATIENCE)  # nothing is pending
    lasting = bridge.submit(forever())
    assert not bridge.wait_finished(0.001)
    bridge.submit(answer(), tag="first")
    assert bridge.wait_finished(PATIENCE)
    assert [job.tag for job in bridge.finished()] == ["first"]
    assert not bridge.wait_finished(0.001)
    lasting.cancel()


def test_a_deadline_ends_a_job_as_timed_out(bridge: LoopBridge) -> None:
    job = bridge.submit(forever(), deadline_s=0.01, tag="late")
    with pytest.raises(TimeoutError, match="did not end by its deadline"):
        job.result(PATIENCE)
    assert job.state is JobState.TIMED_OUT
    assert bridge.finished() == [job]
    in_time = bridge.submit(answer(), deadline_s=PATIENCE)
    assert in_time.result(PATIENCE) == 42
    assert bridge.submit(forever(), deadline_s=-1.0).exception(PATIENCE) is not None


def test_a_deadline_counts_while_a_job_waits_for_room() -> None:
    bridge, held = LoopBridge(max_bytes=10), Held()
    first = bridge.submit(held.run(), nbytes=10)
    assert held.begun.wait(PATIENCE)
    late = bridge.submit(answer(), nbytes=1, deadline_s=0.01)
    assert isinstance(late.exception(PATIENCE), TimeoutError)
    behind = bridge.submit(answer(5), nbytes=1)
    held.release()
    assert (first.result(PATIENCE), behind.result(PATIENCE)) == (1, 5), "its place in the line is given up"
    assert bridge.close()


def test_a_job_ends_only_when_its_coroutine_has_let_go(bridge: LoopBridge) -> None:
    told, may_end = threading.Event(), asyncio.Event()

    async def slow_to_let_go() -> None:
        try:
            await forever()
        finally:
            told.set()
            await may_end.wait()

    job = bridge.submit(slow_to_let_go(), deadline_s=0.01)
    assert told.wait(PATIENCE)
    assert not job.done(), "it still holds what it was lent"
    bridge.call(_set(may_end))
    assert isinstance(job.exception(PATIENCE), TimeoutError)


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_cancelling_ends_a_job_and_its_coroutine_notices(bridge: LoopBridge) -> None:
    noticed = threading.Event()

    async def notice() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            noticed.set()
            raise

    job = bridge.submit(notice())
    assert bridge.call(answer()) == 42  # the first one has begun
    assert job.cancel()
    with pytest.raises(CancelledError):
        job.result(PATIENCE)
    assert noticed.is_set()
    assert job.state is JobState.CANCELLED


def test_a_job_cancelled_before_it_begins_never_runs(bridge: LoopBridge) -> None:
    blocked, go, ran = threading.Event(), threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        go.wait()

    async def run() -> None:
        ran.set()

    bridge.submit(block())
    assert blocked.wait(PATIENCE)  # else both may begin in one turn of the loop
    job = bridge.submit(run())
    assert job.cancel()
    go.set()
    assert isinstance(job.exception(PATIENCE), CancelledError)
    assert not ran.is_set()


def test_a_result_that_comes_before_the_cancellation_is_kept(bridge: LoopBridge) -> None:
    async def stubborn() -> int:
        with suppress(asyncio.CancelledError):
            await forever()
        return 3

    job = bridge.submit(stubborn())
    bridge.call(answer())
    job.cancel()
    assert job.result(PATIENCE) == 3
    assert job.state is JobState.DONE


def test_cancels_deadlines_and_ends_race_and_every_job_ends_once() -> None:
    bridge = LoopBridge(max_bytes=64)
    jobs: list[Job[int]] = []
    lock = threading.Lock()
    barrier = threading.Barrier(4)

    async def turns(count: int) -> int:
        for _ in range(count):
            await asyncio.sleep(0)
        return count

    def host(seed: int) -> None:
        barrier.wait(PATIENCE)
        for n in range(100):
            deadline = (None, 0.0, 0.001)[(n + seed) % 3]
            job = bridge.submit(turns(n % 7), nbytes=n % 40, deadline_s=deadline, wait=n % 5 != 0)
            with lock:
                jobs.append(job)
            if n % 2:
                job.cancel()

    hosts = [threading.Thread(target=host, args=(seed,)) for seed in range(4)]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join(PATIENCE)
    assert bridge.drain(PATIENCE)
    assert Counter(map(id, bridge.finished())) == Counter(map(id, jobs)), "each once"
    assert all(job.done() and job.state is not JobState.PENDING for job in jobs)
    assert bridge.pending == 0
    assert {job.exception() is None for job in jobs if job.state is JobState.DONE} == {True}
    assert bridge.call(answer(), nbytes=64) == 42, "no byte is lost"
    assert bridge.close()


def test_bytes_over_the_cap_wait_in_order() -> None:
    bridge, first, second = LoopBridge(max_bytes=100), Held(), Held()
    jobs = [bridge.submit(first.run(), nbytes=80), bridge.submit(second.run(), nbytes=70)]
    small = bridge.submit(answer(), nbytes=10)
    assert first.begun.wait(PATIENCE)
    assert not second.begun.is_set()
    assert not small.done(), "it does not overtake"
    first.release()
    assert second.begun.wait(PATIENCE)
    assert small.result(PATIENCE) == 42, "10 more fit beside 70"
    second.release()
    assert [job.result(PATIENCE) for job in jobs] == [1, 1]
    assert bridge.close()


def test_bytes_over_the_cap_are_shed_if_they_shall_not_wait() -> None:
    bridge, held = LoopBridge(max_bytes=100), Held()
    first = bridge.submit(held.run(), nbytes=80)
    shed = bridge.submit(answer(), nbytes=30, wait=False, tag="too much")
    assert shed.state is JobState.SHED
    with pytest.raises(CapacityError, match="30 bytes more than 80 of 100"):
        shed.result()
    assert bridge.finished() == [shed]
    held.release()
    assert first.result(PATIENCE) == 1
    assert bridge.close()


@pytest.mark.asyncio
async def test_room_that_came_with_a_cancellation_is_given_back() -> None:
    gate = ByteGate(10)
    await gate.enter(10)
    waiting = asyncio.create_task(gate.enter(10))
    await asyncio.sleep(0)
    gate.leave(10)  # lets it in, and it has not noticed yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(gate.enter(10), PATIENCE)


def test_a_job_larger_than_the_cap_runs_alone() -> None:
    bridge = LoopBridge(max_bytes=10)
    assert bridge.submit(answer(), nbytes=1000).result(PATIENCE) == 42
    assert bridge.submit(answer(), nbytes=1000, wait=False).result(PATIENCE) == 42
    assert bridge.close()


def test_jobs_of_no_bytes_wait_for_none() -> None:
    bridge, held = LoopBridge(max_bytes=10), Held()
    large, waiting = bridge.submit(held.run(), nbytes=1000), bridge.submit(answer(), nbytes=1)
    assert bridge.submit(answer(), wait=False).result(PATIENCE) == 42
    assert bridge.call(answer(), deadline_s=PATIENCE) == 42, "closing storage is such a job"
    assert not waiting.done()
    held.release()
    assert (large.result(PATIENCE), waiting.result(PATIENCE)) == (1, 42)
    assert bridge.close()


def test_drain_tells_whether_all_has_ended(bridge: LoopBridge) -> None:
    held = Held()
    job = bridge.submit(held.run())
    assert not bridge.drain(0.0)
    held.release()
    assert bridge.drain(PATIENCE)
    assert job.done()


def test_close_waits_then_cancels_and_refuses_what_comes_later() -> None:
    bridge, held = LoopBridge(), Held()
    waited = bridge.submit(held.run())
    assert held.begun.wait(PATIENCE)
    held.release()
    assert bridge.close(PATIENCE)
    assert waited.result() == 1
    coro = answer()
    with pytest.raises(ClosedError, match="the bridge is closed"):
        bridge.submit(coro)
    assert coro.cr_frame is None, "it was closed, so nobody warns that it was never awaited"
    assert bridge.closed
    assert bridge.close()

    bridge = LoopBridge()
    cancelled = bridge.submit(forever())
    assert bridge.close(0.0), "a coroutine that obeys"
    assert cancelled.state is JobState.CANCELLED
    assert bridge.finished() == [cancelled]


@pytest.mark.usefixtures("impatient_closing")
def test_close_gives_up_on_a_coroutine_that_does_not_obey() -> None:
    bridge = LoopBridge()

    async def deaf() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await forever()

    job = bridge.submit(deaf())
    bridge.call(answer())
    assert not bridge.close(0.0)
    with pytest.raises(ClosedError, match=r"the bridge (is|was) closed"):  # by whether the thread was in time
        job.result(PATIENCE)


@pytest.mark.usefixtures("impatient_closing")
def test_close_gives_up_on_a_loop_that_is_blocked() -> None:
    bridge, begun, go = LoopBridge(), threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        go.wait()

    job = bridge.submit(block())
    assert begun.wait(PATIENCE)
    assert not bridge.close(0.0)
    assert isinstance(job.exception(PATIENCE), ClosedError)
    go.set()


def test_a_loop_that_ends_ends_its_jobs_too() -> None:
    bridge = LoopBridge()

    async def stop() -> None:
        asyncio.get_running_loop().stop()
        await forever()

    waiting, stopping = bridge.submit(forever()), bridge.submit(stop())
    for job in (waiting, stopping):
        assert job.exception(PATIENCE) is not None
    with pytest.raises(ClosedError, match="was stopped"):
        bridge.submit(answer())
    bridge.close()


def test_a_loop_that_dies_ends_its_jobs_too(caplog: pytest.LogCaptureFixture) -> None:
    bridge = LoopBridge()

    async def kill() -> None:
        def die() -> None:
            raise SystemExit(3)

        asyncio.get_running_loop().call_soon(die)
        await forever()

    assert bridge.submit(kill()).exception(PATIENCE) is not None
    with pytest.raises(ClosedError, match=r"died: SystemExit\(3\)"):
        bridge.submit(answer())
    bridge.close()
    assert "the loop of the bridge died" in caplog.text


def test_a_coroutine_that_wants_to_end_the_process_ends_itself(bridge: LoopBridge) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    error = bridge.submit(leave()).exception(PATIENCE)
    assert isinstance(error, UsageError)
    assert bridge.call(answer()) == 42, "the loop goes on"


def test_waiting_on_the_bridges_own_loop_is_refused(bridge: LoopBridge) -> None:
    async def wait_for(call: Callable[[], object]) -> str:
        with pytest.raises(UsageError, match="own loop") as caught:
            call()
        return str(caught.value)

    other = bridge.submit(forever())
    for call in (partial(other.result, 1), bridge.drain, bridge.close, partial(bridge.wait_finished, 1)):
        assert "itself" in bridge.call(wait_for(call))
    other.cancel()


def test_bad_input_is_refused_by_name(bridge: LoopBridge) -> None:
    with pytest.raises(ConfigError, match="max_bytes 0"):
        LoopBridge(max_bytes=0)
    with pytest.raises(UsageError, match="takes a coroutine"):
        bridge.submit(answer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="-1 bytes"):
        bridge.submit(answer(), nbytes=-1)


def test_an_interrupted_call_cancels_its_coroutine(
    bridge: LoopBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    async def notice() -> None:
        try:
            await forever()
        finally:
            ended.set()

    def interrupted(job: Job[None], timeout: float | None = None) -> None:
        bridge.submit(answer(), queued=False).wait(PATIENCE)
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bridge.call(notice())
    assert ended.wait(PATIENCE)


def _in_child(check: Callable[[], Awaitable[None] | None]) -> int:
    """The exit status of a forked child that runs `check`: 0 if it raised nothing."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))  # it must not outlive the test if it waits for ever
        try:
            check()
        except BaseException:  # noqa: BLE001 - the end of a process
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(bridge: LoopBridge) -> None:
    held = Held()
    job = bridge.submit(held.run())
    assert held.begun.wait(PATIENCE)
    ended = bridge.submit(answer())
    assert ended.wait(PATIENCE)

    def child() -> None:
        assert bridge.finished() == [], "they are the parent's"
        job.cancel()
        with pytest.raises(ClosedError, match="after the fork"):
            bridge.submit(answer())
        with pytest.raises(ClosedError, match="never ends here"):
            job.result()
        assert bridge.closed
        assert bridge.close()
        own = LoopBridge()
        assert own.call(answer()) == 42
        assert own.close()

    taken, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with bridge._changed:  # as any thread may while a process is forked
            taken.set()
            forked.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(PATIENCE)
    assert _in_child(child) == 0
    forked.set()
    holder.join(PATIENCE)
    held.release()
    assert job.result(PATIENCE) == 1
    assert bridge.finished() == [ended, job]


def test_the_interpreter_ends_although_nobody_closed_the_bridge() -> None:
    script = """
        import asyncio, sys, threading
        from asynchicache.integrations.bridge import LoopBridge

        async def forever():
            await asyncio.get_running_loop().create_future()

        bridge = LoopBridge()
        jobs = [bridge.submit(forever()) for _ in range(3)]
        waiter = threading.Thread(target=jobs[0].exception, daemon=True)
        waiter.start()
        print("here")
    """
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "here\n", "")
