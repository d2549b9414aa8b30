"""Shrink a script while its violation remains (after Zeller and Hildebrandt, TSE 2002).

Removing a part changes all later random draws, so each candidate is tried with a few seeds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import TypeAlias, TypeVar

import msgspec

from asynchicache_lab.chaos.hits import LEAST
from asynchicache_lab.chaos.run import ScriptReport, run_script
from asynchicache_lab.chaos.script import (
    ChaosClient,
    ClientTurn,
    DeviceFaults,
    Life,
    ModelShape,
    Script,
    Steady,
    StorageFaults,
)

T = TypeVar("T", bound=msgspec.Struct)
Place: TypeAlias = tuple[int, ...]
"""Where something is in a script: by life, client and turn, or by life and event."""
ShrinkStep: TypeAlias = Callable[[Script], Iterator[Script]]
"""Simpler scripts, those that leave most out first."""

MAX_RUNS = 1000
MAX_SECONDS = 60.0
"""Processor time; a run that never ends takes seconds."""
_NEEDED = {"prompt", "sizes", "clients", "page_size"}  # fields without a default that could replace them
SEEDS = 4
"""Seeds that a candidate is tried with."""


class Shrinker:
    """Searches for the smallest script with the same kind of violation.

    Attributes:
        runs: number of runs so far.
    """

    def __init__(
        self, run: Callable[[Script], ScriptReport] = run_script, *, most_runs: int = MAX_RUNS
    ) -> None:
        self.runs = 0
        self._run = run
        self._most = most_runs
        self._end = time.process_time() + MAX_SECONDS

    def shrink(self, script: Script, report: ScriptReport) -> tuple[Script, ScriptReport]:
        """Return the smallest script found and its report; `report` is that of `script`.

        What a request must find at least follows from the whole script, so such a finding stays as it is.
        """
        kind = violation_kind(report.violations[0])
        if kind == LEAST:
            return script, report
        before = None
        while script != before and not self._done:
            before = script
            for stage in SHRINK_STEPS:
                script, report = self._pass(stage, script, report, kind)
        return script, report

    @property
    def _done(self) -> bool:
        return self.runs >= self._most or time.process_time() > self._end

    def _pass(
        self, stage: ShrinkStep, script: Script, report: ScriptReport, kind: str
    ) -> tuple[Script, ScriptReport]:
        """Try every simplification of one stage; keep those that preserve the violation."""
        tried = 0
        while (candidate := next(islice(stage(script), tried, None), None)) is not None:
            found = self._try(candidate, kind) if candidate != script else None
            if found is None:
                tried += 1
            else:
                script, report = found  # the next candidate now has this index
        return script, report

    def _try(self, candidate: Script, kind: str) -> tuple[Script, ScriptReport] | None:
        for seed in range(candidate.seed, candidate.seed + SEEDS):
            if self._done:
                return None
            self.runs += 1
            script = msgspec.structs.replace(candidate, seed=seed)
            report = self._run(script)
            if any(violation_kind(violation) == kind for violation in report.violations):
                return script, report
        return None


def violation_kind(violation: str) -> str:
    """The kind of a violation: its text without run-specific numbers and names."""
    return re.sub(r"[0-9]+|'[^']*'", "", violation.partition(":")[0]).strip()


def _fewer_lives(script: Script) -> Iterator[Script]:
    for number in range(len(script.lives)) if len(script.lives) > 1 else ():
        lives = script.lives[:number] + script.lives[number + 1 :]
        yield msgspec.structs.replace(script, lives=lives)
    if script.together:
        yield msgspec.structs.replace(script, together=False)
    if script.last is not None:
        yield msgspec.structs.replace(script, last=None)
        yield msgspec.structs.replace(script, lives=(script.last,), last=None, together=False)
        if not script.together:
            yield msgspec.structs.replace(script, lives=script.every_life, last=None)
    if script.capacity is not None:
        yield msgspec.structs.replace(script, capacity=None)


def _turns(script: Script) -> list[Place]:
    return [
        (i, j, k)
        for i, life in enumerate(script.lives)
        for j, client in enumerate(life.clients)
        for k in range(len(client.turns))
    ]


def _events(script: Script) -> list[Place]:
    return [(i, j) for i, life in enumerate(script.lives) for j in range(len(life.events))]


def _fewer(
    script: Script,
    places: Callable[[Script], list[Place]],
    without: Callable[[Script, set[Place]], Script],
) -> Iterator[Script]:
    """Yield scripts without all places, without each half, each quarter, down to each single one."""
    there = places(script)
    size = len(there)
    while size:
        for start in range(0, len(there), size):
            yield without(script, set(there[start : start + size]))
        size //= 2


def _without_turns(script: Script, gone: set[Place]) -> Script:
    return _each_life(script, lambda i, life: _replaced(life, clients=tuple(_clients_without(life, i, gone))))


def _clients_without(life: Life, number: int, gone: set[Place]) -> Iterator[ChaosClient]:
    for j, client in enumerate(life.clients):
        turns = tuple(turn for k, turn in enumerate(client.turns) if (number, j, k) not in gone)
        if turns:
            yield _replaced(client, turns=turns)


def _without_events(script: Script, gone: set[Place]) -> Script:
    return _each_life(
        script,
        lambda i, life: _replaced(
            life, events=tuple(event for j, event in enumerate(life.events) if (i, j) not in gone)
        ),
    )


def _simpler_lives(script: Script) -> Iterator[Script]:
    """Reset each option of each life to its default, and each fault to never."""
    usual = Life(sizes={})
    for number, life in enumerate(script.lives):
        for simpler in chain(_usual(life, usual), _calmer(life)):
            yield _replaced(script, lives=_put(script.lives, number, simpler))


def _calmer(life: Life) -> Iterator[Life]:
    yield _replaced(life, storage=StorageFaults(), device=DeviceFaults())
    yield from (_replaced(life, storage=calmer) for calmer in _usual(life.storage, StorageFaults()))
    yield from (_replaced(life, device=calmer) for calmer in _usual(life.device, DeviceFaults()))
    if life.steady is not None:
        yield from (_replaced(life, steady=calmer) for calmer in _less(life.steady))
    for number, client in enumerate(life.clients):
        if client.cancel is not None:
            patient = _replaced(client, cancel=None)
            yield _replaced(life, clients=_put(life.clients, number, patient))


def _less(steady: Steady) -> Iterator[Steady]:
    """Remove one call, one client or one page."""
    for name in ("calls", "prompts"):
        items = getattr(steady, name)
        for index in range(len(items)) if len(items) > 1 else ():
            yield _replaced(steady, **{name: (*items[:index], *items[index + 1 :])})
    if steady.pages > 1:
        yield _replaced(steady, pages=steady.pages - 1)


def _simpler_turns(script: Script) -> Iterator[Script]:
    usual = ClientTurn(prompt=())
    for i, j, k in _turns(script):
        client = script.lives[i].clients[j]
        bare = ClientTurn(prompt=client.turns[k].prompt)
        for simpler in chain([bare], _usual(client.turns[k], usual), _shorter(client.turns[k])):
            changed = _replaced(client, turns=_put(client.turns, k, simpler))
            life = _replaced(script.lives[i], clients=_put(script.lives[i].clients, j, changed))
            yield _replaced(script, lives=_put(script.lives, i, life))


def _shorter(turn: ClientTurn) -> Iterator[ClientTurn]:
    for length in (len(turn.prompt) // 2, len(turn.prompt) - 1):
        if 0 < length < len(turn.prompt):
            yield _replaced(turn, prompt=turn.prompt[:length], stops=())


def _simpler_models(script: Script) -> Iterator[Script]:
    """Remove one kind of pool."""
    for model in _usual(script.model, ModelShape(page_size=script.model.page_size)):
        names = {pool.name for pool in model.spec().owners}
        last = None if script.last is None else _with_pools(script.last, names)
        lives = tuple(_with_pools(life, names) for life in script.lives)
        yield _replaced(script, model=model, lives=lives, last=last)


def _with_pools(life: Life, names: set[str]) -> Life:
    return _replaced(life, sizes={name: sizes for name, sizes in life.sizes.items() if name in names})


def _usual(given: T, usual: T) -> Iterator[T]:
    """Reset each field in turn to its usual value, if it differs."""
    for name in given.__struct_fields__:
        if name not in _NEEDED and getattr(given, name) != getattr(usual, name):
            yield _replaced(given, **{name: getattr(usual, name)})


def _each_life(script: Script, change: Callable[[int, Life], Life]) -> Script:
    return _replaced(script, lives=tuple(change(i, life) for i, life in enumerate(script.lives)))


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _replaced(given: T, **changes: object) -> T:
    return msgspec.structs.replace(given, **changes)


SHRINK_STEPS: tuple[ShrinkStep, ...] = (
    _fewer_lives,
    partial(_fewer, places=_turns, without=_without_turns),
    partial(_fewer, places=_events, without=_without_events),
    _simpler_lives,
    _simpler_turns,
    _simpler_models,
)
"""What is tried, what leaves most out first."""
