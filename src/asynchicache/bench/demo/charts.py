"""The report's charts, as SVG text to embed in HTML."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from asynchicache.bench.demo.results import ModeResult

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


def _lines(axes: Axes, series: Mapping[str, Sequence[float]]) -> None:
    """Draw one line per mode. Earlier lines are wider, so that coinciding lines all stay visible."""
    for depth, (name, values) in enumerate(series.items()):
        width = 3.0 - 0.5 * depth
        axes.plot(values, color=COLORS[name], linewidth=width, marker="o", markersize=width + 2.5, label=name)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _svg(name: str, draw: Callable[[Axes], None], *, size: tuple[float, float] = (6.4, 3.8)) -> str:
    """The chart as an `<svg>` element of `size` inches; `name` makes its ids unique among charts."""
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
