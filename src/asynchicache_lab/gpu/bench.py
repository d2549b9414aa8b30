"""One bench of the laboratory as a step: the report so far after each case, and `whole` at its end.

    python -m asynchicache_lab.gpu.bench NAME OPTIONS-AS-JSON

Not through the command line, which wants the package installed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib import import_module
from typing import Any

from asynchicache_lab.gpu.rows import tell


def main(name: str, options: str) -> int:
    bench = import_module(f"asynchicache_lab.bench.{name}")
    flags = import_module("asynchicache_lab.bench.options")
    made = getattr(flags, f"{name.capitalize()}Options")(**json.loads(options))
    started = time.perf_counter()

    def advance(done: int, total: int) -> None:
        sys.stderr.write(f"{done} of {total} after {time.perf_counter() - started:.1f} s\n")

    def say(report: Any, whole: bool = False) -> None:
        tell(**report.as_json(), whole=whole)

    report = asyncio.run(getattr(bench, f"run_{name}")(made, advance, say))
    say(report, whole=True)
    return not report.ok


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
