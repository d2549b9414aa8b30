"""Imports what a server needs once, which takes an engine up to a minute, and forks a server for each order.

    python -m fork_server SOCKET MODULE PRELOADED...

An order is a line of JSON on the Unix socket, `{"arguments": [...], "environment": {...}, "log": PATH}`, and
becomes what `python -m MODULE ARGUMENTS` is. The answer is the number of its process, which leads a group.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from json import loads
from multiprocessing import context
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(path: str, module: str, preloaded: Sequence[str]) -> None:
    """Answer until this process is ended, or its parent has."""
    _end_with_parent()
    for name in preloaded:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        while True:
            guest, _ = door.accept()
            with guest, guest.makefile() as lines:
                order = loads(lines.readline())
                process = os.fork()
                if process:
                    guest.sendall(str(process).encode())
            if not process:
                door.close()
                _become(module, order)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(module: str, order: Mapping[str, Any]) -> None:
    """Turn this process into a server; its own processes are forked too. Never returns."""
    os.setsid()
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    with Path(order["log"]).open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    forks = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork", force=True)
    instead = {"set_start_method": lambda *_, **__: None, "get_context": lambda *_, **__: forks}
    for owner in (multiprocessing, context.BaseContext):  # whatever an engine prefers
        for name, value in instead.items():
            setattr(owner, name, value)
    sys.argv = [module, *order["arguments"]]
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not serve the socket
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3:])
