"""The result of `bench storage`: medians of turns, and of the ratios of adjacent turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table

from asynchicache.reports import add_figures
from asynchicache_lab.bench.storage.limits import Peer
from asynchicache_lab.bench.storage.options import StorageBenchOptions


class RoundSample(NamedTuple):
    """One measurement: all pages, moved once.

    Attributes:
        seconds: its duration.
        cpu_seconds: CPU time of this process, all threads.
        nbytes: total size of the pages.
        server_seconds: CPU time of the server; None if unknown or without a server.
    """

    seconds: float
    cpu_seconds: float
    nbytes: int
    server_seconds: float | None = None

    @property
    def mb_s(self) -> float:
        """Speed in 10^6 bytes/s."""
        return self.nbytes / self.seconds / 1e6


@dataclass(slots=True, eq=False)
class StorageReport:
    """The result of one run.

    Attributes:
        samples: by measure (such as `engine put` or `limit get scattered`), two per round.
        exists: keys per second, for the engine alone and through the core's wrapper.
        stall_ms, idle_stall_ms: longest block of the event loop, and that of an idle run of equal length.
        wrong_pages: number of pages read with wrong bytes.
        beside: titles of the other compared clients.
    """

    options: StorageBenchOptions
    limit_title: str
    samples: dict[str, list[RoundSample]] = field(default_factory=lambda: defaultdict(list))
    exists: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stall_ms: float = 0.0
    idle_stall_ms: float = 0.0
    wrong_pages: int = 0
    beside: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: StorageBenchOptions, peer: Peer | None) -> StorageReport:
        if peer is None:
            return cls(options, "none")
        return cls(options, peer.title, beside=tuple(one.title for one in peer.beside))

    @property
    def ok(self) -> bool:
        return self.wrong_pages == 0

    def add(self, turns: Mapping[str, Sequence[RoundSample]]) -> None:
        """Add a round's samples. Samples with the same index are compared: first turns, then last turns."""
        for name, samples in turns.items():
            self.samples[name] += samples

    def mb_s(self, name: str) -> float | None:
        """Median; None if not measured."""
        return median(sample.mb_s for sample in self.samples[name]) if self.samples[name] else None

    def ratio(self, ours: str, limit: str) -> float | None:
        """Median ratio of `ours` to `limit`, of turns in the same half of a round."""
        pairs = zip(self.samples[ours], self.samples[limit], strict=False)
        ratios = [one.mb_s / other.mb_s for one, other in pairs]
        return median(ratios) if ratios else None

    def cpu_us(self, what: str, unit: int) -> float:
        """Median CPU time of this process, all threads, in microseconds for `unit` bytes."""
        return median(s.cpu_seconds / s.nbytes * unit * 1e6 for s in self.samples[what])

    def server_us(self, what: str) -> float | None:
        """Median CPU time of the server, in microseconds per page; None if unknown."""
        page = self.options.page_bytes
        samples = [s for s in self.samples[what] if s.server_seconds is not None]
        times = [(s.server_seconds or 0.0) / s.nbytes * page * 1e6 for s in samples]
        return median(times) if times else None

    def as_json(self) -> dict[str, object]:
        options = self.options
        page, mib = options.page_bytes, 1 << 20
        return {
            "engine": options.engine,
            "page_bytes": page,
            "pages": options.pages,
            "batch_pages": options.batch_pages,
            "depth": options.depth,
            "rounds": options.rounds,
            **self._speeds("engine"),
            "limit": {"title": self.limit_title, **self._speeds("limit")},
            "beside": [
                {"title": title, **self._speeds(title), **self._ratios(title)} for title in self.beside
            ],
            "put_ratio": self._share("put"),
            "get_ratio": self._share("get"),
            "scattered": {
                "get_mb_s": self.mb_s("engine get scattered"),
                "limit_get_mb_s": self.mb_s("limit get scattered"),
                "get_ratio": self._share("get scattered"),
            },
            "exists_keys_s": median(self.exists["engine"]),
            "exists_pool_keys_s": median(self.exists["pool"]),
            "cpu_us_per_page": (self.cpu_us("engine put", page) + self.cpu_us("engine get", page)) / 2,
            "cpu_us_per_mib": {name: self.cpu_us(f"engine {name}", mib) for name in ("put", "get")},
            "through_controller": self._through_controller(),
            "server_us_per_page": {name: self.server_us(f"engine {name}") for name in ("put", "get")},
            "loop_stall_ms": self.stall_ms,
            "idle_stall_ms": self.idle_stall_ms,
            "wrong_pages": self.wrong_pages,
        }

    def _share(self, what: str) -> float | None:
        return self.ratio(f"engine {what}", f"limit {what}")

    def _through_controller(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name in ("put", "get") if self.options.through_controller else ():
            found[f"{name}_mb_s"] = self.mb_s(f"controller {name}")
            found[f"limit_{name}_mb_s"] = self.mb_s(f"controller limit {name}")
            found[f"{name}_ratio"] = self.ratio(f"controller {name}", f"controller limit {name}")
        return found

    def _speeds(self, side: str) -> dict[str, float | None]:
        return {f"{name}_mb_s": self.mb_s(f"{side} {name}") for name in ("put", "get")}

    def _ratios(self, side: str) -> dict[str, float | None]:
        return {f"{name}_ratio": self.ratio(f"engine {name}", f"{side} {name}") for name in ("put", "get")}

    def present(self) -> RenderableType:
        options = self.options
        table = Table(
            title=f"{options.engine}: {options.pages} pages of {options.page_bytes:,} bytes, "
            f"{options.batch_pages} a call, {options.depth} calls in flight",
            caption=f"limit: {self.limit_title}; medians of {options.rounds} rounds",
        )
        table.add_column()
        add_figures(table, "MB/s", "limit, MB/s", "share of it", "CPU us/MiB")
        for what in ("put", "get", "get scattered"):
            cpu = self.cpu_us(f"engine {what}", 1 << 20)
            speeds = [self.mb_s(f"{side} {what}") for side in ("engine", "limit")]
            table.add_row(what, *map(_number, speeds), _number(self._share(what), ".2f"), _number(cpu))
        if options.through_controller:
            for what in ("put", "get"):
                speeds = [self.mb_s(f"controller {side}{what}") for side in ("", "limit ")]
                share = self.ratio(f"controller {what}", f"controller limit {what}")
                cpu = self.cpu_us(f"controller {what}", 1 << 20)
                row = [*map(_number, speeds), _number(share, ".2f"), _number(cpu)]
                table.add_row(f"{what}, controller", *row)
        for title in self.beside:
            for what in ("put", "get"):
                ratio = self.ratio(f"engine {what}", f"{title} {what}")
                speeds = [self.mb_s(f"{side} {what}") for side in ("engine", title)]
                table.add_row(f"{what}, beside {title}", *map(_number, speeds), _number(ratio, ".2f"))
        table.add_section()
        table.add_row("exists, keys/s", f"{median(self.exists['engine']):,.0f}")
        table.add_row("longest stop, ms", f"{self.stall_ms:.1f}", f"idle: {self.idle_stall_ms:.1f}")
        if self.server_us("engine put") is not None:
            table.add_row("server, CPU us/page", *self._server_row())
        table.add_row("wrong pages", str(self.wrong_pages))
        return table

    def _server_row(self) -> list[str]:
        """The server's CPU time per page of the engine: a lower bound, as it handles pages one by one."""
        return [f"{name}: {_number(self.server_us(f'engine {name}'))}" for name in ("put", "get")]


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)
