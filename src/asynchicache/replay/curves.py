"""The picture of a comparison: hit rate over memory, one HTML file without scripts or network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log
from string import Template

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""By policy, (memory in tokens, hit rate), by memory."""

_COLORS = ("#1f6feb", "#d9822b", "#12866f", "#8a94a6", "#a12a1e")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 860, 420, 60, 50, 20


def render(title: str, ceiling: float, curves: Curves, advice: str) -> str:
    """The page as HTML text."""
    rows = "".join(
        f"<tr><td>{tokens:,}</td><td>{escape(policy)}</td><td>{rate:.2%}</td></tr>"
        for policy, points in curves.items()
        for tokens, rate in points
    )
    return _PAGE.substitute(
        title=escape(title),
        advice=escape(advice),
        ceiling=f"{ceiling:.2%}",
        chart=_chart(ceiling, curves),
        rows=rows,
    )


def _chart(ceiling: float, curves: Curves) -> str:
    """The curves as an `<svg>` element; memory is on a logarithmic axis."""
    memories = sorted({tokens for points in curves.values() for tokens, _ in points})
    low, high = log(max(memories[0], 1)), log(max(memories[-1], 2))
    top = max([ceiling, *(rate for points in curves.values() for _, rate in points)]) or 1.0

    def x(tokens: int) -> float:
        share = (log(max(tokens, 1)) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - 20)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>'
        for rate in (top * step / 4 for step in range(5))
    ]
    parts += [
        f'<text x="{x(tokens):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{_short(tokens)}</text>'
        for tokens in memories
    ]
    parts.append(
        f'<line class="ceiling" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(ceiling):.1f}" y2="{y(ceiling):.1f}"/>'
    )
    for number, (policy, points) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x(tokens):.1f},{y(rate):.1f}" for tokens, rate in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2.5" points="{path}"/>')
        parts += [
            f'<circle r="4" fill="{color}" cx="{x(tokens):.1f}" cy="{y(rate):.1f}">'
            f"<title>{escape(policy)}: {tokens:,} tokens, {rate:.2%}</title></circle>"
            for tokens, rate in points
        ]
        parts.append(
            f'<text x="{_LEFT + 14}" y="{_TOP + 18 * (number + 1)}" fill="{color}">{escape(policy)}</text>'
        )
    middle = (_LEFT + _WIDTH) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">memory, tokens of kv</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _short(tokens: int) -> str:
    """A number of tokens in at most four characters: `950`, `12k`, `3.4M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return str(tokens)


_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title: hit rate over memory</title>
<style>
body { margin: 0; background: #f6f7f9; color: #1d2530; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 20px; }
section { background: #fff; border: 1px solid #e6e9ef; border-radius: 12px; padding: 20px; margin-top: 16px; }
svg { width: 100%; height: auto; }
svg text { font-size: 13px; fill: currentColor; }
svg .axis { stroke: #e6e9ef; }
svg .ceiling { stroke: #3d4654; stroke-dasharray: 3 4; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px; border-bottom: 1px solid #e6e9ef; }
</style>
</head>
<body>
<main>
<h1>Hit rate over memory</h1>
<p>$title. The dotted line is the ceiling of attention alone, $ceiling.</p>
<section>$chart</section>
<section><p>$advice</p></section>
<section><table><thead><tr><th>memory, tokens</th><th>policy</th><th>hit rate</th></tr></thead>
<tbody>$rows</tbody></table></section>
</main>
</body>
</html>
""")
