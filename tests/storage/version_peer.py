"""A process that uses stores with one version of the library, and does what its standard input says.

    PYTHONPATH=SRC:TESTS python -P version_peer.py

A line is `["verb", argument...]` in JSON, the answer too: what the verb returns, or an error as
`"StorageFormatError: ..."`. SRC and TESTS are of that version, so that each is used as its own tests use it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import asynchicache
from asynchicache import HybridCache
from asynchicache.cli.main import main as command_line
from asynchicache.errors import CacheError
from cache.engine import SPEC, Engine, config


class Peer:
    """Its open caches, by name."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}

    async def source(self) -> str:
        """The file of its version."""
        return str(asynchicache.__file__)

    async def open(self, name: str, options: dict[str, Any]) -> None:
        self.engines[name] = Engine(await HybridCache.open(SPEC, config(**options)))

    async def serve(self, name: str, tokens: list[int]) -> dict[str, int]:
        """Serve a prompt; every byte that was restored is compared. Hit tokens by tier."""
        hit = await self.engines[name].serve(tokens)
        return {tier.name: count for tier, count in hit.by_tier.items()}

    async def clear(self, name: str) -> int:
        return await self.engines[name].cache.clear_storage()

    async def close(self, name: str) -> None:
        await self.engines.pop(name).cache.aclose()

    async def command(self, *words: str) -> list[Any]:
        """Run `asynchicache WORDS`: the exit code, and what it printed."""
        with redirect_stdout(StringIO()) as out, redirect_stderr(out):
            try:
                code = await asyncio.to_thread(command_line, words)
            except SystemExit as error:  # a flag or a command that this version does not know
                code = error.code
        return [code, out.getvalue()]


async def main() -> None:
    peer, answers = Peer(), os.fdopen(os.dup(1), "w")
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, *arguments = json.loads(line)
        try:
            answer = await getattr(peer, verb)(*arguments)
        except CacheError as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)
    for name in list(peer.engines):
        await peer.close(name)


asyncio.run(main())
