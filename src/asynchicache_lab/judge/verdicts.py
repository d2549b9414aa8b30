"""Runs the cases, compares answers with those of an engine without a cache, and shows the table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from asynchicache_lab.judge.caches import Cache
from asynchicache_lab.judge.cases import CASES, Case, Leak, Steps
from asynchicache_lab.judge.servers import Forks, JudgedAnswer, JudgedServerError, Place, Server, ServerLife
from asynchicache_lab.judge.trial import EVENTS, CacheTrial, Question, TrialOptions, Witness

OK, LOST = "ok", "lost"
RED = ("WRONG", "FAILED", "LEAK")
"""Wrong tokens; a request or a start that failed, or hung; what belongs to others was served."""


@dataclass(eq=False)
class Verdict:
    """A cell of the table.

    Attributes:
        cache: its name.
        case: its name.
        word: `ok`, `lost` (right, but nothing of what was promised was served), `has no ...` (what the case
            needs), or one of `RED`.
        seen: what was seen, of red ones.
        promised: tokens, as of `Witness`.
        served: tokens.
        recovered: seconds; None if nothing was to be recovered.
    """

    cache: str
    case: str
    word: str = OK
    seen: str = ""
    promised: int = 0
    served: int = 0
    recovered: float | None = None

    @property
    def cell(self) -> str:
        return f"{self.word} {self.served}/{self.promised}" if self.promised else self.word


class _Run(NamedTuple):
    case: Case
    witness: Witness
    steps: Steps
    verdict: Verdict


class References:
    """What an engine without a cache answers; asked for once, and kept in a file.

    Args:
        cache: whose engine it is.
        place: where the engine is installed.
        forks: where its servers come from.
        file: where answers are kept, with engine, version and model in their names.
    """

    def __init__(self, cache: Cache, place: Place, forks: Forks, file: Path) -> None:
        self._engine, self._place, self._forks, self._file = cache.engine, place, forks, file
        self._known: dict[str, JudgedAnswer] = {}
        if file.exists():
            self._known = {
                name: JudgedAnswer(*fields) for name, fields in json.loads(file.read_text()).items()
            }

    def ask(self, questions: Iterable[Question]) -> None:
        """Ask for what is not known, in one start for each model and version of the adapter.

        Raises:
            JudgedServerError: the engine alone cannot answer.
        """
        missing = {question for question in questions if self._name(question) not in self._known}
        for weights, adapter in sorted({(each.weights, each.adapter) for each in missing}, reverse=True):
            same = (each for each in missing if each.weights == weights and each.adapter in {0, adapter})
            if mine := sorted(same):
                missing.difference_update(mine)
                self._ask(weights, adapter, mine)
        self._file.write_text(json.dumps(self._known))

    def _ask(self, weights: str, adapter: int, questions: Sequence[Question]) -> None:
        models = self._place.models
        with_adapter = models[f"adapter{adapter}"] if adapter else None
        life = ServerLife(models[weights], with_adapter, weights == "hybrid", self._engine.uncached, {})
        server = Server(self._engine, self._forks, life, self._file.with_suffix(".log"))
        try:
            for number, each in enumerate(questions):
                salt, named = f"reference {number}", each.adapter > 0
                answer = server.ask(each.prompt, new=each.new, salt=salt, adapter=named)
                if answer.cached:
                    raise JudgedServerError(f"took {answer.cached} tokens from a cache, without one")
                self._known[self._name(each)] = answer
        finally:
            server.kill()

    def difference(self, given: TrialOptions) -> str:
        """What is wrong with an answer; empty if nothing is."""
        tolerance = self._engine.tolerance[given.question.weights == "hybrid"]
        found = compare(given.answer, self._known[self._name(given.question)], tolerance)
        prompt = len(given.question.prompt)
        return found and f"{given.life}: prompt of {prompt} tokens, {given.answer.cached} cached: {found}"

    def _name(self, question: Question) -> str:
        about = (self._place.version, str(self._place.models[question.weights]), *question)
        return sha256(repr(about).encode()).hexdigest()


def compare(answer: JudgedAnswer, right: JudgedAnswer, tolerance: float) -> str:
    """How an answer differs from the right one, by more than rounding does; empty if it does not."""
    for place, (token, other) in enumerate(zip(answer.tokens, right.tokens, strict=True)):
        if token != other:
            behind = right.logprobs[place] - right.ranked[place].get(token, -math.inf)
            if behind <= 2 * tolerance:
                return ""  # a tie; what follows is another text
            return f"token {place} is {token}, not {other}, which leads by {behind:.2g} nats"
        off = abs(answer.logprobs[place] - right.logprobs[place])
        if not off <= tolerance:
            return f"token {place} has a log probability that is off by {off:.2g}"
    return ""


def judge(
    trial: CacheTrial, cases: Sequence[Case], references: References, said: Callable[[str], None]
) -> list[Verdict]:
    """Run the cases in one sequence of lives of a cache; `said` is told of each.

    Raises:
        JudgedServerError: it does not start at all, or its engine without a cache does not.
    """
    runs = []
    for case in cases:
        possible = not case.needs or case.needs in trial.cache.engine.verbs
        witness = Witness(trial, case.name)
        verdict = Verdict(trial.cache.name, case.name, OK if possible else f"has no {case.needs}s")
        runs.append(_Run(case, witness, case.run(witness), verdict))
    try:
        trial.start()
        _live(trial, runs, said)
    finally:
        trial.kill()
    said("without a cache")
    references.ask(given.question for run in runs for given in run.witness.given)
    for run in runs:
        _sentence(run, [references.difference(given) for given in run.witness.given])
    return [run.verdict for run in runs]


def _live(trial: CacheTrial, runs: Sequence[_Run], said: Callable[[str], None]) -> None:
    waiting: dict[str, list[_Run]] = {}
    _advance(trial, [run for run in runs if run.verdict.word == OK], waiting)
    for event, happen in EVENTS.items():
        if not (here := waiting.pop(event, [])):
            continue
        trial.life = f"after {event}"
        said(trial.life)
        try:
            trial.renew_if_dead()
            happen(trial)
        except JudgedServerError as error:
            for run in here:
                run.verdict.word, run.verdict.seen = "FAILED", f"at {event}: it {error}"
        else:
            _advance(trial, here, waiting)


def _advance(trial: CacheTrial, runs: Iterable[_Run], waiting: dict[str, list[_Run]]) -> None:
    """Let cases go on to the event that they wait for next."""
    for run in runs:
        try:
            trial.renew_if_dead()
            event = next(run.steps, None)
        except Leak as leak:
            run.verdict.word, run.verdict.seen = "LEAK", f"{trial.life}: {leak}"
        except JudgedServerError as error:
            run.verdict.word, run.verdict.seen = "FAILED", f"{trial.life}: {error}"
        else:
            if event is not None:
                waiting.setdefault(event, []).append(run)


def _sentence(run: _Run, differences: Sequence[str]) -> None:
    verdict, witness = run.verdict, run.witness
    verdict.promised, verdict.served = witness.promised, witness.served
    verdict.recovered = witness.recovered
    wrong = [difference for difference in differences if difference]
    if wrong:
        verdict.word = "WRONG"
        verdict.seen = f"{len(wrong)} of {len(differences)} answers; {wrong[0]}"
    elif verdict.word == OK and verdict.promised and not verdict.served:
        verdict.word = LOST


def show(verdicts: Sequence[Verdict], versions: Mapping[str, str], command: str) -> str:
    """The table in Markdown, and what reproduces every cell that is not right."""
    names = list(dict.fromkeys(verdict.cache for verdict in verdicts))
    cells = {(verdict.cache, verdict.case): verdict for verdict in verdicts}
    rows = [["", *names], ["---"] * (len(names) + 1)]
    for case in CASES:
        found = [cells.get((name, case.name)) for name in names]
        if any(found):
            rows.append([case.name, *(verdict.cell if verdict else "" for verdict in found)])
    rows.append(["version", *(versions[name] for name in names)])
    recovered = [cells.get((name, "kill")) for name in names]
    rows.append(["recovery", *(_seconds(verdict) for verdict in recovered)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for verdict in verdicts:
        if verdict.word in RED:
            lines += ["", f"{verdict.cache}, {verdict.case}: {verdict.word}: {verdict.seen}"]
            lines += [f"    {command.format(cache=verdict.cache, case=verdict.case)}"]
    return "\n".join(lines)


def _seconds(verdict: Verdict | None) -> str:
    return f"{verdict.recovered:.0f} s" if verdict and verdict.recovered is not None else ""


def as_json(verdicts: Sequence[Verdict]) -> str:
    return json.dumps([asdict(verdict) for verdict in verdicts], indent=1)
