"""Conversations with a cached server, an uncached one, and a cached one whose storage is killed.

The two servers are separate processes that alternate round by round, so that other load on the machine
affects both. The uncached server is the same program, but every request has a unique salt, so nothing hits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from asynchicache.reports import Advance
from asynchicache_lab.bench.serve.clients import Client, ServerError, ServeTurn, questions
from asynchicache_lab.bench.serve.options import ServeBenchOptions
from asynchicache_lab.bench.serve.outages import Outage, open_outage
from asynchicache_lab.bench.serve.plain import plain_answers
from asynchicache_lab.bench.serve.report import ServeReport
from asynchicache_lab.bench.serve.server_process import ServerProcess, server_process

_SECONDS = 600.0  # a request's timeout: fifty prompts may be queued before it
_DEVICE_SHARE = 0.5  # of the pages of all conversations
_HOST_SHARE = 0.6  # so recent ends are found in memory, and old beginnings in storage
_STATES_A_CLIENT = 4  # at the ends of its last two prompts and answers


class Conversations:
    """The conversations of all clients with one server so far.

    Args:
        client: sends requests to the server.
        options: the workload.
        salt: returns the salt of a client's request in a round.

    Attributes:
        rounds: the turns by round and client; None for a request without an answer.
        errors: the reasons of missing answers.
    """

    def __init__(self, client: Client, options: ServeBenchOptions, salt: Callable[[int, int], str]) -> None:
        self._client = client
        self._asked = questions(options)
        self._salt = salt
        self._histories: list[list[int]] = [[] for _ in self._asked]
        self.rounds: list[list[ServeTurn | None]] = []
        self.errors: list[str] = []

    async def play_round(self, halfway: Callable[[], None] | None = None) -> None:
        """Run one turn of every client, concurrently.

        Args:
            halfway: called when half of the clients have their answers.

        Raises:
            ServerError: no client got an answer.
        """
        number, clients = len(self.rounds), range(len(self._asked))
        turns = [asyncio.create_task(self._turn(client, number)) for client in clients]
        if halfway is not None:
            waiting = set(turns)
            while len(waiting) > len(turns) // 2:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(halfway)
        self.rounds.append(await asyncio.gather(*turns))
        if not any(self.rounds[-1]):
            raise ServerError(f"the server answers no client any more: {self.errors[-1]}")

    async def _turn(self, client: int, number: int) -> ServeTurn | None:
        history = self._histories[client]
        history += self._asked[client][number]
        try:
            turn = await self._client.ask(history, self._salt(client, number))
        except ServerError as error:
            self.errors.append(f"client {client}, round {number}: {error}")
            return None
        history += turn.tokens
        return turn


async def run_serve(options: ServeBenchOptions, advance: Advance) -> ServeReport:
    """Run the whole bench.

    Raises:
        ConfigError: a server or its storage does not start.
        ServerError: a server stopped answering.
    """
    report = ServeReport(options)
    with TemporaryDirectory(prefix="asynchicache-serve-") as name:
        folder = Path(name)
        with open_outage(options.storage, folder) as outage:
            flags = [*outage.flags, "--config", json.dumps(_cache(options))]
            async with _served(options, folder / "cached.log", flags) as (cached, ask):
                async with _served(options, folder / "uncached.log", []) as (uncached, ask_uncached):
                    await _compare(options, report, cached, ask, ask_uncached, advance)
                await _lose_storage(options, report, cached, ask, outage, advance)
        report.unhandled = [*cached.unhandled(), *uncached.unhandled()]
    report.plain = await asyncio.to_thread(plain_answers, options)
    return report


def _cache(options: ServeBenchOptions) -> dict[str, object]:
    """Cache options with sizes that use all three tiers."""
    states = _STATES_A_CLIENT * options.num_clients
    return {
        "device_slots": {"kv": int(options.pages * _DEVICE_SHARE), "mamba": states},
        "host_slots": {"kv": int(options.pages * _HOST_SHARE), "mamba": states},
        "prefetch": {"policy": "wait_complete"},
    }


@asynccontextmanager
async def _served(
    options: ServeBenchOptions, log: Path, flags: list[str]
) -> AsyncIterator[tuple[ServerProcess, Client]]:
    sizes = ["--page-size", str(options.page_size), "--seed", str(options.seed)]
    sizes += ["--max-running", str(options.max_running)]
    limits = httpx.Limits(max_connections=None)
    async with (
        server_process(log, [*sizes, *flags]) as server,
        httpx.AsyncClient(base_url=server.address, timeout=_SECONDS, trust_env=False, limits=limits) as http,
    ):
        yield server, Client(http, options.output_length)


async def _compare(
    options: ServeBenchOptions,
    report: ServeReport,
    server: ServerProcess,
    ask: Client,
    ask_uncached: Client,
    advance: Advance,
) -> None:
    cached = Conversations(ask, options, lambda client, number: "cached")
    uncached = Conversations(ask_uncached, options, lambda client, number: f"{client}.{number}")
    for number in range(options.num_rounds):
        await cached.play_round()
        report.rss_bytes.append(server.rss_bytes)
        await uncached.play_round()
        advance(number + 1, 2 * options.num_rounds)
    report.cached, report.uncached = cached.rounds, uncached.rounds
    report.errors += [*cached.errors, *uncached.errors]


async def _lose_storage(
    options: ServeBenchOptions,
    report: ServeReport,
    server: ServerProcess,
    ask: Client,
    outage: Outage,
    advance: Advance,
) -> None:
    """Play the same conversations again with another salt. Storage is killed in one round and restarted in a
    later one."""
    again = Conversations(ask, options, lambda client, number: "outage")
    lost = options.num_rounds // 2 - 1
    events = {lost: outage.kill, min(lost + 2, options.num_rounds - 1): outage.restart}
    for number in range(options.num_rounds):
        await again.play_round(events.get(number))
        report.rss_bytes.append(server.rss_bytes)
        advance(options.num_rounds + number + 1, 2 * options.num_rounds)
    report.outage = again.rounds
    report.errors += again.errors
