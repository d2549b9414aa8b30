"""SGLang servers as processes: started, asked over HTTP, stopped and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from asynchicache_lab.judge.servers import Forks

PAGE = 64
SECONDS = 240.0
"""Most that a start, a stop or an answer may take; on an idle machine 3 s, 2 s and less than 1 s."""

_POLL_SECONDS = 0.05
_KEY = "operator"
_COMMON = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--random-seed=1",
    "--skip-tokenizer-init",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--enable-cache-report",
    "--enable-metrics",
    "--host=127.0.0.1",
)
STATES = ("--mamba-radix-cache-strategy=extra_buffer", "--max-mamba-cache-size=40")
"""Of models with states: they are kept at page boundaries."""

HICACHE = (
    "--enable-hierarchical-cache",
    "--hicache-mem-layout=page_first_direct",
    "--hicache-io-backend=direct",
    "--hicache-write-policy=write_through",
    "--hicache-storage-prefetch-policy=wait_complete",
)


class Answer(NamedTuple):
    """What a request got.

    Attributes:
        tokens: what was generated.
        prompt: tokens of the prompt.
        cached: those that were not computed.
        places: the same by where they came from: device, host, storage.
        logprobs: of the generated tokens.
        seconds: that it took.
    """

    tokens: list[int]
    prompt: int
    cached: int
    places: Mapping[str, int]
    logprobs: list[float]
    seconds: float


class Server:
    """One server; a `with` block waits until it is healthy, and stops it.

    Args:
        forks: where it comes from.
        checkpoint: folder of the model.
        arguments: of `sglang serve`, beside those of all servers here.
        log: file of what it says.
        environment: variables of its processes.
    """

    def __init__(
        self,
        forks: Forks,
        checkpoint: Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.log = log
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        given = [
            f"--model-path={checkpoint}",
            f"--port={port}",
            f"--page-size={PAGE}",
            f"--admin-api-key={_KEY}",
            *_COMMON,
            *arguments,
        ]
        self._process = forks.fork(given, environment, log)

    def wait(self) -> Self:
        """Wait until it is healthy.

        Raises:
            RuntimeError: it ended; says where its log is.
        """
        wait_for(lambda: self._healthy() or not self.alive)
        if not self.alive:
            raise RuntimeError(f"the server ended; the end of {self.log}:\n{self.log.read_text()[-3000:]}")
        return self

    @property
    def alive(self) -> bool:
        try:
            state = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def _healthy(self) -> bool:
        try:
            return self.call("GET", "/health")[0] == 200
        except (URLError, OSError):
            return False

    def ask(self, prompt: Sequence[int], *, new: int = 16, **more: Any) -> Answer:
        """Generate greedily."""
        parameters = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True, **more}
        started = time.monotonic()
        status, text = self.call("POST", "/generate", body)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {text[:500]}")
        answer = json.loads(text)
        about = answer["meta_info"]
        places = {
            place: count
            for place, count in (about.get("cached_tokens_details") or {}).items()
            if isinstance(count, int)
        }
        return Answer(
            answer["output_ids"],
            about["prompt_tokens"],
            about["cached_tokens"],
            places,
            [each[0] for each in about["output_token_logprobs"]],
            time.monotonic() - started,
        )

    def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Call an endpoint; return status and text."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
        request = Request(self._url + path, data=data, headers=headers, method=method)
        try:
            with urlopen(request, timeout=SECONDS) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.call("GET", "/metrics")[1].splitlines()
        mine = [line for line in lines if re.match(rf"sglang:{name}[ {{]", line)]
        return sum(float(line.split()[-1]) for line in mine if all(each in line for each in wanted))

    def flush(self) -> None:
        """Empty the device and the host pool."""
        wait_for(lambda: self.call("POST", "/flush_cache")[0] == 200)

    def kill(self) -> None:
        """End all of its processes at once, as `kill -9` does."""
        try:
            os.killpg(self._process, signal.SIGKILL)
        except ProcessLookupError:
            return
        wait_for(lambda: not _members(self._process))

    def stop(self) -> None:
        """Ask it to end, and see that nothing of it is left."""
        if self.alive:
            os.kill(self._process, signal.SIGTERM)
            wait_for(lambda: not self.alive)
        self.kill()

    def __enter__(self) -> Self:
        try:
            return self.wait()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def storage_options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return options of our storage over a file store in `folder`."""
    return {
        "backend_name": "asynchicache",
        "module_path": "asynchicache.integrations.sglang.storage",
        "class_name": "AsynchicacheStorage",
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "file",
        "storage_options": {"path": str(folder)},
        "prefetch_threshold": 1,
        **more,
    }


def storage(folder: Path, **more: Any) -> list[str]:
    """Return arguments for HiCache over such a store."""
    options = json.dumps(storage_options(folder, **more))
    return [
        *HICACHE,
        "--hicache-storage-backend=dynamic",
        f"--hicache-storage-backend-extra-config={options}",
    ]


def linker(
    folder: Path,
    *,
    linker: str = "AsynchicacheLinker",
    linker_module_path: str = "asynchicache.integrations.sglang.linker",
    **more: Any,
) -> list[str]:
    """Return arguments for a linker, with 64 MiB of host memory over a file store in `folder`."""
    config = {
        "linker": linker,
        "linker_module_path": linker_module_path,
        "linker_extra_config": {
            "host_bytes": "64MiB",
            "weight_version": "1",
            "storage": "file",
            "storage_options": {"path": str(folder)},
            **more,
        },
    }
    return [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=dynamic",
        f"--unified-cache-external-linker-config={json.dumps(config)}",
    ]


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """
    Raises:
        TimeoutError: it did not come true.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} did not come true in {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)


def _free_port() -> int:
    """SGLang takes further ports near the one that it is given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _members(group: int) -> list[str]:
    """Processes of a group that have not ended."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, leader = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(leader) == group and state not in "ZX":
            members.append(entry.name)
    return members
