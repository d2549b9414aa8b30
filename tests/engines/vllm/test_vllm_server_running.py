"""vLLM as an OpenAI server with the connector: killed, restarted, and abandoned by clients."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from connecting import connector, shared_memory
from running import Prompt, prompts

from engines import Server, free_port

LENGTH = 1500
PROMPTS = [prompt[:LENGTH] for prompt in prompts(3, LENGTH)]


class Completion(NamedTuple):
    """What the server answered."""

    tokens: list[int]
    cached: int


class ApiServer:
    """`vllm.entrypoints.openai.api_server` on 127.0.0.1: the API, an engine and a worker, each a process."""

    def __init__(self, checkpoint: Path, transfer: dict[str, Any] | None) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        command += [
            "--max-model-len",
            "2048",
            "--max-num-seqs",
            "8",
            "--block-size",
            "32",
            "--dtype",
            "float32",
        ]
        command += [
            "--enforce-eager",
            "--kv-cache-memory-bytes",
            str(128 << 20),
            "--enable-prompt-tokens-details",
        ]
        command += ["--shutdown-timeout", "20"]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        # The engine runs in its own process, whatever other tests of this one want.
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        self._server = Server(command, ready="Application startup complete", port=self.port, env=environment)
        self._server.start()

    def _post(self, prompt: Prompt, *, new: int, stream: bool) -> HTTPConnection:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def ask(self, prompt: Prompt, *, new: int = 8) -> Completion:
        with closing(self._post(prompt, new=new, stream=False)) as connection:
            answer = json.loads(connection.getresponse().read())
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Completion(answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def abandon(self, prompt: Prompt, seconds: float) -> None:
        """Send a prompt, and hang up after a while."""
        with closing(self._post(prompt, new=64, stream=True)):
            threading.Event().wait(seconds)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
            return str(page.read(), "utf-8")

    def kill(self) -> None:
        """Kill all of its processes, as a machine dies."""
        family = self._family() if self._server.running else []
        for one in family:
            one.kill()
        self._server.kill()
        psutil.wait_procs(family)

    def stop(self) -> str:
        """End it as a process manager does; returns what it printed."""
        family = self._family()
        self._server.stop()
        psutil.wait_procs(family)
        return self._server.output

    def _family(self) -> list[psutil.Process]:
        return list(psutil.Process(self._server.pid).children(recursive=True))


@contextmanager
def serving(checkpoint: Path, transfer: dict[str, Any] | None) -> Iterator[ApiServer]:
    server = ApiServer(checkpoint, transfer)
    try:
        yield server
    finally:
        server.kill()


def test_a_server_that_is_killed_finds_everything_again_and_survives_clients_that_hang_up(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint, folder = model("qwen3"), tmp_path / "pages"
    with serving(checkpoint, connector(folder)) as first:
        computed = [first.ask(prompt) for prompt in PROMPTS]
        first.ask([5] * 40)
        until(lambda: stored_blocks(first) >= 3 * (LENGTH // 32))
        first.kill()
    before = shared_memory()
    with serving(checkpoint, connector(folder)) as second:
        restored = [second.ask(prompt) for prompt in PROMPTS]
        left = prompts(30, 300, seed=8)
        with ThreadPoolExecutor(8) as clients:
            list(
                clients.map(
                    lambda place: second.abandon(left[place], 0.002 + 0.004 * (place % 15)), range(30)
                )
            )
        after = [second.ask(prompt[:300]) for prompt in left]
        repeated = [second.ask(prompt[:300]) for prompt in left]
        second.stop()

    assert [answer.cached for answer in computed] == [0, 0, 0]
    assert [answer.cached for answer in restored] == [1472, 1472, 1472]
    assert [answer.tokens for answer in restored] == [answer.tokens for answer in computed]
    assert [answer.tokens for answer in after] == [answer.tokens for answer in repeated]
    assert {answer.cached for answer in repeated} == {288}
    assert shared_memory() == before


def stored_blocks(server: ApiServer) -> float:
    lines = [
        line
        for line in server.metrics().splitlines()
        if "storage_blocks_total" in line and 'outcome="stored"' in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.05)
