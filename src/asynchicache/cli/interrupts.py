"""Ctrl-C: a command ends with 130 at any moment, and prints no traceback.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. Inside an import, or while the
interpreter shuts down, nothing can catch it cleanly: extension modules turn it into other errors, and the
interpreter prints it. There the process ends at once instead; nothing is lost, because no work has begun or
all of it has ended. Around the work the usual exception lets a command clean up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def quit_on_interrupt() -> None:
    """From now on, end the process at once on SIGINT, unless the parent had it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _quit)


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGINT in the block, if the process would quit at once outside of it.

    `asyncio.Runner` cancels its main task on SIGINT only where this handler is in place.
    """
    if signal.getsignal(signal.SIGINT) is not _quit:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _quit)


def _quit(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
