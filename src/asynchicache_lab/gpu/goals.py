"""What the figures of `make gpu` are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

POOLS = ("mha", "dsa", "mamba", "mla", "swa")
"""Of `bench transfer`, those first of whose rows goals need most."""

SMALL_POOLS = ("mha", "dsa")
"""Those with pages or runs of 4 to 16 KiB."""

Benches: TypeAlias = dict[str, dict[str, Any]]
"""By name, what a bench reported, and whether it came to its end (`whole`)."""

Rows: TypeAlias = Mapping[str, Sequence[dict[str, Any]]]
"""By step, what it printed; of a bench the last is the report."""

_LARGE = 64 << 10
_WANTED_SHARE, _WANTED_GAIN = 0.9, 3.0
_WANTED_OVERLAP, _WANTED_OF_SERIAL, _WANTED_HOST_US = 1.10, 1.0, 20.0
_HIT, _WANTED_OF_COMPUTED = 8192, 0.1


class Goal(TypedDict):
    """A figure and what it is to be; a miss is reported and fails nothing.

    Attributes:
        name: what is measured.
        value: the worst of all rows; None without any.
        wanted: what it is to reach, or to stay below.
        met: None if that is not shown, as `note` says why.
        note: the row of `value`, and what is in doubt.
    """

    name: str
    value: float | None
    wanted: float
    met: bool | None
    note: str


def goals(rows: Rows) -> Iterator[Goal]:
    """What the figures are held against.

    Args:
        rows: of steps.
    """
    yield from bench_goals({name: some[-1] for name, some in rows.items() if some})
    times = {row["what"]: float(row["ttft_ms"]) for row in rows.get("models", ()) if _is_hit(row)}
    name = f"first token of {_HIT:,} tokens from the host, of computing them"
    shown = {"computed", "host"} <= times.keys()
    ratio = [(times["host"] / times["computed"], {"pinned": True})] if shown else []
    yield _goal(name, ratio, _WANTED_OF_COMPUTED, "", least=False)


def _is_hit(row: dict[str, Any]) -> bool:
    """Whether it is a row of the dense model, of the length that counts, and from where it says."""
    of_host = row.get("what") != "host" or "host" in row["tiers"]
    return row["model"] == "dense" and row.get("length") == _HIT and "ttft_ms" in row and of_host


def bench_goals(benches: Benches) -> Iterator[Goal]:
    """What the benches are held against: the worst of all rows.

    Without pinned memory nothing is shown, as what copies are held against is slow, too; and where rows are
    missing, or bytes were wrong, those that are there can miss a goal, but not meet it.
    """
    rows = rows_of(benches, "transfer")
    for direction in ("load", "backup"):
        for size in ("page", "run"):
            some = [row for row in rows if row["direction"] == direction and row[f"{size}_bytes"] >= _LARGE]
            name = f"{direction}: share of a plain copy, {size}s of 64 KiB up"
            lost = _lost(benches, *(f"transfer, {pool}" for pool in POOLS))
            yield _goal(name, [(row["ratio"], row) for row in some], _WANTED_SHARE, lost)
    gains = [(row["gain"], row) for row in rows if row["gain"] is not None]
    name = "times the speed of single copies, pages or runs of 4 to 16 KiB"
    yield _goal(name, gains, _WANTED_GAIN, _lost(benches, *(f"transfer, {pool}" for pool in SMALL_POOLS)))
    yield from _overlap_goals(benches.get("overlap", {}), _lost(benches, "overlap"))


def _overlap_goals(bench: dict[str, Any], lost: str) -> Iterator[Goal]:
    rows = [{**row, "pinned": bench["pinned"]} for row in bench.get("rows", [])]
    ideal = [(row["layerwise_ms"] / row["ideal_ms"], row) for row in rows]
    yield _goal("layer-wise loading, of the ideal", ideal, _WANTED_OVERLAP, lost, least=False)
    serial = [(row["layerwise_ms"] / row["serial_ms"], row) for row in rows]
    yield _goal("layer-wise loading, of loading first", serial, _WANTED_OF_SERIAL, lost, least=False)
    host = [(bench["submit_us_per_layer"], row) for row in rows[:1]]
    yield _goal("host, microseconds a layer", host, _WANTED_HOST_US, lost, least=False)


def rows_of(benches: Benches, name: str) -> list[dict[str, Any]]:
    """Of all pools."""
    return [row for pool in POOLS for row in benches.get(f"{name}, {pool}", {}).get("rows", [])]


def _lost(benches: Benches, *names: str) -> str:
    """Which benches did not come to their end, or moved wrong bytes, in words."""
    found = {name: benches.get(name, {}) for name in names}
    lost = [name for name, bench in found.items() if not (bench.get("whole") and bench.get("ok"))]
    return f"cut or wrong: {'; '.join(lost)}" if lost else ""


def _goal(
    name: str, found: Sequence[tuple[float, dict[str, Any]]], wanted: float, lost: str, *, least: bool = True
) -> Goal:
    """Of values and the rows that they are of; `least`: they are to reach `wanted`, else to stay below."""
    if not found:
        return Goal(name=name, value=None, wanted=wanted, met=None, note=lost or "no such rows")
    value, row = (min if least else max)(found, key=lambda one: one[0])
    unpinned = "" if all(row["pinned"] for _, row in found) else "host memory was not pinned"
    met: bool | None = value >= wanted if least else value < wanted
    if unpinned or (met and lost):
        met = None
    note = ", ".join(part for part in (_words(row), unpinned, lost) if part)
    return Goal(name=name, value=round(value, 3), wanted=wanted, met=met, note=note)


def _words(row: dict[str, Any]) -> str:
    """Which row of `bench transfer` it is."""
    if "pool" not in row:
        return ""
    return f"{row['pool']}, {row['layout']}, {row['page_bytes']:,} B in {row['run_bytes']:,}, {row['path']}"
