"""Play the trace, and say what each engine has to carry, what that takes, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table

from asynchicache.errors import ConfigError
from asynchicache.replay.trace import read_trace
from asynchicache.reports import Advance, add_figures, facts
from asynchicache_lab.bench.stores.engines import ENGINES, Figures, PlannedStore
from asynchicache_lab.bench.stores.fleet import Fleet, FleetResult, LoneCache, NodeCache, Traffic
from asynchicache_lab.bench.stores.options import StoresOptions

_HOUR = 3600
_DAY = 24 * _HOUR
_MONTH_DAYS = 30
_TRACE = Path(__file__).parents[4] / "tests/data/traces/mooncake_conversation_h1.jsonl.gz"
"""Of a checkout, which the laboratory is in."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One engine.

    Attributes:
        hit_rate, from_store: share of the prompt tokens from caches, and from the store.
        requests_s, put_bytes_s, get_bytes_s: mean load.
        objects, bytes: of what is written in `hours`.
        names_bytes: memory for their names.
        servers: that carry it, with headroom, and hold these bytes; None: the cloud's affair.
        busy: load of the busiest part of a server at the mean; None: not known.
        limit: what sets `servers`, or exceeds what there is: bytes, requests or capacity.
        cost_day: dollars.
    """

    hit_rate: float
    from_store: float
    requests_s: float
    put_bytes_s: float
    get_bytes_s: float
    objects: float
    bytes: float
    names_bytes: float
    servers: int | None
    busy: float | None
    limit: str
    cost_day: float

    @property
    def bytes_s(self) -> float:
        return self.put_bytes_s + self.get_bytes_s

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "bytes_s": self.bytes_s}


def plan(engine: PlannedStore, one: Figures, options: StoresOptions, result: FleetResult) -> StorePlan:
    """What an engine needs for a fleet's traffic."""
    traffic = result.traffic
    per_second = options.nodes * options.tokens_s / result.prompt_tokens
    puts, gets = (per_second * _sum(traffic, names) for names in (engine.puts, engine.gets))
    put_bytes, get_bytes = per_second * traffic.put_bytes, per_second * traffic.got_bytes
    kept = per_second * _HOUR * options.hours
    held, objects = traffic.put_bytes * kept, _sum(traffic, [engine.objects]) * kept
    moving = put_bytes / 1e6 / (one.put_mb_s or math.inf) + get_bytes / 1e6 / (one.get_mb_s or math.inf)
    asking = (puts + gets) / (one.requests_s or math.inf)
    wants = {"bytes": moving, "requests": asking}  # servers, at the mean load
    servers, limit = _servers(engine, one, options, wants, held)
    paid_gb = max(held / 1e9, (servers or 0) * (one.gb or 0) * engine.shared)
    requests_day = (puts * one.put_million + gets * one.get_million) * _DAY / 1e6
    busiest = max(moving / (servers or 1), asking / (1 if engine.central else servers or 1))
    return StorePlan(
        hit_rate=result.hit_rate,
        from_store=result.store_tokens / result.prompt_tokens,
        requests_s=puts + gets,
        put_bytes_s=put_bytes,
        get_bytes_s=get_bytes,
        objects=objects,
        bytes=held,
        names_bytes=objects * one.name_bytes,
        servers=servers,
        busy=busiest or None,
        limit=limit,
        cost_day=paid_gb * one.gb_month / _MONTH_DAYS + requests_day,
    )


def _servers(
    engine: PlannedStore, one: Figures, options: StoresOptions, wants: Mapping[str, float], held: float
) -> tuple[int | None, str]:
    """The number of servers, and what decides it."""
    needs = {name: options.headroom * want for name, want in wants.items()}
    too_many = engine.central and needs.pop("requests") > 1
    needs["capacity"] = held / 1e9 / one.gb if one.gb else 0.0
    limit = max(needs, key=needs.__getitem__)
    servers = math.ceil(needs[limit]) if any(needs.values()) else None
    if not engine.shared:
        servers, limit = options.nodes, limit if needs[limit] > options.nodes else ""
    return servers, "requests" if too_many else limit if servers else ""


def _sum(traffic: Traffic, names: Sequence[str]) -> int:
    return sum(getattr(traffic, name) for name in names)


@dataclass(frozen=True, slots=True)
class StoresReport:
    """All engines, for one fleet.

    Attributes:
        options, trace: of the run.
        copies: of the trace, that load the fleet.
        alone: without a store.
        engines: the plans, by engine.
        problems: findings of the planners' own checks.
    """

    options: StoresOptions
    trace: str
    copies: float
    alone: FleetResult
    engines: Mapping[str, StorePlan]
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        return {
            "nodes": self.options.nodes,
            "trace": self.trace,
            "copies": self.copies,
            "prompt_tokens_s": self.options.nodes * self.options.tokens_s,
            "hit_rate_alone": self.alone.hit_rate,
            "engines": {name: one.as_json() for name, one in self.engines.items()},
            "problems": list(self.problems),
        }

    def present(self) -> RenderableType:
        options = self.options
        return Group(
            facts(
                [
                    ("nodes", f"{options.nodes:,}"),
                    ("prompt tokens a second", f"{options.nodes * options.tokens_s:,.0f}"),
                    ("copies of the trace", f"{self.copies:,.1f}"),
                    ("hit rate without a store", f"{self.alone.hit_rate:.1%}"),
                ],
                self.trace,
            ),
            self._load(),
            self._needs(),
            *self.problems,
        )

    def _load(self) -> Table:
        table = Table("engine", title="what it carries", title_justify="left")
        add_figures(table, "hit rate", "from\nstore", "requests/s", "put,\nMB/s", "get,\nMB/s")
        for name, one in self.engines.items():
            speeds = [f"{rate / 1e6:,.0f}" for rate in (one.put_bytes_s, one.get_bytes_s)]
            table.add_row(
                name, f"{one.hit_rate:.1%}", f"{one.from_store:.1%}", f"{one.requests_s:,.0f}", *speeds
            )
        return table

    def _needs(self) -> Table:
        hours, headroom = self.options.hours, self.options.headroom
        title = f"what it needs: pages of {hours:g} h, {headroom:g} times the load"
        table = Table("engine", title=title, title_justify="left")
        add_figures(table, "objects", "TB", "servers", "busy", "$ a day")
        table.add_column("set by")
        for name, one in self.engines.items():
            table.add_row(
                name,
                f"{one.objects:,.0f}",
                f"{one.bytes / 1e12:,.0f}",
                "-" if one.servers is None else f"{one.servers:,}",
                "-" if one.busy is None else f"{one.busy:.0%}",
                f"{one.cost_day:,.0f}",
                one.limit,
            )
        return table


def run_stores(options: StoresOptions, progress: Advance) -> StoresReport:
    """Play the trace three times: without a store, with one of each node's own, and with one of all.

    Raises:
        ConfigError: the trace cannot be read, or does not fit the options.
    """
    path = Path(options.trace) if options.trace else _TRACE
    trace = read_trace(path, options.block_size)
    if len(trace.requests) < 2:
        raise ConfigError(
            f"{trace.where}: has one request; the first half fills caches, the second is counted"
        )
    fleet = Fleet(options, trace)
    total = 3 * len(trace.requests)

    def play(turn: int, kind: type[NodeCache], *, shared: bool) -> FleetResult:
        done = turn * len(trace.requests)
        return fleet.play(kind, shared=shared, progress=lambda part, _: progress(done + part, total))

    alone = play(0, LoneCache, shared=False)
    results = {False: play(1, NodeCache, shared=False), True: play(2, NodeCache, shared=True)}
    figures = options.figures()
    return StoresReport(
        options,
        path.name,
        fleet.copies,
        alone,
        {
            name: plan(engine, figures[name], options, results[engine.shared])
            for name, engine in ENGINES.items()
        },
        [text for result in (alone, *results.values()) for text in result.problems],
    )
