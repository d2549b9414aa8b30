"""Reading traces: what is accepted, and what is refused with the line that is at fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from asynchicache.bench.replay.survey import survey
from asynchicache.bench.replay.trace import read_trace
from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy

GOOD = {"timestamp_ms": 5, "input_length": 10, "block_size": 4, "hash_runs": [7, 2]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def blocks(path: Path, block_size: int = 0) -> list[list[int]]:
    return [request.blocks().tolist() for request in read_trace(path, block_size).requests]


def test_ids_are_renumbered_without_gaps(tmp_path: Path):
    file = write(
        tmp_path / "t.jsonl",
        GOOD | {"hash_runs": [1 << 60, 2]},
        GOOD | {"hash_runs": [3, 1, 9, 1]},
        GOOD | {"hash_runs": [1 << 60, 1, 10, 1], "timestamp_ms": 2005},
    )
    trace = read_trace(file)
    assert [request.blocks().tolist() for request in trace.requests] == [[3, 4], [0, 1], [3, 2]]
    assert (trace.blocks, trace.block_size, trace.seconds, trace.prompt_tokens) == (5, 4, 2.0, 30)


def test_overlapping_runs_keep_what_they_share(tmp_path: Path):
    long = GOOD | {"input_length": 16, "hash_runs": [5, 4]}
    file = write(
        tmp_path / "t.jsonl", long, GOOD | {"hash_runs": [5, 2]}, long | {"hash_runs": [5, 3, 40, 1]}
    )
    assert blocks(file) == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 4]]


def test_a_last_block_that_is_not_whole_is_left_out(tmp_path: Path):
    file = write(
        tmp_path / "t.jsonl", GOOD | {"hash_runs": [7, 3]}, GOOD | {"hash_runs": [7, 1, 9, 1, 11, 1]}
    )
    assert blocks(file) == [[0, 1], [0, 2]]


def test_packed_and_plain_and_both_ways_to_write_ids_are_the_same(tmp_path: Path):
    plain = write(tmp_path / "plain.jsonl", GOOD)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    original = write(tmp_path / "m.jsonl", {"timestamp": 5, "input_length": 10, "hash_ids": [7, 8, 9]})
    assert blocks(plain) == blocks(packed) == blocks(original, block_size=4) == [[0, 1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "line 2: block_size 0 must be 1 token at least; --block-size"),
        ({"block_size": 5}, "line 2: block_size is 5, and 4 before"),
        ({"timestamp_ms": 4}, "line 2: it is earlier than the line before"),
        ({"timestamp_ms": None}, "line 2: timestamp_ms is missing"),
        ({"input_length": 0}, "line 2: input_length 0 must be 1 to"),
        ({"input_length": 1 << 40}, "line 2: input_length 1099511627776 must be 1 to"),
        ({"hash_runs": None}, "line 2: hash_runs or hash_ids is missing, or both"),
        ({"hash_ids": [7, 8]}, "line 2: hash_runs or hash_ids is missing, or both"),
        ({"hash_runs": [7]}, "line 2: hash_runs has 1 numbers"),
        ({"hash_runs": [7, 0]}, "line 2: ids must be 0 to .*, and counts of runs 1 at least"),
        ({"hash_runs": [-1, 2]}, "line 2: ids must be 0 to"),
        ({"hash_runs": [7, 4]}, "line 2: 4 ids for 2 whole blocks of the prompt and 2 more tokens"),
        ({"hash_runs": "7"}, r"line 2: Expected `array \| null`, got `str`"),
    ],
)
def test_a_line_outside_the_rules_is_named(tmp_path: Path, change: dict[str, object], words: str):
    file = write(tmp_path / "t.jsonl", GOOD, GOOD | change)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


@pytest.mark.parametrize("key", ["input_length", "timestamp_ms", "block_size", "hash_runs"])
def test_a_missing_key_is_named(tmp_path: Path, key: str):
    file = write(tmp_path / "t.jsonl", {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(ConfigError, match=rf"line 1: .*{key}"):
        read_trace(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"not a trace\n", "line 1: JSON is malformed"),
        (b"\x1f\x8bnot gzip at all", "cannot be read"),
        (gzip.compress(json.dumps(GOOD).encode(), mtime=0)[:-12], "cannot be read"),
        (b"\n", "line 1"),
        (b"[1]\n", "line 1: Expected `object`"),
        (b"\x80\x81\n", "line 1"),
        (json.dumps(GOOD | {"input_length": 3, "hash_runs": []}).encode(), "no prompt has a whole block"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "t"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        read_trace(tmp_path / "nowhere")


def test_ids_that_are_not_chained_are_refused(tmp_path: Path):
    file = write(tmp_path / "t.jsonl", GOOD | {"hash_runs": [7, 2]}, GOOD | {"hash_runs": [3, 1, 8, 1]})
    with pytest.raises(ConfigError, match="request 2 of the trace has a known block behind an unknown one"):
        survey(read_trace(file), CheckpointPolicy())


def test_the_survey_counts_what_comes_back_and_where_states_go(tmp_path: Path):
    file = write(
        tmp_path / "t.jsonl",
        GOOD | {"input_length": 14, "hash_runs": [0, 3]},
        GOOD | {"input_length": 14, "hash_runs": [0, 2, 10, 1]},
        GOOD | {"input_length": 8, "hash_runs": [0, 2]},  # whole: its last block has the token to compute
    )
    trace = read_trace(file)
    assert survey(trace, CheckpointPolicy()).known == [0, 2, 1]
    assert survey(trace, CheckpointPolicy(branch=False)).states == 3  # behind blocks 2, 10, and 1
    assert survey(trace, CheckpointPolicy()).states == 4  # and behind 0, where the third branches off
    assert survey(trace, CheckpointPolicy(prompt=False, branch=False, spacing=2)).states == 1
    assert survey(trace, CheckpointPolicy()).longest == 4
