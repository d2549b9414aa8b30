"""Replays against what is known of their traces, and against a plain model of blocks."""

from __future__ import annotations

import functools
import gzip
import json
import random
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from asynchicache.errors import ConfigError
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.report import ReplayReport
from asynchicache.replay.run import run_replay
from soaking import first

TRACES = Path(__file__).parents[1] / "data" / "traces"
CHAT = TRACES / "mooncake_conversation_h1.jsonl.gz"
AGENTS = TRACES / "claude_code_weka_16_sessions.jsonl.gz"
TOOLS = TRACES / "taubench_airline_gpt4o.jsonl.gz"
BLOCK = 8


def replay(trace: Path, **options: object) -> ReplayReport:
    return replayed(ReplayOptions(trace=str(trace), **options))


@functools.cache  # several tests look at the same replay
def replayed(options: ReplayOptions) -> ReplayReport:
    report = run_replay(options, lambda done, total: None)
    assert report.problems == []
    missed = sum(tokens for reasons in report.misses.values() for tokens in reasons.values())
    assert sum(report.tokens_by_tier.values()) + missed == report.prompt_tokens
    return report


def test_memory_is_at_most_three_times_the_file(tmp_path: Path):
    """A trace without a block that occurs twice, all of which is kept."""
    generator = random.Random(4)
    prompts = [[generator.getrandbits(63) for _ in range(90)] for _ in range(200)]
    lines = [{"timestamp": 0, "input_length": 90 * 512, "hash_ids": ids} for ids in prompts]
    path = tmp_path / "distinct.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tracemalloc.start()
    try:
        options = ReplayOptions(trace=str(path), block_size=512, policy="lru")  # no sketch of half a megabyte
        report = run_replay(options, lambda done, total: None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.working_set == {"kv": 200 * 90}
    assert most <= 3 * path.stat().st_size, f"{most / report.working_set['kv']:.0f} bytes a block"


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """The first third of two real traces."""
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for trace, requests in ((CHAT, 2000), (TOOLS, 800)):
        found[trace] = folder / trace.stem
        with gzip.open(trace, "rt") as lines:
            found[trace].write_text("".join(islice(lines, requests)))
    return found


# Real traces: the ceilings were computed by others, with exact and brute-force methods.


@pytest.mark.parametrize(("trace", "percent"), [(CHAT, 34.6), (TOOLS, 93.6)])
def test_attention_alone_reaches_the_ceiling(trace: Path, percent: float):
    report = replay(trace)
    assert report.hit_rate * 100 == pytest.approx(percent, abs=0.1)
    assert report.hit_rate == report.ceiling
    assert report.evicted_pages == 0


@pytest.mark.parametrize(
    ("share", "percent"), first(1, [("0.1", 19.8), ("0.01", 4.3), ("0.05", 10.4), ("0.25", 29.9)])
)
def test_lru_on_the_device_is_prefix_tree_lru(share: str, percent: float):
    report = replay(CHAT, capacity_share=share, policy="lru")
    assert report.hit_rate * 100 == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize(("share", "percent"), first(1, [("0.1", 21.4), ("0.05", 14.5), ("0.25", 30.5)]))
def test_large_prompts_that_nobody_asks_for_again_go_first(share: str, percent: float):
    assert replay(CHAT, capacity_share=share).hit_rate * 100 >= percent


@pytest.mark.parametrize("share", first(1, ["0.05", "0.02", "0.1"]))
def test_agents_lose_nothing_by_it(share: str):
    size, lru = (replay(TOOLS, capacity_share=share, policy=policy) for policy in ("size", "lru"))
    assert size.hit_rate > lru.hit_rate - 0.001


def test_a_host_behind_the_device_is_hit_less_often_because_the_device_keeps_the_right_pages(beginnings):
    size, lru = (
        replay(beginnings[CHAT], capacity_share="0.05", host_share="0.1", policy=policy)
        for policy in ("size", "lru")
    )
    assert size.hit_rate > lru.hit_rate
    assert size.tokens_by_tier["device"] > 1.4 * lru.tokens_by_tier["device"]


@pytest.mark.parametrize(
    ("checkpoint", "chat", "tools"),
    first(
        1,
        [
            ("prompt+branch", 33.0, 93.6),
            ("prompt", 32.0, 92.1),
            ("512", 34.6, 86.9),
            ("2048", 29.9, 57.3),
            ("8192", 23.1, 0.9),
            ("prompt+2048", 34.3, 92.1),
            ("prompt+branch+2048", 34.4, 93.6),
        ],
    ),
)
def test_states_where_they_are_kept_serve_what_they_can(checkpoint: str, chat: float, tools: float):
    for trace, percent in ((CHAT, chat), (TOOLS, tools)):
        report = replay(trace, pools="kv,mamba", checkpoint=checkpoint)
        assert report.hit_rate * 100 == pytest.approx(percent, abs=0.1)
        assert report.states_kept == report.working_set["mamba"]


def test_a_pool_that_shares_slots_changes_nothing():
    alone, shared = (replay(TOOLS, pools=pools, capacity_share="0.05") for pools in ("kv", "kv,dsa"))
    assert alone.hit_rate == shared.hit_rate < alone.ceiling


@pytest.mark.parametrize(
    ("trace", "share", "state_tokens", "percent"),
    first(
        1,
        [
            (TOOLS, 0.1, 1600, 86.0),
            (TOOLS, 0.1, 6400, 62.0),
            (CHAT, 0.25, 1600, 26.0),
            (CHAT, 0.25, 6400, 23.5),
        ],
    ),
)
def test_pages_and_states_share_one_memory(trace: Path, share: float, state_tokens: int, percent: float):
    report = replay(trace, pools="kv,mamba", memory_share=share, state_tokens=state_tokens)
    assert report.hit_rate * 100 >= percent
    assert min(report.evicted[pool]["device"] for pool in ("kv", "mamba")) > 0


@pytest.mark.parametrize("pools", ["kv", "kv,swa", "kv,mamba,swa", "kv,mamba,dsa"])
@pytest.mark.parametrize("policy", ["size", "lru", "fifo"])
def test_any_pools_can_share_a_memory(pools: str, policy: str, tmp_path: Path):
    random_trace(5, tmp_path / "t", requests=60, answers=4)
    for share in (0.2, 0.5, 1.0):
        options = {"pools": pools, "policy": policy, "window": 2 * BLOCK, "state_tokens": 20}
        assert 0 < replay(tmp_path / "t", memory_share=share, **options).hit_rate


def test_a_memory_for_attention_alone_is_as_good_as_its_slots():
    shared = replay(TOOLS, memory_share=0.05)
    assert shared.hit_rate == pytest.approx(replay(TOOLS, capacity_share="0.05").hit_rate, abs=0.001)


# A plain model of the cache: blocks in dictionaries.


def random_trace(seed: int, path: Path, requests: int = 120, answers: int = 0) -> list[list[int]]:
    """Prompts that continue, repeat, or leave earlier ones, and their answers, somewhere on their way."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    ended: list[list[int]] = []
    fresh = 0
    with path.open("w") as file:
        for arrival in range(requests):
            old = rng.choice(ended) if ended and rng.random() < 0.8 else []
            prompt = old[: rng.choice([len(old), rng.randint(0, len(old))])]
            more = rng.randint(0 if prompt else 1, 6)
            prompt = [*prompt, *range(fresh, fresh + more)]
            fresh += more
            answer = range(fresh, fresh + rng.randint(0, answers))
            fresh += len(answer)
            prompts.append(prompt)
            ended.append([*prompt, *answer])
            runs = [number for block in prompt for number in (block, 1)]
            length = len(prompt) * BLOCK + rng.randint(1, BLOCK - 1)
            line = {"timestamp_ms": arrival, "input_length": length, "block_size": BLOCK, "hash_runs": runs}
            line |= (
                {"answer_runs": [answer.start, len(answer)], "repeats": [2 * length // 3]} if answer else {}
            )
            file.write(json.dumps(line) + "\n")
    return prompts


def lru_hits(prompts: list[list[int]], capacity: int) -> int:
    """Hits in blocks if `capacity` are kept and the least recently used leaf goes first."""
    used: dict[int, int] = {}
    parent: dict[int, int] = {}
    children: Counter[int] = Counter()
    hits = 0
    for now, prompt in enumerate(prompts):
        parent.update(zip(prompt[1:], prompt, strict=False))
        known = next((n for n, block in enumerate(prompt) if block not in used), len(prompt))
        hits += known
        for block in prompt[:known]:
            used[block] = now
        for block in prompt[known:]:
            if len(used) == capacity:
                leaves = [b for b, last in used.items() if not children[b] and last < now]
                gone = min(leaves, key=used.__getitem__)
                del used[gone]
                children[parent.get(gone, -1)] -= 1
            used[block] = now
            children[parent.get(block, -1)] += 1
    return hits


@pytest.mark.parametrize("seed", first(6, range(12)))
def test_every_eviction_is_that_of_the_model(seed: int, tmp_path: Path):
    prompts = random_trace(seed, tmp_path / "t")
    working_set = len({block for prompt in prompts for block in prompt})
    for share in (0.3, 0.6, 0.99):
        capacity = -int(-working_set * share // 1)
        if capacity >= max(map(len, prompts)):
            report = replay(tmp_path / "t", capacity_share=str(share), policy="lru")
            assert report.tokens_by_tier["device"] == lru_hits(prompts, capacity) * BLOCK


def state_hits(prompts: list[list[int]], checkpoint: str) -> int:
    """Hits in blocks if nothing is lost: behind which blocks was a state kept?"""
    seen: set[int] = set()
    kept: set[int] = set()
    hits = 0
    for prompt in prompts:
        known = sum(block in seen for block in prompt)
        hit = max((n for n in range(1, known + 1) if prompt[n - 1] in kept), default=0)
        hits += hit
        seen.update(prompt)
        ends = {"prompt": [len(prompt)], "branch": [known], "16": range(2, len(prompt) + 1, 2), "none": []}
        places = [n for word in checkpoint.split("+") for n in ends[word]]
        kept.update(prompt[n - 1] for n in places if n > hit)
    return hits


@pytest.mark.parametrize("checkpoint", ["prompt", "branch", "16", "prompt+branch", "prompt+branch+16"])
@pytest.mark.parametrize("seed", range(4))
def test_every_state_is_that_of_the_model(seed: int, checkpoint: str, tmp_path: Path):
    prompts = random_trace(seed, tmp_path / "t")
    report = replay(tmp_path / "t", pools="kv,mamba,dsa", checkpoint=checkpoint)
    assert report.tokens_by_tier["device"] == state_hits(prompts, checkpoint) * BLOCK
    assert report.evicted == {"kv": {"device": 0, "host": 0}, "mamba": {"device": 0, "host": 0}}


@pytest.mark.parametrize("checkpoint", ["none", "prompt+branch"])
def test_windows_that_are_all_kept_hold_nothing_back(checkpoint: str):
    report = replay(AGENTS, pools="kv,swa", checkpoint=checkpoint)
    assert report.hit_rate == report.ceiling
    assert report.states_kept == 0


def test_a_pool_of_few_windows_serves_most_of_what_there_is():
    report = replay(AGENTS, pools="kv,swa", capacity_share="kv=1,swa=0.02")
    assert report.slots["swa"]["device"] < report.slots["kv"]["device"] // 40
    assert report.misses["swa"].keys() <= {"evicted", "not_kept"}
    assert report.reasons["window"] > 0
    assert report.hit_rate > 0.95 * report.ceiling


@pytest.mark.parametrize("policy", ["size", "lru", "fifo"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("pools", ["kv", "kv,mamba", "kv,swa,dsa", "kv,mamba,swa"])
def test_any_mixture_keeps_every_invariant(policy: str, write_policy: str, pools: str, tmp_path: Path):
    random_trace(99, tmp_path / "t", requests=60)
    names = [name for name in pools.split(",") if name != "dsa"]
    for device, host in ((0.3, 0.0), (0.3, 0.5), (0.5, 1.0), (1.0, 0.2)):
        report = replay(
            tmp_path / "t",
            pools=pools,
            window=2 * BLOCK,
            policy=policy,
            write_policy=write_policy,
            capacity_share=",".join(f"{name}={device}" for name in names),
            host_share=str(host),
        )
        assert 0 < report.hit_rate <= report.ceiling


@pytest.mark.parametrize("pools", ["kv", "kv,mamba", "kv,swa", "kv,mamba,swa"])
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_however_little_room_there_is(seed: int, pools: str, tmp_path: Path):
    prompts = random_trace(seed, tmp_path / "t")
    blocks = len({block for prompt in prompts for block in prompt})
    for slots in (1, 2, *range(max(map(len, prompts)) - 3, max(map(len, prompts)) + 4)):
        replay(
            tmp_path / "t", pools=pools, window=BLOCK, capacity_share=str(slots / blocks), host_share="0.1"
        )


# Why misses missed


def test_a_host_that_holds_everything_serves_what_the_device_cannot_keep():
    device = replay(AGENTS, pools="kv,mamba", capacity_share="0.3")
    both = replay(AGENTS, pools="kv,mamba", capacity_share="0.3", host_share="1")
    assert device.misses["kv"]["evicted"] > 0
    assert "evicted" not in both.misses["kv"]
    assert both.tokens_by_tier["host"] > 0
    assert both.hit_rate == replay(AGENTS, pools="kv,mamba").hit_rate


def test_states_that_were_evicted_are_told_from_states_that_were_never_kept():
    few = replay(AGENTS, pools="kv,mamba", capacity_share="kv=1,mamba=0.02")
    assert few.misses["mamba"]["evicted"] > few.misses["mamba"]["not_kept"]
    assert few.evicted["mamba"]["device"] > 0
    assert replay(AGENTS, pools="kv,mamba").misses["mamba"].keys() == {"not_kept"}
    none = replay(AGENTS, pools="kv,mamba", checkpoint="none")
    assert none.misses["mamba"].keys() == {"not_kept"}
    assert none.reasons["state"] > 400


def test_a_prompt_that_the_device_cannot_hold_is_counted(tmp_path: Path):
    lines = [
        {
            "timestamp_ms": n,
            "input_length": 100 + n,
            "block_size": BLOCK,
            "hash_runs": [0, (100 + n) // BLOCK],
        }
        for n in (0, 1, 50)
    ]
    (tmp_path / "t").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(tmp_path / "t", capacity_share="0.8")
    assert report.misses["kv"]["device_capacity"] == 96
    assert report.reasons == {"cold": 1, "none": 1, "device_capacity": 1}
    assert report.request_hit_rate == pytest.approx(1 / 3)


# Misuse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pools": "mamba"}, "pools 'mamba': kv, then any of"),
        ({"pools": "kv,kv"}, "pools 'kv,kv'"),
        ({"pools": "kv,ssm"}, "pools 'kv,ssm'"),
        ({"capacity_share": "0"}, "--capacity-share 0: 'kv' must be above 0"),
        ({"capacity_share": "1.5"}, "--capacity-share 1.5: must be at most 1"),
        ({"capacity_share": "-1"}, "--capacity-share -1: must be at most 1, .* not below 0"),
        ({"capacity_share": "nan"}, "--capacity-share nan: must be"),
        ({"capacity_share": "much"}, "--capacity-share much: must be a number"),
        ({"capacity_share": "kv="}, "must be a number"),
        ({"capacity_share": "mamba=0.1"}, "'mamba' is none of the pools with slots of their own"),
        ({"pools": "kv,dsa", "host_share": "dsa=0.1"}, "--host-share dsa=0.1: 'dsa' is none"),
        ({"host_share": "2"}, "--host-share 2: must be at most 1"),
        ({"window": 0}, "--window 0"),
        ({"block_size": -1}, "--block-size -1"),
        ({"checkpoint": "sometimes"}, "checkpoints 'sometimes'"),
    ],
)
def test_options_outside_their_rules_are_named(options: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        ReplayOptions(trace="t", **options)


def test_a_spacing_is_whole_blocks():
    with pytest.raises(ConfigError, match="spacing 100 must be a multiple of the page size, 512"):
        replay(CHAT, pools="kv,mamba", checkpoint="prompt+100")


# Token by token


@pytest.mark.parametrize(
    ("options", "percent", "whole"),
    first(
        1,
        [
            ({"outputs": True, "tails": True}, 96.08, 96.18),
            ({"outputs": True}, 95.03, 95.18),
            ({"tails": True}, 93.73, 93.81),
            ({}, 92.63, 92.77),
        ],
    ),
)
@pytest.mark.parametrize("trace", first(1, ["its beginning", "the whole"]))
def test_pages_outputs_and_ends_inside_a_page(
    trace: str, options: dict[str, object], percent: float, whole: float, beginnings: dict[Path, Path]
):
    tools, expected = (beginnings[TOOLS], percent) if trace == "its beginning" else (TOOLS, whole)
    assert replay(tools, page_size=64, **options).hit_rate * 100 == pytest.approx(expected, abs=0.01)


def session(path: Path, turns: list[tuple[int, int]]) -> Path:
    """A conversation in blocks of 4: prompts and outputs of these lengths, each prompt on top of the last."""
    lines = [
        {
            "timestamp_ms": number,
            "session_id": "s",
            "input_length": prompt,
            "output_length": output,
            "block_size": 4,
            "hash_runs": [0, prompt // 4] if prompt >= 4 else [],
        }
        for number, (prompt, output) in enumerate(turns)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    ("options", "hits"),
    [
        ({"page_size": 4}, 8 + 20),
        ({"page_size": 8}, 8 + 16),
        ({"page_size": 8, "tails": True}, 10 + 21),
        ({"page_size": 8, "outputs": True}, 8 + 24),
        ({"page_size": 8, "outputs": True, "tails": True}, 15 + 25),
        ({"page_size": 8, "outputs": True, "tails": True, "pools": "kv,mamba"}, 15 + 25),
    ],
)
def test_a_conversation_is_known_to_its_last_token(tmp_path: Path, options: dict[str, object], hits: int):
    trace = session(tmp_path / "trace.jsonl", [(10, 6), (21, 5), (30, 1)])

    report = replay(trace, **options)

    assert report.hit_rate * 61 == pytest.approx(hits)


def test_a_replay_by_token_has_no_windows():
    with pytest.raises(ConfigError, match="swa"):
        ReplayOptions(trace="x", pools="kv,swa", tails=True).check()
