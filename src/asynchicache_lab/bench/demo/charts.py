"""The report's charts, as SVG text to embed in HTML."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from asynchicache_lab.bench.demo.results import CrowdResult, ModeResult

COLORS: Mapping[str, str] = {
    "uncached": "#8a94a6",
    "no_offload": "#d9822b",
    "hybrid": "#1f6feb",
    "restart": "#12866f",
}
TIER_COLORS: Mapping[str, str] = {"device": "#123f8c", "host": "#4b8bf0", "storage": "#b9d2fa"}

_INK, _GRID = "#3d4654", "#e6e9ef"
_STYLE = {
    "svg.fonttype": "none",  # keep text as text: it uses the page's font and is searchable
    "font.size": 11,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}


_DASHES = ("-", "-", "-", (0, (3, 2)))


def hit_rate_chart(modes: Mapping[str, ModeResult], ceiling: Sequence[float]) -> str:
    """Hit rate by round, with the maximum as a thin line."""

    def draw(axes: Axes) -> None:
        axes.plot(ceiling, color=_INK, linewidth=1, linestyle=(0, (2, 3)), label="ceiling")
        _lines(axes, {name: [r.hit_rate for r in mode.rounds] for name, mode in modes.items()})
        axes.set_ylabel("prompt tokens served from cache")
        axes.set_ylim(-0.03, 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return _svg("hit-rate", draw)


def ttft_chart(modes: Mapping[str, ModeResult]) -> str:
    """Mean time to first token by round."""

    def draw(axes: Axes) -> None:
        _lines(axes, {name: [r.ttft_ms for r in mode.rounds] for name, mode in modes.items()})
        axes.set_ylabel("time to first token, ms")
        axes.set_ylim(bottom=0)

    return _svg("ttft", draw)


def tiers_chart(modes: Mapping[str, ModeResult]) -> str:
    """Served tokens, by the farthest tier that they came from."""
    names = list(modes)[::-1]

    def draw(axes: Axes) -> None:
        left = [0.0] * len(names)
        for tier, color in TIER_COLORS.items():
            widths = [float(modes[name].tokens_by_tier[tier]) for name in names]
            axes.barh(names, widths, left=left, color=color, label=tier, height=0.6)
            left = [sum(pair) for pair in zip(left, widths, strict=True)]
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel("prompt tokens served from cache")
        axes.legend(loc="upper right")

    return _svg("tiers", draw, size=(12.8, 3.0))


def crowd_chart(crowd: CrowdResult) -> str:
    """Clients in flight, hit rate by tier, time to first token and gaps of the loop, over time."""

    def draw(figure: Figure) -> None:
        flight, hits, first, gaps = figure.subplots(4, 1, sharex=True)
        at = [sample.seconds for sample in crowd.samples]
        counts = [[s.running for s in crowd.samples], [s.waiting for s in crowd.samples]]
        flight.stackplot(at, *counts, labels=["running", "waiting"], colors=["#4b8bf0", "#b9d2fa"])
        flight.set_ylabel("clients")
        answered = [sample for sample in crowd.samples if sample.prompt_tokens]
        below = [0.0] * len(answered)
        for tier, color in TIER_COLORS.items():
            shares = [sample.by_tier[tier] / sample.prompt_tokens for sample in answered]
            hits.bar([s.seconds for s in answered], shares, 0.2, below, color=color, label=tier)
            below = [sum(pair) for pair in zip(below, shares, strict=True)]
        hits.set_ylabel("hit rate")
        hits.set_ylim(0, 1)
        hits.yaxis.set_major_formatter(PercentFormatter(1.0))
        first.plot([s.seconds for s in answered], [s.ttft_ms or 0.0 for s in answered], "o", color="#d9822b")
        first.set_ylabel("first token, ms")
        first.set_ylim(bottom=0)
        gaps.bar(at, [sample.gap_ms for sample in crowd.samples], 0.2, color="#8a94a6")
        gaps.set_ylabel("loop gap, ms")
        gaps.set_xlabel("seconds")
        for axes in (flight, hits):
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the data, never over it
        for number, (seconds, what) in enumerate(crowd.moments):
            for axes in (flight, hits, first, gaps):
                axes.axvline(seconds, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
            height = 1.03 + 0.15 * (number % 2)  # neighbours in time do not write over each other
            flight.annotate(what, (seconds, height), xycoords=("data", "axes fraction"), fontsize=10)

    return _figure_svg("crowd", draw, (12.8, 8.0))


def _lines(axes: Axes, series: Mapping[str, Sequence[float]]) -> None:
    """Draw one line per mode. Where lines coincide, a later one is thinner or dashed, with another marker."""
    for depth, (name, values) in enumerate(series.items()):
        (line,) = axes.plot(values, color=COLORS[name], label=name, linewidth=3.5 - 0.6 * depth)
        line.set(linestyle=_DASHES[depth % 4], marker="osD^"[depth % 4], markersize=7.5 - 1.2 * depth)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _svg(name: str, draw: Callable[[Axes], None], *, size: tuple[float, float] = (6.4, 3.8)) -> str:
    """A chart with one pair of axes; see `_figure_svg`."""
    return _figure_svg(name, lambda figure: draw(figure.add_subplot()), size)


def _figure_svg(name: str, draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """The chart as an `<svg>` element of `size` inches; `name` makes its ids unique among charts."""
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
