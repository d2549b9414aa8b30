"""The tier for vLLM where vLLM is not: its recorded calls are played again, and everything is compared.

`make conformance` records them from vLLM's own manager, and drives the tier by it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from asynchicache.config import open_backend
from asynchicache.errors import CacheError, ConfigError
from asynchicache.integrations import bridge as bridge_module
from asynchicache.integrations import page_store
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.vllm import words
from asynchicache.integrations.vllm.options import IdleWait
from asynchicache.integrations.vllm.tier import AsynchicacheTier
from asynchicache.ports import Port
from asynchicache.testing.faults import FaultRates, Faulty
from integrations.vllm_host import CHUNK_BYTES, aligned_rows, offloading_spec

DATA = Path(__file__).parents[1] / "data"
CALLS: list[dict[str, Any]] = json.loads((DATA / "calls" / "vllm-0.33.0.json").read_text())
Open = Callable[..., AsynchicacheTier]


@pytest.fixture
def rows() -> np.ndarray:
    """The primary tier's rows."""
    return aligned_rows()


@pytest.fixture
def patient_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a tier may take as long as the machine needs to end."""
    monkeypatch.setattr(bridge_module, "_OBEY_SECONDS", 60.0)


@pytest.fixture
def open_tier(rows: np.ndarray) -> Iterator[Open]:
    opened: list[AsynchicacheTier] = []

    def make(**options: Any) -> AsynchicacheTier:
        spec = offloading_spec(events=bool(options.get("enable_kv_events")))
        given = {"storage": "memory", "weight_version": "w1", **options}
        opened.append(AsynchicacheTier(spec, memoryview(rows), "AsynchicacheTier", None, **given))
        return opened[-1]

    yield make
    for tier in opened:
        tier.shutdown()


def content(key: bytes) -> np.ndarray:
    """What the chunk with this key holds."""
    return np.frombuffer(shake_128(b"content" + key).digest(CHUNK_BYTES), np.int8)


class Player:
    """vLLM's part: makes recorded calls, and compares answers and bytes."""

    def __init__(self, tier: AsynchicacheTier, rows: np.ndarray) -> None:
        self._tier = tier
        self._rows = rows
        self._requests: dict[str, words.ReqContext] = {}
        self._jobs: dict[int, words.TransferJob] = {}

    def play(self, call: Mapping[str, Any]) -> object:
        """Make one call; what it answers, in the record's form."""
        return getattr(self, f"_{call['call']}")(call)

    def _on_new_request(self, call: Mapping[str, Any]) -> None:
        context = words.ReqContext(call["request"], call["parameters"])
        self._requests[call["request"]] = context
        assert self._tier.on_new_request(context).policy is words.OffloadPolicy.CHUNK_LEVEL

    def _on_request_finished(self, call: Mapping[str, Any]) -> None:
        self._tier.on_request_finished(self._requests[call["request"]])

    def _lookup(self, call: Mapping[str, Any]) -> str:
        return self._tier.lookup(bytes.fromhex(call["key"]), self._requests[call["request"]]).name

    def _on_schedule_end(self, call: Mapping[str, Any]) -> None:
        self._tier.on_schedule_end(words.ScheduleEndContext((), ()))

    def _drain_jobs(self, call: Mapping[str, Any]) -> None:
        self._tier.drain_jobs()

    def _submit_store(self, call: Mapping[str, Any]) -> None:
        job = self._job(call)
        for key, row in zip(job.keys, job.chunk_ids, strict=True):
            self._rows[row] = content(key)
        self._tier.submit_store(job)

    def _submit_load(self, call: Mapping[str, Any]) -> None:
        job = self._job(call)
        self._rows[job.chunk_ids] = 0
        self._tier.submit_load(job)

    def _get_finished_jobs(self, call: Mapping[str, Any]) -> list[list[object]]:
        results = sorted(self._tier.get_finished_jobs(), key=lambda result: result.job_id)
        for result in results:
            job = self._jobs[result.job_id]
            for key, row in zip(job.keys, job.chunk_ids, strict=True) if job.is_promotion else ():
                assert np.array_equal(self._rows[row], content(key)), f"job {job.job_id}: row {row}"
        return [[result.job_id, result.success, result.transfer_bytes] for result in results]

    def _job(self, call: Mapping[str, Any]) -> words.TransferJob:
        keys = [bytes.fromhex(key) for key in call["keys"]]
        chunk_ids = np.array(call["rows"], np.int32)
        job = words.TransferJob(
            call["job"], keys, chunk_ids, call["promotion"], self._requests[call["request"]]
        )
        self._jobs[job.job_id] = job
        return job


@pytest.mark.parametrize("storage", ["memory", "file"])
def test_every_recorded_call_is_answered_as_it_was(
    open_tier: Open, rows: np.ndarray, tmp_path: Path, storage: str
) -> None:
    options = {"path": str(tmp_path)} if storage == "file" else {}
    player = Player(open_tier(storage=storage, storage_options=options), rows)

    for number, call in enumerate(CALLS):
        assert player.play(call) == call.get("answer"), f"call {number}: {call}"


def test_the_record_holds_every_kind_of_answer() -> None:
    answers = {call["answer"] for call in CALLS if call["call"] == "lookup"}

    assert answers == {"RETRY", "MISS", "HIT"}
    assert {call["promotion"] for call in CALLS if "promotion" in call} == {True, False}
    assert {key[-8:] for call in CALLS for key in call.get("keys", ())} == {
        "00000000",
        "00000001",
        "00000002",
    }


def job(number: int, *keys: bytes, row: int = 0, load: bool = False) -> words.TransferJob:
    chunk_ids = np.arange(row, row + len(keys), dtype=np.int32)
    return words.TransferJob(number, list(keys), chunk_ids, load, words.ReqContext("r"))


def key(name: str, group: int = 0) -> bytes:
    return shake_128(name.encode()).digest(32) + group.to_bytes(4, "big")


def test_a_load_that_fails_in_part_names_what_arrived(open_tier: Open, rows: np.ndarray) -> None:
    tier = open_tier(enable_kv_events=True)
    rows[0] = content(key("there"))
    tier.submit_store(job(0, key("there")))
    tier.drain_jobs()
    tier.submit_load(job(1, key("gone"), key("there"), key("no such group", 9), row=1, load=True))
    tier.drain_jobs()

    stored, loaded = tier.get_finished_jobs()

    assert (stored.success, stored.transfer_bytes) == (True, CHUNK_BYTES)
    assert (loaded.success, loaded.successful_keys) == (False, [key("there")])
    assert np.array_equal(rows[2], content(key("there")))
    told = [(event.keys, event.removed) for event in tier.take_events()]
    assert told == [([key("there")], False), ([key("gone")], True)]
    assert list(tier.take_events()) == []


def test_what_could_not_be_read_is_a_miss_for_those_who_asked(open_tier: Open) -> None:
    """Else the scheduler would find it, and fail to read it, for ever."""
    tier = open_tier()
    asking, later = words.ReqContext("r"), words.ReqContext("later")
    tier.submit_store(job(0, key("a")))
    tier.lookup(key("a"), asking)
    tier.on_schedule_end(words.ScheduleEndContext((), ()))
    tier.drain_jobs()
    assert tier.lookup(key("a"), asking) is words.LookupResult.HIT

    tier._bridge.call(tier._chunks._pools[0].clear())  # another process did it
    tier.submit_load(job(1, key("a"), load=True))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished_jobs()] == [True, False]

    assert tier.lookup(key("a"), asking) is words.LookupResult.MISS
    assert tier.lookup(key("a"), later) is words.LookupResult.MISS
    for context in (asking, later):
        tier.on_request_finished(context)
    assert tier.lookup(key("a"), later) is words.LookupResult.RETRY  # it may be back by now


def test_a_store_that_ends_is_news_for_those_who_asked_before(open_tier: Open) -> None:
    tier = open_tier()
    asking = words.ReqContext("r")
    tier.lookup(key("a"), asking)
    tier.on_schedule_end(words.ScheduleEndContext((), ()))
    tier.drain_jobs()
    assert tier.lookup(key("a"), asking) is words.LookupResult.MISS

    tier.submit_store(job(0, key("a")))
    tier.drain_jobs()
    tier.on_schedule_end(words.ScheduleEndContext((), ()))

    assert tier.lookup(key("a"), asking) is words.LookupResult.HIT


def test_after_shutting_down_every_job_fails_and_nothing_raises(open_tier: Open) -> None:
    tier = open_tier()
    context = words.ReqContext("r")
    tier.shutdown()

    assert tier.lookup(key("a"), context) is words.LookupResult.RETRY
    tier.on_schedule_end(words.ScheduleEndContext((), ()))
    assert tier.lookup(key("a"), context) is words.LookupResult.MISS
    tier.submit_store(job(0, key("a")))
    tier.submit_load(job(1, key("a"), load=True))
    tier.drain_jobs()
    assert [(one.job_id, one.success) for one in tier.get_finished_jobs()] == [(0, False), (1, False)]
    tier.on_request_finished(context)
    tier.get_stats()
    tier.shutdown()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_read_that_never_ends_keeps_the_rows_from_being_unmapped(
    open_tier: Open, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch, zero_copy: bool
) -> None:
    """In place it may still write to them, and vLLM must be told; a staged one cannot, and ends in time."""
    monkeypatch.setattr(page_store, "open_storage", hanging_backend)
    patience = {"deadline": 0.05, "closing": 0.05}
    tier = open_tier(zero_copy=zero_copy, storage_limits=patience, close_seconds=0.2 if zero_copy else 60)
    tier.submit_load(job(0, key("a"), load=True))

    if zero_copy:
        with pytest.raises(CacheError, match="may still use rows"):
            tier.shutdown()
    else:
        tier.drain_jobs()
        assert [result.success for result in tier.get_finished_jobs()] == [False]
        tier.shutdown()


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.usefixtures("patient_bridge")
def test_a_storage_that_does_not_close_is_left_behind(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stubborn: bool
) -> None:
    """No call of it can touch rows any more, so vLLM need not know; even one that ignores cancellation."""

    def open_it(name: str, options: Mapping[str, object], port: Port) -> Unclosable:
        return Unclosable(open_backend(name, options, port), FaultRates(), port.random, stubborn=stubborn)

    monkeypatch.setattr(page_store, "open_storage", open_it)
    tier = open_tier(storage_limits={"closing": 0.05}, close_seconds=60)

    tier.shutdown()

    assert "did not close within 0.05 s" in caplog.text


class Unclosable(Faulty):
    """It never closes, at most when it is told to stop trying."""

    def __init__(self, *arguments: Any, stubborn: bool) -> None:
        super().__init__(*arguments)
        self._stubborn = stubborn

    async def aclose(self) -> None:
        never = asyncio.Event()
        with suppress(asyncio.CancelledError) if self._stubborn else nullcontext():
            await never.wait()
        await never.wait()


@pytest.mark.usefixtures("patient_bridge")
def test_a_storage_that_raises_as_it_closes_keeps_no_thread(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_store, "open_storage", raising_backend)
    tier = open_tier(close_seconds=0.2)
    loop_of_the_tier = tier._bridge._thread

    tier.shutdown()

    assert not loop_of_the_tier.is_alive()
    assert "could not be closed: RuntimeError('connection lost')" in caplog.text


@pytest.mark.usefixtures("patient_bridge")
def test_a_shutdown_that_is_interrupted_keeps_no_thread(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    tier = open_tier(close_seconds=0.2)
    loop_of_the_tier = tier._bridge._thread
    monkeypatch.setattr(tier, "_close_storage", interrupted)

    with pytest.raises(KeyboardInterrupt):
        tier.shutdown()

    assert not loop_of_the_tier.is_alive()


def test_no_call_of_the_scheduler_waits_for_storage(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage answers nothing, for longer than the test may take."""
    monkeypatch.setattr(page_store, "open_storage", silent_backend)
    patience = {"deadline": 3600.0, "closing": 0.05}
    tier = open_tier(zero_copy=False, storage_limits=patience, close_seconds=0.2)
    context = words.ReqContext("r", {"asynchicache": {"prefetch": {"block_hashes": ["ab" * 32]}}})
    tier.on_new_request(context)

    for _ in range(3):
        assert tier.lookup(key("a"), context) is words.LookupResult.RETRY
        tier.submit_store(job(0, key("b")))
        tier.submit_load(job(1, key("a"), load=True))
        tier.on_schedule_end(words.ScheduleEndContext((), ()))
        assert list(tier.get_finished_jobs()) == []
        tier.get_stats()
        assert list(tier.take_events()) == []
    tier.on_request_finished(context)
    with suppress(CacheError):  # what hangs may keep it from closing in time
        tier.shutdown()


def test_only_steps_that_computed_nothing_wait_for_storage() -> None:
    """Steps that follow each other at once; a forward takes longer."""
    now = 0.0
    bridge = LoopBridge()
    lasting = bridge.submit(asyncio.Event().wait())
    waits: list[float] = []
    bridge.wait_finished = lambda seconds: bool(waits.append(seconds))  # type: ignore[method-assign]
    idle = IdleWait(bridge, 2.0, lambda: now)

    for pause, waited in [(0.0, 0), (0.0001, 1), (0.0001, 2), (0.02, 2), (0.0001, 3)]:
        now += pause
        idle.end_step()
        assert waits == [0.002] * waited
    lasting.cancel()
    bridge.close()


def test_a_wait_of_no_time_is_none() -> None:
    bridge = LoopBridge()
    bridge.wait_finished = None  # type: ignore[assignment, method-assign]  # calling it would raise
    idle = IdleWait(bridge, 0.0, lambda: 0.0)
    for _ in range(3):
        idle.end_step()
    bridge.close()


def silent_backend(name: str, options: Mapping[str, object], port: Port) -> Faulty:
    """No call of it ever ends."""
    return Faulty(open_backend(name, options, port), FaultRates(hang=1), port.random)


def raising_backend(name: str, options: Mapping[str, object], port: Port) -> Faulty:
    """It cannot close."""

    async def lost() -> None:
        raise RuntimeError("connection lost")

    backend = Faulty(open_backend(name, options, port), FaultRates(), port.random)
    backend.aclose = lost  # type: ignore[method-assign]
    return backend


def hanging_backend(name: str, options: Mapping[str, object], port: Port) -> Faulty:
    """Reads of it never end."""
    return Faulty(open_backend(name, options, port), FaultRates(hang=1, calls=("get",)), port.random)


def test_metrics_count_by_group_and_come_as_differences(open_tier: Open) -> None:
    tier = open_tier()
    tier.submit_store(job(0, key("a"), key("b", 1)))
    tier.drain_jobs()

    chunks = tier.get_stats().data["data"]["vllm:asynchicache_tier_chunks"]

    assert chunks["memory", "group0", "put", "stored"] == 1
    assert chunks["memory", "group1", "put", "stored"] == 1
    assert "vllm:asynchicache_tier_chunks" not in tier.get_stats().data["data"]
    declared = AsynchicacheTier.build_metric_definitions({})
    assert set(tier.get_stats().data["data"]) <= set(declared)


def test_the_next_engine_of_a_process_declares_its_metrics_anew() -> None:
    """vLLM unregisters what begins with `vllm:` before (vllm/v1/metrics/prometheus.py), and nothing else."""
    registry = CollectorRegistry()
    kinds = {words.OffloadingCounterMetadata: Counter, words.OffloadingGaugeMetadata: Gauge}
    for _ in range(2):
        for collector in list(registry._collector_to_names):
            if collector._name.startswith("vllm:"):
                registry.unregister(collector)
        for name, metric in AsynchicacheTier.build_metric_definitions({}).items():
            kinds[type(metric)](name, metric.documentation, metric.labelnames, registry=registry)
    assert len(registry._collector_to_names) == len(AsynchicacheTier.build_metric_definitions({}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_version": ""}, "weight_version is empty"),
        ({"storage": "tape"}, "'tape' is none of the backends found"),
        ({"storage": 5}, "storage"),
        ({"storage_optons": {}}, "storage_optons"),
        ({"storage_limits": {"dead_line": 1}}, "dead_line"),
        ({"locality": "NEAR"}, "locality 'NEAR' must be one of"),
        ({"store_bytes": 0}, "store_bytes 0 must be a whole number above 0"),
        ({"close_seconds": -1}, "close_seconds -1"),
        ({"idle_wait_ms": -1}, "idle_wait_ms"),
        ({"idle_wait_ms": 1000}, "idle_wait_ms"),
    ],
)
def test_wrong_options_are_refused_by_name(open_tier: Open, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tier(**options)


def test_weights_must_be_named(rows: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="weight_version"):
        AsynchicacheTier(offloading_spec(), memoryview(rows), "AsynchicacheTier", storage="memory")
