"""Imports SGLang once, which takes half a minute, and forks a server for each request on a Unix socket.

A request is a line of JSON, `{"arguments": [...], "environment": {...}, "log": PATH}`. The answer is the
number of the server's process, which leads a group of its own.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(path: str) -> None:
    """Answer until the process is ended, or its parent has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from sglang import launch_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import detokenizer_manager, scheduler
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models import registry

    del http_server, detokenizer_manager, scheduler, model_runner, registry  # imported for servers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        while True:
            guest, _ = door.accept()
            with guest, guest.makefile() as lines:
                order = json.loads(lines.readline())
                process = os.fork()
                if process:
                    guest.sendall(str(process).encode())
            if not process:
                door.close()
                _become(order, launch_server)


def _become(order: dict[str, Any], launch_server: Any) -> None:
    """Turn this process into a server; its own processes are forked too. Never returns."""
    from sglang.srt.server_args import prepare_server_args

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order["environment"])
    with Path(order["log"]).open("a", buffering=1) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    try:
        launch_server.run_server(prepare_server_args(order["arguments"]))
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not serve the socket
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
