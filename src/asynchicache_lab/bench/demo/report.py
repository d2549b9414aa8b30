"""The demo's report: one HTML file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from string import Template

from asynchicache_lab.bench.demo.charts import COLORS, crowd_chart, hit_rate_chart, tiers_chart, ttft_chart
from asynchicache_lab.bench.demo.results import CrowdResult, DemoResult, ModeResult


def write_report(result: DemoResult, ceiling: Sequence[float], blurbs: Mapping[str, str]) -> None:
    """Write `result.report`. Its folder must exist.

    Args:
        result: the results.
        ceiling: the best possible hit rate of each round.
        blurbs: one sentence about each mode.

    Raises:
        OSError: the file cannot be written.
    """
    Path(result.report).write_text(render(result, ceiling, blurbs), encoding="utf-8")


def render(result: DemoResult, ceiling: Sequence[float], blurbs: Mapping[str, str]) -> str:
    """The page as HTML text; arguments as for `write_report`."""
    return _PAGE.substitute(
        model=escape(result.model),
        workload=escape(result.workload),
        verdict=_verdict(result),
        cards="\n".join(_card(name, mode, result) for name, mode in result.modes.items()),
        hit_rate=hit_rate_chart(result.modes, ceiling),
        ttft=ttft_chart(result.modes),
        tiers=tiers_chart(result.modes),
        crowd="" if result.crowd is None else _crowd(result.crowd),
        rows="\n".join(_row(name, mode, blurbs[name]) for name, mode in result.modes.items()),
        ceiling=f"{float(result.ceiling):.2%}",
        seconds=f"{result.seconds:.0f}",
    )


def _verdict(result: DemoResult) -> str:
    if not result.violations:
        return '<p class="good">All modes generated the same tokens; nothing that was kept was lost.</p>'
    items = "".join(f"<li>{escape(violation)}</li>" for violation in result.violations)
    return f'<ul class="bad">{items}</ul>'


def _crowd(crowd: CrowdResult) -> str:
    words = (
        f"{crowd.clients} clients through one event loop, some of them asking at a time. Storage fails every "
        f"call for a while, {crowd.hung_up} clients hang up in the middle of an answer, and the server "
        f"restarts: its first answers then hit {crowd.warm_hit_rate:.0%}. "
        f"{crowd.answers} answers were read to their end. {_first_tokens(crowd)}"
    )
    return (
        '<section class="wide"><h2>Many at once, while things go wrong</h2>'
        f'<p class="lead">{escape(words)}</p>{crowd_chart(crowd)}</section>'
    )


def _first_tokens(crowd: CrowdResult) -> str:
    """What a restart did to the time to the first token, in medians, because both lives begin cold."""
    restart = max((seconds for seconds, what in crowd.moments if what == "restart"), default=0.0)
    times: list[list[float]] = [[], []]
    for sample in crowd.samples:
        if sample.ttft_ms is not None:
            times[sample.seconds > restart].append(sample.ttft_ms)
    if not all(times):
        return ""
    before, after = map(median, times)
    return f"The median first token takes {before:.0f} ms before the restart and {after:.0f} ms after it."


def _card(name: str, mode: ModeResult, result: DemoResult) -> str:
    base = result.modes["uncached"].ttft_p50
    slower = mode.ttft_p50 > base
    times = mode.ttft_p50 / base if slower else base / mode.ttft_p50
    factor = (
        f"{times:.1f}x {'slower' if slower else 'faster'} at the median" if name != "uncached" else "baseline"
    )
    return (
        f'<div class="card" style="--accent: {COLORS[name]}"><h3>{escape(name)}</h3>'
        f'<p class="figure">{mode.hit_rate:.1%}</p><p>of prompt tokens served</p>'
        f'<p class="figure">{mode.ttft_p50:.1f} ms</p><p>to the first token; {factor}</p></div>'
    )


def _row(name: str, mode: ModeResult, blurb: str) -> str:
    tiers = "".join(f"<td>{tokens:,}</td>" for tokens in mode.tokens_by_tier.values())
    equal = "yes" if mode.tokens_equal else "no"
    return (
        f"<tr><th>{escape(name)}<small>{escape(blurb)}</small></th><td>{mode.hit_rate:.2%}</td>"
        f"<td>{mode.ttft_p50:.1f}</td><td>{mode.ttft_p90:.1f}</td>{tiers}<td>{equal}</td></tr>"
    )


_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>asynchicache demo</title>
<style>
:root { color-scheme: light; --ink: #1d2530; --soft: #5b6675; --line: #e6e9ef; --paper: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 12px; }
h3 { font: 600 14px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; margin: 0 0 12px; }
p { margin: 0; color: var(--soft); }
.lead { max-width: 70ch; margin-bottom: 12px; }
.good, .bad { display: inline-block; margin: 12px 0 0; padding: 8px 14px; border-radius: 8px;
  font-size: 15px; }
.good { background: #e7f5ef; color: #0d6b57; }
.bad { background: #fdecea; color: #a12a1e; padding-left: 32px; }
.cards, .charts { display: grid; gap: 16px; margin-top: 28px; }
.cards { grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); }
.card, section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px; }
.card { border-top: 4px solid var(--accent); font-size: 14px; }
.figure { color: var(--ink); font-size: 28px; line-height: 1.25; font-weight: 650; letter-spacing: -0.02em; }
.card p + .figure { margin-top: 14px; }
section svg { width: 100%; height: auto; display: block; }
section svg text { font-family: inherit !important; }
.wide { margin-top: 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { text-align: right; padding: 10px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; }
tbody tr:last-child > * { border-bottom: 0; }
small { display: block; color: var(--soft); font-weight: 400; max-width: 44ch; }
footer { margin-top: 24px; font-size: 14px; }
footer p { max-width: 90ch; margin-bottom: 8px; }
</style>
</head>
<body>
<main>
<h1>What the model has already computed</h1>
<p class="lead">$model. $workload.</p>
$verdict
<div class="cards">
$cards
</div>
<div class="charts">
<section><h2>Hit rate by round</h2>
$hit_rate
</section>
<section><h2>Time to first token by round</h2>
$ttft
</section>
</div>
<section class="wide"><h2>Where served tokens came from</h2>
$tiers
</section>
$crowd
<section class="wide"><h2>Modes</h2>
<table>
<thead><tr><th>mode</th><th>hit rate</th><th>TTFT p50, ms</th><th>TTFT p90, ms</th>
<th>from device</th><th>from host</th><th>from storage</th><th>tokens equal</th></tr></thead>
<tbody>
$rows
</tbody>
</table>
</section>
<footer>
<p>Hit rate is the share of prompt tokens that were not computed again. At best it is $ceiling here: the
first round has nothing to find, the last token of an answer was never fed to the model, and what is kept
ends at a whole page. A token counts at the farthest tier that any of its pools came from.</p>
<p>Time to first token runs from a request's arrival through prefetch, load, restore and the prefill of what
was missed to the choice of the first token, one request at a time. The whole run took $seconds s.</p>
</footer>
</main>
</body>
</html>
""")
