"""`asynchicache serve` with a real model class and random weights: first tokens over HTTP, and restarts.

    python -m asynchicache_lab.gpu.serving --device cuda:0 --lengths 2048,8192,32768 --seconds 190

Rows are as those of `models`: `computed` and `cached` in the first server, then many clients at once, then
`after SIGTERM` and `after SIGKILL` in the servers that follow it on the same storage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from asynchicache.errors import CacheError
from asynchicache_lab.bench.serve.clients import Client, ServerError, ServeTurn
from asynchicache_lab.bench.serve.server_process import ServerProcess, server_process
from asynchicache_lab.gpu.models import TURN, build, lengths
from asynchicache_lab.gpu.rows import Deadline, tell

ANSWER, ROUNDS = 8, 3
VOCABULARY = {False: 32_000, True: 512}  # of a model, and of a small one
_SAVE_SECONDS, _REQUEST_SECONDS = 150, 120.0


class Clients:
    """What is asked, of one server after another.

    Args:
        given: the flags.
        folder: holds the checkpoint and the pages.
    """

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._end = Deadline(given.seconds)
        self._draw = random.Random(4)
        self._turns = {length: self._tokens(length + TURN) for length in given.lengths}
        self._count, self._length = (4, 128) if given.small else (16, 4096)

    def _tokens(self, count: int) -> list[int]:
        vocabulary = VOCABULARY[self._given.small]
        return [self._draw.randrange(vocabulary) for _ in range(count)]

    async def run(self) -> None:
        async with self._served() as (server, client):
            await self._ask(client, "warm", {64: self._tokens(64)})
            await self._ask(
                client, "computed", {length: turn[:length] for length, turn in self._turns.items()}
            )
            await self._ask(client, "cached", self._turns)
            await self._many(client)
        async with self._served() as (server, client):
            await self._ask(client, "after SIGTERM", self._turns)
            server.kill()
        async with self._served() as (server, client):
            await self._ask(client, "after SIGKILL", self._turns)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[tuple[ServerProcess, Client]]:
        small, device, log = self._given.small, self._given.device, self._folder / "serve.log"
        sizes = (32 << 20, 96 << 20, 32) if small else (16 << 30, 40 << 30, 512)
        names = "device_bytes", "host_bytes", "tokens_per_state"
        config = {"device": device, **dict(zip(names, sizes, strict=True))}
        flags = ["--model", str(self._folder / "model"), "--tokenizer", "bytes", "--max-running", "16"]
        flags += ["--storage-path", str(self._folder / "pages"), "--page-size", "16" if small else "64"]
        limits, waiting = httpx.Limits(max_connections=None), Deadline(0)
        async with server_process(log, [*flags, "--config", json.dumps(config)]) as server:
            tell(what="server ready", seconds=round(-waiting.left, 1))
            async with httpx.AsyncClient(
                base_url=server.address, timeout=_REQUEST_SECONDS, trust_env=False, limits=limits
            ) as http:
                yield server, Client(http, ANSWER, VOCABULARY[small])
        if unhandled := server.unhandled():
            raise ServerError(f"unhandled: {unhandled[:5]}")

    async def _ask(self, client: Client, what: str, prompts: Mapping[int, list[int]]) -> None:
        for length, prompt in prompts.items():
            if self._end.passed:
                return
            turn = await client.ask(prompt, "gpu")
            tell(what=what, length=length, ttft_ms=round(turn.ttft_ms, 1), cached=turn.cached_tokens)

    async def _many(self, client: Client) -> None:
        """Some rounds of conversations, all at once."""
        histories = [self._tokens(self._length) for _ in range(self._count)]
        for number in range(ROUNDS):
            if self._end.passed:
                return
            turns = await asyncio.gather(*(client.ask(one, "gpu") for one in histories))
            _tell_round(number, histories, turns)
            for history, turn in zip(histories, turns, strict=True):
                history += [*turn.tokens, *self._tokens(TURN)]


def _tell_round(number: int, histories: list[list[int]], turns: list[ServeTurn]) -> None:
    times = [turn.ttft_ms for turn in turns]
    share = sum(turn.cached_tokens for turn in turns) / sum(map(len, histories))
    found = {
        "ttft_ms": round(median(times), 1),
        "worst_ms": round(max(times), 1),
        "hit_rate": round(share, 3),
    }
    tell(what=f"{len(turns)} clients, round {number}", length=len(histories[0]), **found)


def _save(given: argparse.Namespace, folder: Path) -> None:
    """Save the checkpoint, from a process of its own, whose memory the server then has.

    Raises:
        CalledProcessError, TimeoutExpired: it could not be.
    """
    words = [sys.executable, "-m", __spec__.name, "--save", str(folder), "--device", given.device]
    words += ["--model", given.model, *(["--small"] if given.small else [])]
    subprocess.run(words, check=True, timeout=_SAVE_SECONDS)  # noqa: S603 - our own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--lengths", type=lengths, default=[2048, 8192, 32768])
    parser.add_argument("--model", default="hybrid")
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--save", type=Path, help="only save the checkpoint, in this folder")
    given = parser.parse_args()
    if given.save:
        build(given.model, given.device, small=given.small).save_pretrained(given.save)
        return 0
    with tempfile.TemporaryDirectory(prefix="asynchicache-gpu-") as name:
        folder = Path(name)
        try:
            _save(given, folder / "model")
            asyncio.run(Clients(given, folder).run())
        except (CacheError, OSError, subprocess.SubprocessError) as error:
            log = folder / "serve.log"
            end = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            tell(failed=f"{type(error).__name__}: {error}", log=end)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
