"""Python programs as processes that are forked from one which has imported torch, transformers and the cache.

`run` is `subprocess.run` with this Python, at the cost of a fork. What must see a fresh process, as a test of
what is imported, starts one.

The process that forks is `python forking.py`, one for all workers of a run. A worker that finds none starts
it, and it ends with that worker. Each datagram is a program, with descriptors: of a socket that is told the
number of the process and its exit code, and of its standard input, output and error.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from uuid import uuid4

TESTS = Path(__file__).parent
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid4().hex)  # nobody can make its folder before
DOOR = Path(gettempdir(), f"asynchicache-tests-{RUN}", "door")
PRELOADED = (
    "pytest",
    "hypothesis",
    "torch.distributed",
    "transformers.generation.utils",
    "asynchicache.integrations.transformers.follower",
    "integrations.zoo",
)
MESSAGE_BYTES = 1 << 17
_REWRITTEN = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # a plugin of pytest is imported already


def run(
    words: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    typed: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, a script, `-m` or `-c`, to its end; killed if the test ends before it. `typed`: its
    standard input."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(typed)
        given.seek(0)
        with start(words, (given.fileno(), out.fileno(), err.fileno()), cwd, env) as told:
            lines = told.makefile()
            process = int(lines.readline())
            try:
                code = int(lines.readline())
            except BaseException:
                os.kill(process, signal.SIGKILL)
                raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def start(
    words: Sequence[str | Path],
    streams: Sequence[int],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> socket.socket:
    """Start a program; a socket that is told a line with the number of its process, and one when it has
    ended."""
    told, status = socket.socketpair()
    folder, variables = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
    message = json.dumps([[str(word) for word in words], folder, variables]).encode()
    assert len(message) < MESSAGE_BYTES
    with status:
        descriptors = [status.fileno(), *streams]
        while not _sent(message, descriptors):
            _serve()
    return told


def _sent(message: bytes, descriptors: Sequence[int]) -> bool:
    """Whether there is a process that forks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        try:
            way.connect(str(DOOR))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:  # the worker that started it was killed
            DOOR.unlink(missing_ok=True)
            return False
        socket.send_fds(way, [message], descriptors)
        return True


def _serve() -> None:
    """Start the process that forks, unless another worker just did."""
    DOOR.parent.mkdir(mode=0o700, exist_ok=True)  # who may write to it runs programs as this user
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        try:
            door.bind(str(DOOR))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return
        number = door.fileno()
        command = [sys.executable, __file__, str(number)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], env=env)

    def end() -> None:
        DOOR.unlink(missing_ok=True)
        with suppress(OSError):
            DOOR.parent.rmdir()
        process.communicate()

    atexit.register(end)


def forget_full_disk() -> None:
    """Let each disk look half empty at least: on one that others have filled, the file engine rightly stores
    nothing, and tests are not about the machine that they run on."""
    asked = os.statvfs

    def statvfs(path: str | Path) -> os.statvfs_result:
        found = list(asked(path))
        found[4] = max(found[4], found[2] // 2)  # blocks that anybody may use, and all of them
        return os.statvfs_result(found)

    os.statvfs = statvfs  # type: ignore[assignment]


def main() -> None:
    forget_full_disk()
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # a child collects only what is its own
    asked = socket.socket(fileno=int(sys.argv[1]))
    while 0 not in select.select([0, asked], [], [])[0]:  # it ends, as the worker that started it does
        message, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 4)
        reap()
        if os.fork() == 0:
            asked.close()
            watch(*json.loads(message), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def reap() -> None:
    """Wait for those who watch programs that have ended: whoever measures this run counts their time too."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def watch(words: list[str], cwd: str, env: dict[str, str], status: int, *streams: int) -> None:
    """Fork the program's process, and tell how it ends."""
    child = os.fork()
    if child == 0:
        os.close(status)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        become(words, streams)
        return
    for descriptor in (0, *streams):
        os.close(descriptor)
    os.write(status, b"%d\n" % child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, b"%d\n" % code)


def become(words: list[str], streams: Sequence[int]) -> None:
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    match words:
        case "-c", code, *_:
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case "-m", module, *_:
            again = _REWRITTEN if module == "pytest" else ()
            sys.argv, sys.path[0] = [module, *again, *words[2:]], str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case script, *_:
            path = Path(script).absolute()
            sys.argv, sys.path[0] = words, str(path.parent)
            runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
