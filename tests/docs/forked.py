"""Examples as processes that are forked from one which has imported torch, transformers and the cache.

`python forked.py FOLDER` runs the example that each line of standard input names, in the current folder;
NAME.out and NAME.err of FOLDER take what it prints, and the answer is its exit code.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

PRELOADED = ("torch", "transformers.generation.utils", "asynchicache.cache")


class Examples:
    """Runs examples of a folder, one at a time."""

    def __init__(self, process: Popen[str], results: Path) -> None:
        self._process = process
        self._results = results

    def run(self, example: Path) -> tuple[int, str, str]:
        """The exit code, and what the example wrote to its standard output and error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(example.name, file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        out, err = (self._results / f"{example.name}.{kind}" for kind in ("out", "err"))
        return code, out.read_text("utf-8"), err.read_text("utf-8")


@contextmanager
def examples_of(folder: Path, results: Path) -> Iterator[Examples]:
    command = [sys.executable, __file__, str(results)]
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = ours | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with Popen(command, cwd=folder, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        yield Examples(process, results)
        assert process.stdin is not None
        process.stdin.close()


def main(results: Path) -> None:
    for module in PRELOADED:
        __import__(module)
    gc.freeze()  # a child collects only what is its own
    for line in iter(sys.stdin.readline, ""):
        name = line.strip()
        child = os.fork()
        if child == 0:
            become(name, results)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(name: str, results: Path) -> None:
    """Run an example as `python NAME` does, or tests by `python -m pytest`, with files for what it writes."""
    for descriptor, path in enumerate((os.devnull, results / f"{name}.out", results / f"{name}.err")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    script = Path.cwd() / name
    sys.path[0] = str(script.parent)
    if name.startswith("test_"):
        again = "ignore::pytest.PytestAssertRewriteWarning"  # a plugin of pytest is imported already
        sys.argv = ["pytest", "-q", "-p", "no:cacheprovider", "-W", again, name]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    else:
        sys.argv = [name]
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
