"""Traces of served requests: what they say, what they do not, and that `replay` reads them."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import signal
import textwrap
from io import FileIO
from pathlib import Path

import pytest

import forking
from asynchicache import CacheConfig, CacheHint, HybridCache
from asynchicache.errors import ConfigError
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.run import run_replay
from asynchicache.replay.trace import read_trace
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(4)
CONFIG = CacheConfig(device_slots={"kv": 64, "mamba": 16}, host_ratio=0, inline=True)
SHARED = list(range(1000, 1012))
PROMPTS = [[*SHARED, *range(1, 8)], [*SHARED, *range(1, 8), 50, 51], [*SHARED, 77], [9, 9, 9]]


async def serve(cache: HybridCache, prompt: list[int], output: int = 2) -> int:
    async with cache.request(prompt) as request:
        await request.load().submitted()
        request.extend(len(prompt) + output - request.hit.tokens)
        request.append(range(500, 500 + output))
        request.checkpoint(len(prompt) // 4 * 4)
        return request.hit.tokens


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.asyncio
async def test_a_trace_has_lengths_and_shared_blocks(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        recorder = cache.record(tmp_path / "t")
        for prompt in PROMPTS:
            await serve(cache, prompt)
        await recorder.aclose()
        await recorder.aclose()
        assert (recorder.recorded, recorder.dropped) == (4, 0)

    found = lines(tmp_path / "t")
    assert [line["input_length"] for line in found] == list(map(len, PROMPTS))
    assert [line["output_length"] for line in found] == [2] * 4
    assert [line["hash_runs"] for line in found] == [[0, 4], [0, 5], [0, 3], []]
    assert {line["block_size"] for line in found} == {4}
    trace = read_trace(tmp_path / "t")
    assert (trace.blocks, len(trace.requests)) == (5, 4)


@pytest.mark.asyncio
async def test_a_trace_of_a_server_gives_its_hit_rate(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        cache.record(tmp_path / "t.gz")
        hits = [await serve(cache, prompt) for prompt in PROMPTS * 2]

    with gzip.open(tmp_path / "t.gz", "rt") as file:
        assert len(list(file)) == 8
    report = run_replay(ReplayOptions(str(tmp_path / "t.gz"), pools="kv,mamba"), lambda done, total: None)
    assert report.hit_rate * report.prompt_tokens == sum(hits)


@pytest.mark.asyncio
async def test_nothing_of_the_prompts_is_in_the_file(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        cache.record(tmp_path / "t", salt=b"secret")
        await serve(cache, [123456789] * 9)

    text = (tmp_path / "t").read_text()
    assert "123456789" not in text
    assert "secret" not in text


@pytest.mark.asyncio
async def test_servers_with_one_salt_give_a_block_one_id_and_others_do_not(tmp_path: Path):
    found = []
    for name, salt in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        async with HybridCache.open(SPEC, CONFIG) as cache:
            cache.record(tmp_path / name, salt=salt)
            await serve(cache, PROMPTS[1])
        found.append(lines(tmp_path / name)[0]["hash_ids"])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert len(set(found[0])) == 5


@pytest.mark.asyncio
async def test_namespaces_share_no_block(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        cache.record(tmp_path / "t")
        for namespace in ("a", "b"):
            async with cache.request(SHARED, namespace=namespace):
                pass
    assert [line["hash_runs"] for line in lines(tmp_path / "t")] == [[0, 3], [3, 3]]


@pytest.mark.asyncio
async def test_requests_are_read_in_the_order_in_which_they_came(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        recorder = cache.record(tmp_path / "t")
        first, second = cache.request([1] * 5), cache.request([2] * 6)
        async with first, second:
            pass
        async with cache.request([3] * 7):
            await recorder.aclose()
    assert sorted(line["input_length"] for line in lines(tmp_path / "t")) == [5, 6, 7]
    assert [request.tokens for request in read_trace(tmp_path / "t").requests] == [5, 6, 7]


@pytest.mark.asyncio
async def test_a_session_is_known_by_what_its_prompts_repeat(tmp_path: Path):
    """Conversations with one system prompt of whole pages, and questions shorter than a page."""
    system, hint = SHARED[:8], CacheHint(repeats=(10,))
    async with HybridCache.open(SPEC, CONFIG) as cache:
        recorder = cache.record(tmp_path / "t")
        for question, namespace in (([1], None), ([2, 3], None), ([1], "other")):
            prompt = [*system, *question]
            for answer in ([40], [*range(50, 60)], []):
                async with cache.request(prompt, namespace=namespace):
                    pass
                prompt += answer
        for prompt in ([*system, 4, 5, 90, 91], [*system, 4, 5, 6, 7]):  # an invitation is not repeated
            async with cache.request(prompt, hint=hint):
                pass
        await recorder.aclose()
    sessions = [line["session_id"] for line in lines(tmp_path / "t")]
    assert [sessions.index(one) for one in sessions] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9]


@pytest.mark.asyncio
async def test_a_trace_of_page_keys_has_blocks_and_sessions(tmp_path: Path):
    keys = [bytes([number]) * 32 for number in range(6)]
    config = CacheConfig(device_slots={"kv": 64, "mamba": 16}, host_ratio=0, inline=True, page_keys=True)
    async with HybridCache.open(SPEC, config) as cache:
        recorder = cache.record(tmp_path / "t")
        for count, length in ((2, None), (2, 30), (4, 18)):
            async with cache.request_keys(keys[:count], length=length):
                pass
        await recorder.aclose()
    found = read_trace(tmp_path / "t").requests
    assert [(one.tokens, one.runs) for one in found] == [(9, [(0, 2)]), (11, [(0, 2)]), (18, [(0, 4)])]
    assert len({one.session for one in found}) == 1


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    async with HybridCache.open(SPEC, CONFIG) as cache:
        with pytest.raises(ConfigError, match=r"trace '.*nowhere/t' cannot be written"):
            cache.record(tmp_path / "nowhere" / "t")
        assert await serve(cache, PROMPTS[0]) == 0


@pytest.mark.asyncio
async def test_a_recorder_that_cannot_keep_up_drops_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asynchicache.controller.recorder._MAX_WAITING_BYTES", 4 * 8 * 4)
    async with HybridCache.open(SPEC, CONFIG) as cache:
        recorder = cache.record(tmp_path / "t")
        await serve(cache, list(range(20)))
        await serve(cache, [1, 2, 3])
    assert recorder.dropped == 1
    assert len(lines(tmp_path / "t")) == 1


_KILLED = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from cache.test_recorder import CONFIG, PROMPTS, SPEC, serve
    from asynchicache import HybridCache

    async def main() -> None:
        async with HybridCache.open(SPEC, CONFIG) as cache:
            recorder = cache.record(sys.argv[1])
            for count, prompts in ((2, PROMPTS[:2]), (4, PROMPTS[2:])):
                for prompt in prompts:
                    await serve(cache, prompt)
                while recorder.recorded < count:
                    await asyncio.sleep(0.01)
            await serve(cache, [5] * 9)  # less than a second old: it may be lost, and must not be torn
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_killed_process_leaves_whole_lines(tmp_path: Path, name: str) -> None:
    killed = forking.run(["-c", textwrap.dedent(_KILLED), tmp_path / name])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [request.tokens for request in read_trace(tmp_path / name, 4).requests][:4] == [
        len(prompt) for prompt in PROMPTS
    ]


@pytest.mark.asyncio
async def test_lines_that_a_full_disk_took_in_part_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: FileIO, chunk: bytes) -> None:
        file.write(chunk[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    async with HybridCache.open(SPEC, CONFIG) as cache:
        recorder = cache.record(tmp_path / "t")
        with monkeypatch.context() as patch:
            patch.setattr("asynchicache.controller.recorder._write_all", full)
            await serve(cache, PROMPTS[0])
            while not recorder.dropped:  # noqa: ASYNC110  it is written after a second
                await asyncio.sleep(0.01)
        await serve(cache, PROMPTS[3])
    assert [line["input_length"] for line in lines(tmp_path / "t")] == [3]
