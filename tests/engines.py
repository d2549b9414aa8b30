"""Servers that tests of storage engines start: real programs on 127.0.0.1, gone when the test is.

    with Server([executable("redis-server"), "--port", str(port)], ready="Ready to accept") as server:
        ...
        server.kill()   # as a machine dies
        server.start()  # it comes back: same command, same port

Mark such tests `@pytest.mark.engine("redis")`, and ask for programs and modules here, in the test or in a
fixture: what is missing skips the test, or fails it where engines are required (`conftest.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType

import pytest

INSTALL = "scripts/install_engines.sh installs it"


def executable(name: str) -> str:
    """The path of a program, beside this Python or on the PATH; skips the test if there is none."""
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=os.pathsep.join((str(beside), os.environ.get("PATH", ""))))
    if found is None:
        pytest.skip(f"{name} is not installed; {INSTALL}")
    return found


def module(name: str) -> ModuleType:
    """An imported module; skips the test if it, or a system library that it needs, is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported ({error}); {INSTALL}")


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 on which nobody listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:  # all are bound before one is let go, so that none comes twice
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which nobody listens now."""
    return free_ports(1)[0]


class Server:
    """A program that serves until the block ends, or this process does, however it ends.

    Args:
        command: the program and its arguments.
        ready: a regular expression; the program is ready once a line of its output matches.
        port: of 127.0.0.1, for a program that says so before it listens there.
        env: variables on top of this process's own.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ready: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [str(word) for word in command]
        self._ready = re.compile(ready)
        self._port = port
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []
        self._settled = threading.Event()
        self._ended = threading.Event()
        self._is_ready = False

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        """What it printed, errors too, since its last start."""
        return "".join(self._lines)

    def start(self) -> None:
        """Start it, and return when it is ready, however long that takes.

        Raises:
            RuntimeError: it ended before that; with what it said.
        """
        assert not self.running, f"{self.command[0]} runs already"
        self._lines, self._is_ready = [], False
        self._settled.clear()
        self._ended.clear()
        self._process = subprocess.Popen(
            [*_dying_with_us(), *self.command],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        try:
            self._settled.wait()
            if not (self._is_ready and self._listens()):
                raise RuntimeError(f"{self.command[0]} ended before it was ready")
        except BaseException as error:  # the test's own time-out too
            self.kill()
            error.add_note(f"{' '.join(self.command)} said:\n{self.output}")
            raise

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self._process is not None:
            self._process.terminate()
            self._collect()

    def kill(self) -> None:
        """End it at once, as a power cut does; twice is harmless."""
        if self._process is not None:
            self._process.kill()
            self._collect()

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        assert self._process is not None, "not started"
        return self._process.wait()

    def pause(self) -> None:
        """Stop it where it is: it holds its sockets and answers nothing, from when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until then it answers still

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def _collect(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.wait()
        self._reader.join(5.0)  # a child of the program may still hold the pipe

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Keep its pipe empty, so that it never waits for us, and look for the word."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                if not self._is_ready and self._ready.search(line):
                    self._is_ready = True
                    self._settled.set()
        self._settled.set()
        self._ended.set()

    def _listens(self) -> bool:
        """Whether its port answers before it ends; true where it has none."""
        while self._port is not None:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            except OSError:
                if self._ended.wait(0.01):
                    return False
            else:
                return True
        return True


def _dying_with_us() -> list[str]:
    """A prefix by which the kernel kills a program when the thread that started it ends (Linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
