"""One cache through its lives: what is done to it between the steps of cases, and what it answered."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from asynchicache_lab.judge.caches import Cache
from asynchicache_lab.judge.servers import (
    MAX_TOKENS,
    Forks,
    JudgedAnswer,
    JudgedServerError,
    Place,
    Prompt,
    Server,
    ServerLife,
)

_QUIET_SECONDS = 1.0
"""A folder in which nothing has changed for so long is written."""
_SETTLE_SECONDS = 30.0
_DAMAGED_SHARE = 4096
"""One byte in so many is damaged."""


class Question(NamedTuple):
    """What an answer depends on, and nothing else.

    Attributes:
        weights: name of the checkpoint in `Place.models`.
        adapter: version of the adapter; 0 for none.
        prompt: token ids.
        new: tokens to generate.
    """

    weights: str
    adapter: int
    prompt: tuple[int, ...]
    new: int


class TrialOptions(NamedTuple):
    """An answer, and when it was given."""

    question: Question
    answer: JudgedAnswer
    life: str


class CacheTrial:
    """A cache under trial: its server, its storage, and the weights that its operator has given to it.

    Args:
        cache: the cache.
        place: where its engine is installed.
        forks: where its servers come from.
        folder: an empty one, for storage, links and logs.
    """

    def __init__(self, cache: Cache, place: Place, forks: Forks, folder: Path) -> None:
        self.cache, self._place, self._forks, self._folder = cache, place, forks, folder
        self.store = folder / "store"
        self.weights, self.adapter, self.life = "a", 0, "first start"
        self._server: Server | None = None
        self.began = 0.0
        self._random = random.Random(1)

    @property
    def server(self) -> Server:
        """
        Raises:
            JudgedServerError: it has ended, or never started.
        """
        if self._server is None or not self._server.alive:
            raise JudgedServerError("the server has ended")
        return self._server

    @property
    def other_weights(self) -> Path:
        return self._place.models["b"]

    def start(self) -> None:
        """Start it: other weights and another adapter are at the same paths as those before."""
        self.store.mkdir(exist_ok=True)
        model = self._link("model", self._place.models[self.weights])
        adapter = (
            self._link("adapter", self._place.models[f"adapter{self.adapter}"]) if self.adapter else None
        )
        options, variables = self.cache.options(self.store), self.cache.environment(self.store)
        life = ServerLife(model, adapter, self.weights == "hybrid", options, variables)
        self.began = time.monotonic()
        self._server = Server(self.cache.engine, self._forks, life, self._folder / "server.log")

    def _link(self, name: str, target: Path) -> Path:
        link = self._folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        return link

    def stop(self) -> None:
        self.settle()
        self.server.stop()

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def kill_under_load(self) -> None:
        """Kill it while it computes and writes what nobody will ask for again."""
        self.settle()
        server = self.server
        with ThreadPoolExecutor(4) as clients:
            for _ in range(4):
                clients.submit(server.abandon, self.noise(700), 2.0)
            time.sleep(0.5)
            server.kill()

    def renew_if_dead(self) -> None:
        """After a failure in another case: begin with an empty folder, if anything starts at all."""
        if self._server is None or not self._server.healthy:
            self.kill()
            self.empty()
            self.start()

    def empty(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)

    def settle(self) -> None:
        """Wait until storage is written: a request carries what is left, then the folder stays as it is."""
        self.server.ask(self.noise(40), new=2)
        end = time.monotonic() + _SETTLE_SECONDS
        before: object = None
        while time.monotonic() < end and before != (now := self._footprint()):
            before = now
            time.sleep(_QUIET_SECONDS)

    def _footprint(self) -> list[tuple[str, int, int]]:
        found = []
        for path in self._files():
            try:
                about = path.stat()
            except FileNotFoundError:
                continue
            found.append((str(path), about.st_blocks, about.st_mtime_ns))
        return sorted(found)

    def _data(self) -> list[Path]:
        """Files of some size; what a store says of itself in a few words is not data."""
        return [path for path in self._files() if path.stat().st_size >= _DAMAGED_SHARE]

    def _files(self) -> list[Path]:
        return [path for path in self.store.rglob("*") if path.is_file()]

    def damage(self) -> None:
        """Change a byte here and there, in every file of the storage that holds data."""
        chance = random.Random(7)
        for path in sorted(self._data()):
            with path.open("r+b") as file, mmap(file.fileno(), 0) as data:
                for start in range(0, len(data) - _DAMAGED_SHARE + 1, _DAMAGED_SHARE):
                    data[start + chance.randrange(_DAMAGED_SHARE)] ^= 0x5A

    def truncate(self) -> None:
        """Take the second half of every such file."""
        for path in self._data():
            os.truncate(path, path.stat().st_size // 2)

    def lose(self) -> None:
        """Take the storage's folder away under the running server."""
        self.store.rename(self._folder / "away")

    def bring_back(self) -> None:
        self.empty()
        (self._folder / "away").rename(self.store)

    def noise(self, length: int) -> list[int]:
        """A prompt that no case asks for."""
        return [self._random.randrange(3, 500) for _ in range(length)]

    def crowd_out(self) -> None:
        """Ask for three times what the device holds."""
        for _ in range(6):
            self.server.ask(self.noise(MAX_TOKENS - 50), new=1)


def _restart(trial: CacheTrial) -> None:
    trial.stop()
    trial.start()


def _kill(trial: CacheTrial) -> None:
    trial.kill_under_load()
    trial.start()


def _update(trial: CacheTrial) -> None:
    trial.cache.engine.update(trial.server, trial.other_weights)
    trial.weights = "b"


def _with(weights: str, adapter: int = 0) -> Callable[[CacheTrial], None]:
    def restart(trial: CacheTrial) -> None:
        trial.stop()
        trial.weights = weights
        trial.adapter = adapter if "adapter" in trial.cache.engine.verbs else 0
        trial.start()

    return restart


def _hurt(hurt: Callable[[CacheTrial], None]) -> Callable[[CacheTrial], None]:
    def restart(trial: CacheTrial) -> None:
        trial.stop()
        hurt(trial)
        trial.start()

    return restart


def _hybrid(trial: CacheTrial) -> None:
    trial.stop()
    trial.empty()
    trial.weights, trial.adapter = "hybrid", 0
    trial.start()


EVENTS: Mapping[str, Callable[[CacheTrial], None]] = {
    "restart": _restart,
    "kill": _kill,
    "update in place": _update,
    "back": _with("a", 1),
    "adapter trained again": _with("a", 2),
    "weights changed": _with("b"),
    "damage": _hurt(CacheTrial.damage),
    "truncation": _hurt(CacheTrial.truncate),
    "restart after loss": _restart,
    "hybrid": _hybrid,
    "hybrid restart": _restart,
    "hybrid kill": _kill,
}
"""What happens to a cache, in this order, unless no case waits for it."""


class Witness:
    """What one case sees of a trial; it keeps what was answered.

    Attributes:
        trial: what is done to the cache.
        given: all answers; each has to be the one of an engine without a cache.
        promised: tokens that the cache had shown to have, in prompts that were asked for again.
        served: those that it then did not compute.
        recovered: seconds from a start, or from the return of what was lost, to the first hit.
    """

    def __init__(self, trial: CacheTrial, name: str) -> None:
        self.trial, self.given = trial, list[TrialOptions]()
        self.promised = self.served = 0
        self.recovered: float | None = None
        self._random = random.Random(name)

    def prompts(self, count: int = 3, length: int = 700) -> list[list[int]]:
        """Prompts that share nothing with each other, or with those of other cases."""
        return [[self._random.randrange(3, 500) for _ in range(length + 37 * n)] for n in range(count)]

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        new: int = 8,
        salt: str | None = None,
        adapter: bool = False,
        in_turn: bool = False,
    ) -> int:
        """Ask, all at once unless `in_turn`; return the tokens that came from the cache."""
        trial = self.trial
        server = trial.server

        def ask(prompt: Prompt) -> TrialOptions:
            answer = server.ask(prompt, new=new, salt=salt, adapter=adapter)
            known = Question(trial.weights, trial.adapter * adapter, tuple(prompt), new)
            return TrialOptions(known, answer, trial.life)

        with ThreadPoolExecutor(1 if in_turn else 8) as clients:
            given = list(clients.map(ask, prompts))
        self.given += given
        return sum(each.answer.cached for each in given)

    def warm(self, prompts: Sequence[Prompt], *, in_turn: bool = False, adapter: bool = False) -> None:
        """Ask twice; what the second time finds is a promise, if there is storage that could keep it."""
        self.ask(prompts, in_turn=in_turn, adapter=adapter)
        hits = self.ask(prompts, in_turn=in_turn, adapter=adapter)
        self.promised += hits * self.trial.cache.storage

    def again(self, prompts: Sequence[Prompt], *, in_turn: bool = False) -> None:
        """Ask for what was promised."""
        self.served += self.ask(prompts, in_turn=in_turn)
        if self.recovered is None and self.served:
            self.recovered = time.monotonic() - self.trial.began
