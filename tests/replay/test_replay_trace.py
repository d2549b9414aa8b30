"""Reading traces: what is accepted, and what is refused with the line that is at fault."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.replay.survey import survey
from asynchicache.replay.trace import read_trace

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


LINE = {"timestamp": 5, "input_length": 10, "output_length": 1, "hash_ids": [7, 8, 9]}
"""As in Mooncake's traces."""


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf%s\n%s\n",
        b"\n%s\n\n \r\n%s\n\n",
        b"%s\r\n%s",
        b"[%s,\n%s]",
        b"[\n  %s, %s\n]\n",
        b'%s\n%s\n{"timestamp": 9, "input_le',  # its writer was killed
        b'%s\n%s\n{"timestamp": 9, "hash_ids": [7, 8]',
    ],
)
@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_a_trace_may_be_laid_out_and_packed_as_people_do(
    tmp_path: Path, content: bytes, packed: Callable[[bytes], bytes]
):
    file = tmp_path / "t"
    text = json.dumps(LINE).encode()
    file.write_bytes(packed(content.replace(b"%s", text)))
    assert blocks(file, block_size=4) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    "ids",
    [
        [2**64 - 1, 17 * 10**18],
        [2**64 - 1, 0],
        [-1, 0],
        [-5, -1],
        ["ab12", "cd"],
        ["0x1", "1"],
        ["12", "cd"],  # digits alone in the other line
        [1 << 127, 3],
    ],
)
def test_blocks_may_be_named_by_hashes_of_any_kind(tmp_path: Path, ids: list[int | str]):
    other = "34" if isinstance(ids[1], str) else 77
    file = write(tmp_path / "t.jsonl", LINE | {"hash_ids": ids}, LINE | {"hash_ids": [*ids[:1], other]})
    first, second = blocks(file, block_size=4)
    assert first[0] == second[0]
    assert len({*first, *second}) == 3


@pytest.mark.parametrize(
    ("changes", "arrivals", "sessions"),
    [
        ([{"timestamp": 9}, {"timestamp": 5}], [1, 0], [None, None]),
        ([{"timestamp": "1753780607550317897"}, {"timestamp": "1753780607550000000"}], [1, 0], [None] * 2),
        ([{"session_id": 7}, {"session_id": 7, "timestamp": None, "delay": 500}], [0, 1], ["7", "7"]),
        ([{"timestamp": None}, {"timestamp": None}], [0, 1], [None, None]),
        (
            [{"chat_id": 159, "parent_chat_id": -1, "turn": 1}, {"chat_id": 160, "parent_chat_id": 159}],
            [0, 1],
            ["159", "159"],
        ),
        ([{"output_length": None}, {"output_length": 1.5}], [0, 1], [None, None]),
        ([{"input_length": None, "hash_ids": [7, 8]}, {"input_length": 10.0}], [0, 1], [None, None]),
    ],
)
def test_times_sessions_and_lengths_are_read_as_others_write_them(
    tmp_path: Path, changes: list[dict[str, object]], arrivals: list[int], sessions: list[str | None]
):
    lines = [LINE | change | {"mark": number} for number, change in enumerate(changes)]
    lines[1]["hash_ids"] = [9, 10, 11]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines), 4)
    assert [int(request.blocks()[0] >= 2) for request in trace.requests] == arrivals
    assert [request.session for request in trace.requests] == sessions


def test_times_of_chats_are_seconds_and_a_delay_counts_from_the_turn_before(tmp_path: Path):
    chats = [LINE | {"chat_id": n, "timestamp": 61.5 + n, "block_size": 4} for n in (0, 1)]
    assert read_trace(write(tmp_path / "qwen", *chats)).seconds == 1
    turns: list[dict[str, object]] = [
        LINE | {"session_id": "a"},
        LINE | {"session_id": "b", "timestamp": 900},
    ]
    later = {name: value for name, value in LINE.items() if name != "timestamp"}
    turns.append(later | {"session_id": "a", "delay": 2000})
    assert read_trace(write(tmp_path / "closed", *turns), 4).seconds == 2
    own = LINE | {"chat_id": 1, "input_length": 40}
    assert read_trace(write(tmp_path / "size", own)).block_size == 16


def test_requests_without_a_prompt_are_left_out_and_counted(tmp_path: Path):
    empty = [LINE | {"input_length": 0, "hash_ids": []}, {"timestamp": 6, "input_length": 0}]
    trace = read_trace(write(tmp_path / "t.jsonl", LINE, *empty, LINE), 4)
    assert (len(trace.requests), trace.skipped) == (2, 2)


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "t.zst"
    file.write_bytes(zstandard.compress(json.dumps(LINE).encode()))
    monkeypatch.setattr("asynchicache.replay.trace_file.zstandard", None)
    with pytest.raises(ConfigError, match=r"by zstd: pip install 'asynchicache\[zstd\]', or unzstd it"):
        read_trace(file, 4)


@pytest.mark.parametrize("kind", ["consecutive", "hashes", "hex"])
def test_reading_takes_less_than_three_times_the_file(tmp_path: Path, kind: str):
    chance, talk, lines, count = random.Random(1), list[object](), list[dict[str, object]](), 0
    for number in range(100):
        talk = [] if len(talk) > 1000 else talk
        for _ in range(30):
            count += 1
            one = chance.getrandbits(64)
            talk.append(count if kind == "consecutive" else one if kind == "hashes" else f"{one:016x}")
        lines.append({"timestamp": number, "input_length": 4 * len(talk) + 1, "hash_ids": list(talk)})
    file = write(tmp_path / "t.jsonl", *lines)
    del lines, talk
    tracemalloc.start()
    try:
        trace = read_trace(file, 4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.blocks == count
    assert peak < 3 * file.stat().st_size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "line 2: --block-size gives the tokens of a block: block_size is missing"),
        ({"block_size": -4}, "line 2: block_size -4 must be 1 token at least"),
        ({"block_size": 5}, "line 2: block_size is 5, and 4 before"),
        ({"timestamp_ms": "noon"}, "line 2: timestamp 'noon' must be a number of milliseconds"),
        ({"input_length": -1}, "line 2: input_length -1 must be 0 to"),
        ({"input_length": 1 << 40}, "line 2: input_length 1099511627776 must be 0 to"),
        ({"input_length": None, "hash_runs": None}, "line 2: input_length and hash_ids are missing"),
        ({"hash_runs": None}, "line 2: hash_runs or hash_ids is missing, or both"),
        ({"hash_ids": [7, 8]}, "line 2: hash_runs or hash_ids is missing, or both"),
        ({"hash_runs": [7]}, "line 2: hash_runs has 1 numbers"),
        ({"hash_runs": [7, 0]}, "line 2: counts of runs must be 1 to"),
        ({"hash_runs": [-1, 2]}, "line 2: ids of runs must be 0 to 18446744073709551615"),
        ({"hash_runs": [2**64 - 1, 2]}, "line 2: ids of runs must be 0 to"),
        ({"repeats": [-1]}, "line 2: hint repeats .* must be 4 lengths at most"),
        ({"hash_runs": [7, 4]}, "line 2: 4 ids for 2 whole blocks of 4 tokens and 2 more; see --block-size"),
        ({"hash_runs": "7"}, r"line 2: Expected `array \| null`, got `str`"),
    ],
)
def test_a_line_outside_the_rules_is_named(tmp_path: Path, change: dict[str, object], words: str):
    file = write(tmp_path / "t.jsonl", GOOD, GOOD | change)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


@pytest.mark.parametrize("key", ["block_size", "hash_runs"])
def test_a_missing_key_is_named(tmp_path: Path, key: str):
    file = write(tmp_path / "t.jsonl", {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(ConfigError, match=rf"line 1: .*{key}"):
        read_trace(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (zstandard.compress(b'{"timestamp": 9}' * 9)[:-3], "was cut in its first line"),
        (
            b"not a trace\n",
            "line 1: 'not a trace' looks like plain text; wanted is JSON with one request a line",
        ),
        (
            b"Timestamp,Model,Request tokens\n5,ChatGPT,472\n",
            "line 1: 'Timestamp.*' looks like CSV; wanted is",
        ),
        (b"PAR1\x15\x04", "line 1: the file is no text; wanted is"),
        (b"\xff\xfe{\0", "line 1: the file is no text"),
        (
            b'{"prompt": "hi"}\n',
            "line 1: .* missing: it has prompt, and no ids of blocks; wanted is .*`serve --record-trace`",
        ),
        (
            b'{"id": "x", "requests": [{"in": 640}]}',
            "line 1: .* it has id, requests, and no ids of blocks; wanted",
        ),
        (b"[1, 2\n", "begins as a JSON array and is none"),
        (
            b'{"input_length": 4,\n"hash_ids": [1]}\n',
            "line 1: .*truncated.*; wanted is JSON with one request a line",
        ),
        (b"\x28\xb5\x2f\xfdnot zstd at all", "cannot be read"),
        (b"\x1f\x8bnot gzip at all", "cannot be read"),
        (gzip.compress(json.dumps(GOOD).encode(), mtime=0)[:-12], "cannot be read"),
        (b"\n\n", "is empty"),
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
    with pytest.raises(
        ConfigError, match=r"trace '.*t.jsonl', request 2 by time: a known block .* --chain-ids"
    ):
        survey(read_trace(file), CheckpointPolicy())


def test_ids_of_single_blocks_are_chained_if_asked(tmp_path: Path):
    file = write(tmp_path / "t.jsonl", LINE, LINE | {"hash_ids": [3, 8, 9]}, LINE | {"hash_ids": [7, 8, 2]})
    trace = read_trace(file, 4, chained=False)
    first, second, third = (request.blocks().tolist() for request in trace.requests)
    assert first == third
    assert not set(first) & set(second)
    assert survey(trace, CheckpointPolicy()).known == [0, 0, 2]


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
