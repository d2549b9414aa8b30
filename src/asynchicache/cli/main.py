"""The command line: `asynchicache serve | top | doctor | ls | verify | clear | gc | replay`, and in a
checkout the laboratory's `demo | bench | chaos | soak`.

Exit codes: 0 the command ran and what it checked held; 1 a violation, or the command could not run; 2 bad
arguments; 130 interrupted.

This module imports almost nothing, so that Ctrl-C is handled before any other module is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asynchicache.cli.interrupts import INTERRUPTED, quit_on_interrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Args:
        arguments: words after the program's name; by default those of the process.

    Raises:
        SystemExit: with 2 on bad arguments, with 0 after help or version.
    """
    if arguments is None:
        quit_on_interrupt()
    try:
        from asynchicache.cli.parser import run

        return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
