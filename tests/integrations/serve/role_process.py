"""A server with a role and one of the zoo's models, over a Redis: `python role_process.py ROLE MODEL URL`.

It prints its address. On its input, `die N` kills it after N iterations of its loop, from now; `check` has it
print, once it is idle, how many iterations there were and what is wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from typing import Any, cast

from asynchicache.cli.options import ServeOptions
from asynchicache.cli.serve import settings_of
from asynchicache.config import CacheConfig
from asynchicache.integrations.serve.api import Role
from asynchicache.integrations.serve.server import ApiServer, address, bind, serve
from integrations.serve.checkpoints import tiny_loaded
from integrations.served import nothing_held
from integrations.zoo import PAGE, tiny_spec


class Instants:
    """Counts the iterations of the running loop, and ends the process at one of them."""

    def __init__(self) -> None:
        self.count, self.last = 0, sys.maxsize
        selector = cast("Any", asyncio.get_running_loop())._selector
        self._select, selector.select = selector.select, self.select

    def select(self, timeout: float | None = None) -> object:
        self.count += 1
        if self.count > self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._select(timeout)


class Told:
    """Does what the lines on standard input say."""

    def __init__(self, server: ApiServer) -> None:
        self.api, self.instants = server.api, Instants()
        asyncio.get_running_loop().add_reader(0, self.read)
        self.checking: asyncio.Task[None] | None = None

    def read(self) -> None:
        for word, *number in map(str.split, os.read(0, 1000).decode().splitlines()):
            if word == "die":
                self.instants.last = self.instants.count + int(number[0])
                say("armed")
            else:
                self.checking = asyncio.create_task(self.check())

    async def check(self) -> None:
        count = self.instants.count
        await self.api.idle()
        await self.api.model.drain()
        counts = {"loops": count, "wrong": nothing_held(self.api.model)}
        say(counts | asdict(self.api.counts))


def say(one: object) -> None:
    print(json.dumps(one), flush=True)


async def main(role: Role, name: str, url: str) -> None:
    pools = [pool.name for pool in tiny_spec(name).owners]
    cache = CacheConfig(
        device_slots=dict.fromkeys(pools, 256),
        host_slots=dict.fromkeys(pools, 512),
        weight_version="test",
        storage="redis",
        storage_options={"url": url},
    )
    settings = replace(settings_of(ServeOptions(page_size=PAGE, role=role), cache))
    with bind("127.0.0.1", 0) as listener:
        where, told = address(listener), []

        def ready(server: ApiServer) -> None:
            told.append(Told(server))
            say(where)

        await serve(tiny_loaded(name), settings, listener, ready)


if __name__ == "__main__":
    asyncio.run(main(cast("Role", sys.argv[1]), *sys.argv[2:]))
