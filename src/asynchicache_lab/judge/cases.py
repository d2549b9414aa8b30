"""The cases: what is asked, what happens in between, and what must not be seen.

A case is a function of what it sees, and stops at each event that it waits for. Whatever is answered is
compared with an engine without a cache; a case adds what it promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from asynchicache_lab.judge.trial import Witness

Steps = Iterator[str]


class Leak(Exception):
    """Something was found that belongs to others, or to other weights; the message says what."""


def warm(see: Witness) -> Steps:
    prompts = see.prompts(4)
    see.ask(prompts)
    page = see.trial.cache.engine.page
    see.promised = sum((len(prompt) - 1) // page * page for prompt in prompts)
    see.served = see.ask(prompts)
    see.ask([[*prompt, *tail] for prompt, tail in zip(prompts, see.prompts(4, 100), strict=True)])
    yield from ()


def evicted(see: Witness) -> Steps:
    prompts = see.prompts()
    see.warm(prompts)
    see.trial.settle()
    see.trial.crowd_out()
    see.again(prompts)
    see.ask(prompts)
    yield from ()


def cancelled(see: Witness) -> Steps:
    prompts = see.prompts(24, 300)
    server = see.trial.server
    with ThreadPoolExecutor(8) as clients:
        places = range(len(prompts))
        list(clients.map(lambda place: server.abandon(prompts[place], 0.002 + 0.004 * (place % 15)), places))
    kept = prompts[::6]
    see.ask(kept)
    page = see.trial.cache.engine.page
    see.promised = sum((len(prompt) - 1) // page * page for prompt in kept)
    see.served = see.ask(kept)
    yield from ()


def tenants(see: Witness) -> Steps:
    prompts = see.prompts(2)

    def isolated() -> None:
        for salt in ("b", None):
            if found := see.ask(prompts, salt=salt):
                raise Leak(f"{found} tokens of salt a were served to {f'salt {salt}' if salt else 'no salt'}")

    see.ask(prompts, salt="a")
    isolated()
    see.promised = see.ask(prompts, salt="a") * see.trial.cache.storage
    yield "restart"
    see.served = see.ask(prompts, salt="a")
    if found := see.ask(prompts, salt="c"):
        raise Leak(f"{found} tokens of salts a and b were served to salt c after a restart")


def after(event: str) -> Callable[[Witness], Steps]:
    """Warm prompts before an event are promised after it."""

    def case(see: Witness) -> Steps:
        prompts = see.prompts()
        see.warm(prompts)
        yield event
        see.again(prompts)
        see.ask(prompts)

    return case


def hurt(event: str, before: str) -> Callable[[Witness], Steps]:
    """Of damaged storage nothing is promised, but that what is computed again is kept again."""

    def case(see: Witness) -> Steps:
        prompts = see.prompts()
        yield before
        see.ask(prompts)
        yield event
        see.warm(prompts)
        see.trial.settle()
        if "flush" in see.trial.cache.engine.verbs:
            see.trial.cache.engine.flush(see.trial.server)
        see.again(prompts)

    return case


def lost(see: Witness) -> Steps:
    yield "truncation"
    old, between, new = see.prompts(), see.prompts(2), see.prompts(2)
    see.warm(old)
    see.trial.settle()
    see.trial.lose()
    try:
        see.trial.cache.engine.flush(see.trial.server)
        see.ask(old)
        see.ask(between)
        see.ask([*old, *between])
    finally:
        see.trial.bring_back()
    see.ask([*old, *between, *new])
    see.ask([*old, *between, *new])
    yield "restart after loss"
    see.again(old)
    see.ask([*between, *new])


def updated(see: Witness) -> Steps:
    prompts = see.prompts()
    yield "kill"
    see.warm(prompts)
    yield "update in place"
    see.ask(prompts)
    see.ask(prompts)
    yield "back"
    see.again(prompts)


def changed(see: Witness) -> Steps:
    prompts = see.prompts()
    yield "back"
    see.ask(prompts)
    see.ask(prompts)
    yield "weights changed"
    if found := see.ask(prompts):
        raise Leak(f"{found} tokens were served that other weights had computed")
    see.ask(prompts)


def retrained(see: Witness) -> Steps:
    prompts = see.prompts()
    yield "back"
    see.warm(prompts)
    see.ask(prompts, adapter=True)
    see.ask(prompts, adapter=True)
    yield "adapter trained again"
    if found := see.ask(prompts, adapter=True):
        raise Leak(f"{found} tokens were served that the adapter computed before it was trained again")
    see.again(prompts)


def boundaries(see: Witness) -> Steps:
    """Prefixes of one text that end before, at and behind every 64 tokens, in no order."""
    (text,) = see.prompts(1, 1100)
    lengths = [64 * block + off for block in range(1, 11) for off in (-1, 0, 1)]
    random.Random(3).shuffle(lengths)
    prompts = [text[:length] for length in lengths]
    yield "hybrid"
    see.warm(prompts, in_turn=True)
    yield "hybrid restart"
    see.again(prompts, in_turn=True)
    yield "hybrid kill"
    see.ask(prompts, in_turn=True)


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the case.
        run: its steps.
        needs: verbs of the engine without which it cannot be tried.
    """

    name: str
    run: Callable[[Witness], Steps]
    needs: str = ""


CASES = (
    Case("warm", warm),
    Case("evicted", evicted),
    Case("cancelled", cancelled),
    Case("tenants", tenants),
    Case("restart", after("restart")),
    Case("kill", after("kill")),
    Case("updated", updated, "update"),
    Case("adapter", retrained, "adapter"),
    Case("weights", changed),
    Case("damaged", hurt("damage", "weights changed")),
    Case("truncated", hurt("truncation", "damage")),
    Case("lost", lost),
    Case("hybrid", boundaries),
)
