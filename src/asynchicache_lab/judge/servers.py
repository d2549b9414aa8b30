"""Servers as a client and an operator see them: started, asked over HTTP, ended and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

Prompt = Sequence[int]

BEST = 5
"""Tokens of each place whose log probabilities are asked for."""
SECONDS = 120.0
"""Most that an answer, or an end by SIGTERM, may take; more is a hang."""
START_SECONDS = 600.0
MODEL = "judged"
"""What clients call the model. An adapter has this name too, with `ADAPTER` behind it."""
ADAPTER = "-adapter"
MAX_TOKENS = 2048
"""Of a prompt and its answer; the device holds twice as many."""

_KEY = "the-key-of-an-operator"
_POLL_SECONDS = 0.05


class JudgedServerError(Exception):
    """A server did not start, ended, hung, or refused a request; the message says which."""


class JudgedAnswer(NamedTuple):
    """What a request got.

    Attributes:
        tokens: what was generated, in the engine's spelling.
        logprobs: of these tokens.
        ranked: at each place, the log probabilities of the best tokens.
        cached: tokens of the prompt that were not computed, as the server reports.
    """

    tokens: list[str]
    logprobs: list[float]
    ranked: list[dict[str, float]]
    cached: int


class Place(NamedTuple):
    """Where an engine is installed.

    Attributes:
        python: its interpreter.
        environment: of its processes, in which `tests/engines/fork_server.py` can be imported.
        version: of the engine.
        models: folders of checkpoints by what they are for: `a`, `b` (other weights of the same
            configuration), `hybrid`; and of adapters of `a`, `adapter1` and `adapter2`.
    """

    python: Path
    environment: Mapping[str, str]
    version: str
    models: Mapping[str, Path]


class ServerLife(NamedTuple):
    """How a server is started.

    Attributes:
        model: folder of the checkpoint.
        adapter: folder of an adapter; None for none.
        hybrid: whether the model has states.
        options: what makes the cache, or switches it off.
        environment: variables.
    """

    model: Path
    adapter: Path | None
    hybrid: bool
    options: Sequence[str]
    environment: Mapping[str, str]


class JudgedEngine(ABC):
    """What is different about an engine.

    Attributes:
        name: of the engine.
        module: what `python -m` starts.
        preloaded: what it imports, which takes long.
        page: tokens after which a prompt can be cached, of the model without states.
        tolerance: nats by which a log probability may differ when a prompt is computed in other steps; by
            `hybrid`.
        verbs: what an operator can do over HTTP beside asking: `flush`, `update`, `adapter`.
        uncached: arguments that switch its own cache off.
    """

    name: str
    module: str
    preloaded: Sequence[str]
    page: int
    tolerance: Mapping[bool, float]
    verbs: frozenset[str]
    uncached: Sequence[str]

    @abstractmethod
    def arguments(self, life: ServerLife, port: int) -> list[str]: ...

    @abstractmethod
    def body(
        self, prompt: Prompt, new: int, salt: str | None, *, adapter: bool
    ) -> tuple[str, dict[str, Any]]:
        """Path and body of a request that is answered greedily, with log probabilities."""

    @abstractmethod
    def read(self, answer: Any) -> JudgedAnswer: ...

    @abstractmethod
    def flush(self, server: Server) -> None:
        """Empty the memory of the engine, as far as it has a verb for that."""

    def update(self, server: Server, model: Path) -> None:
        """Put another checkpoint's weights into the running server, as the engine's documentation says."""
        raise JudgedServerError(f"{self.name} has no verb for weights")


class OpenAIEngine(JudgedEngine):
    """One that has OpenAI's completions."""

    def body(
        self, prompt: Prompt, new: int, salt: str | None, *, adapter: bool
    ) -> tuple[str, dict[str, Any]]:
        salted = {"cache_salt": salt} if salt else {}
        named = {"model": MODEL + ADAPTER * adapter, "prompt": list(prompt), "max_tokens": new}
        return "/v1/completions", {**named, "temperature": 0, "ignore_eos": True, "logprobs": BEST, **salted}

    def read(self, answer: Any) -> JudgedAnswer:
        found = answer["choices"][0]["logprobs"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return JudgedAnswer(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], details.get("cached_tokens") or 0
        )


class VLLM(OpenAIEngine):
    name = "vllm"
    module = "vllm.entrypoints.openai.api_server"
    preloaded = (
        "llvmlite_beside_vllm",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.executor.multiproc_executor",
        "vllm.model_executor.models.qwen3",
        "vllm.lora.worker_manager",
        "transformers",
    )
    page = 32
    tolerance: Mapping[bool, float] = {False: 1e-3, True: 0.1}  # gated delta nets run in bfloat16 only
    verbs = frozenset({"flush", "update", "adapter"})
    uncached = ("--no-enable-prefix-caching",)

    def arguments(self, life: ServerLife, port: int) -> list[str]:
        # Eager, and with a size of the KV cache, it does not warm up.
        shared = f"""
            --max-model-len={MAX_TOKENS} --max-num-batched-tokens={MAX_TOKENS} --max-num-seqs=8
            --enforce-eager --kv-cache-memory-bytes={(64 if life.hybrid else 16) << 20}
            --dtype={"bfloat16" if life.hybrid else "float32"} --enable-prompt-tokens-details
            --return-tokens-as-token-ids --shutdown-timeout=20
            --host=127.0.0.1 --port={port} --served-model-name={MODEL}
        """.split()
        blocks = () if life.hybrid else (f"--block-size={self.page}",)
        adapter = ("--enable-lora", "--max-lora-rank=8", f"--lora-modules={MODEL}{ADAPTER}={life.adapter}")
        return [f"--model={life.model}", *shared, *blocks, *(adapter if life.adapter else ()), *life.options]

    def flush(self, server: Server) -> None:
        server.until(lambda: server.call("POST", "/reset_prefix_cache") == {"success": True})

    def update(self, server: Server, model: Path) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        server.call("POST", "/collective_rpc", reload)
        server.until(
            lambda: server.call("POST", "/reset_prefix_cache?reset_external=true") == {"success": True}
        )


class SGLang(JudgedEngine):
    name = "sglang"
    module = "sglang.launch_server"
    preloaded = (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.models.registry",
    )
    page = 64
    tolerance: Mapping[bool, float] = {False: 1e-3, True: 1e-3}
    verbs = frozenset({"flush", "update", "adapter"})
    uncached = ("--disable-radix-cache",)

    def arguments(self, life: ServerLife, port: int) -> list[str]:
        # Two requests run and others wait, so that a linker can read what they will hit.
        shared = f"""
            --max-running-requests=2 --schedule-policy=lpm --max-total-tokens={2 * MAX_TOKENS}
            --context-length={MAX_TOKENS} --page-size={self.page} --dtype=float32 --random-seed=1
            --device=cpu --attention-backend=torch_native --disable-cuda-graph --skip-server-warmup
            --skip-tokenizer-init --enable-cache-report --admin-api-key={_KEY}
            --host=127.0.0.1 --port={port} --served-model-name={MODEL}
        """.split()
        states = ("--mamba-radix-cache-strategy=extra_buffer", "--max-mamba-cache-size=40")
        lora = ["--max-lora-rank=8", "--max-loras-per-batch=2", "--lora-backend=torch_native"]
        adapter = (f"--lora-paths={MODEL}{ADAPTER}={life.adapter}", *lora)
        more = (*(states if life.hybrid else ()), *(adapter if life.adapter else ()), *life.options)
        return [f"--model-path={life.model}", *shared, *more]

    def body(
        self, prompt: Prompt, new: int, salt: str | None, *, adapter: bool
    ) -> tuple[str, dict[str, Any]]:
        parameters = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": parameters}
        body |= {"return_logprob": True, "top_logprobs_num": BEST}
        salted = {"cache_salt": salt} if salt else {}
        return "/generate", body | salted | ({"lora_path": MODEL + ADAPTER} if adapter else {})

    def read(self, answer: Any) -> JudgedAnswer:
        about = answer["meta_info"]
        return JudgedAnswer(
            [str(token) for token in answer["output_ids"]],
            [each[0] for each in about["output_token_logprobs"]],
            [{str(token): logprob for logprob, token, _ in each} for each in about["output_top_logprobs"]],
            about["cached_tokens"],
        )

    def flush(self, server: Server) -> None:
        server.until(lambda: server.status("POST", "/flush_cache") == 200)

    def update(self, server: Server, model: Path) -> None:
        server.call("POST", "/update_weights_from_disk", {"model_path": str(model), "flush_cache": True})


class Serve(OpenAIEngine):
    """`asynchicache serve`, in a program that can change its model's weights."""

    name = "serve"
    module = "asynchicache_lab.judge.changing"
    preloaded = (
        "asynchicache.cache",
        "asynchicache.integrations.serve.server",
        "asynchicache.integrations.transformers",
        "transformers.models.auto.modeling_auto",
    )
    page = 16
    tolerance: Mapping[bool, float] = {False: 1e-3, True: 1e-3}
    verbs = frozenset({"flush", "update"})
    uncached = ()  # whoever asks for what is not cached has a salt of his own

    def arguments(self, life: ServerLife, port: int) -> list[str]:
        memory = {"device_bytes": "40MiB" if life.hybrid else "16MiB", "host_bytes": "128MiB"}
        shared = f"--port={port} --page-size={self.page} --dtype=float32 --threads=1 --admin-token={_KEY}"
        named = (f"--model={life.model}", f"--served-model-name={MODEL}", f"--config={json.dumps(memory)}")
        return ["serve", *shared.split(), *named, *life.options]

    def flush(self, server: Server) -> None:
        server.call("POST", "/flush_cache")

    def update(self, server: Server, model: Path) -> None:
        path = server.life.model
        path.unlink()
        path.symlink_to(model)
        server.signal(signal.SIGUSR1)
        server.call("POST", "/update_weights", {"weight_version": "updated in place"})


class Forks:
    """A process that has imported an engine, and forks its servers.

    Args:
        engine: what is imported.
        place: where it is installed.
        folder: of the socket and the log; paths of sockets are short.
    """

    def __init__(self, engine: JudgedEngine, place: Place, folder: Path) -> None:
        self._door, log = folder / f"{engine.name}.forks", folder / f"{engine.name}.forks.log"
        command = [str(place.python), "-m", "fork_server", str(self._door), engine.module]
        with log.open("w") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, in the engine's interpreter
                [*command, *engine.preloaded],
                env=dict(place.environment),
                stdout=output,
                stderr=output,
                cwd=folder,
            )
        with suppress(JudgedServerError):
            _until(lambda: self._door.exists() or self._process.poll() is not None, START_SECONDS)
        if not self._door.exists():
            self.close()
            raise JudgedServerError(f"{engine.name} cannot be imported: {_complaint(log)} ({log})")

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Return the process of a new server, which leads a group."""
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(str(self._door))
            door.sendall(json.dumps(order).encode() + b"\n")
            return int(door.recv(32))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._door.unlink(missing_ok=True)


class Server:
    """A running server; ready when it is made.

    Attributes:
        engine: what serves.
        life: how it was started.

    Raises:
        JudgedServerError: it does not start; says the last line of its log.
    """

    def __init__(self, engine: JudgedEngine, forks: Forks, life: ServerLife, log: Path) -> None:
        self.engine, self.life, self._log = engine, life, log
        self._port = free_port()
        said = log.stat().st_size if log.exists() else 0
        self._process = forks.fork(engine.arguments(life, self._port), life.environment, log)
        try:
            _until(lambda: self.healthy or not self.alive, START_SECONDS)
        except JudgedServerError:
            self.kill()
            raise JudgedServerError(f"is not healthy after {START_SECONDS:.0f} s ({log})") from None
        if not self.alive:
            self.kill()
            raise JudgedServerError(f"does not start: {_complaint(log, said)} ({log})")

    @property
    def alive(self) -> bool:
        return _about(self._process) is not None

    @property
    def healthy(self) -> bool:
        try:
            return self.status("GET", "/health") == 200
        except JudgedServerError:
            return False

    def ask(
        self, prompt: Prompt, *, new: int, salt: str | None = None, adapter: bool = False
    ) -> JudgedAnswer:
        path, body = self.engine.body(prompt, new, salt, adapter=adapter)
        return self.engine.read(self.call("POST", path, body))

    def abandon(self, prompt: Prompt, seconds: float) -> None:
        """Send a prompt, and hang up after a while."""
        path, body = self.engine.body(prompt, 64, None, adapter=False)
        with closing(HTTPConnection("127.0.0.1", self._port)) as connection, suppress(OSError):
            connection.request(
                "POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
            )
            time.sleep(seconds)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Return the JSON of an answer, or its text.

        Raises:
            JudgedServerError: there is no answer in time, or its status is no success.
        """
        status, text = self._request(method, path, body)
        if status // 100 != 2:
            raise JudgedServerError(f"{method} {path}: HTTP {status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def status(self, method: str, path: str) -> int:
        return self._request(method, path, None)[0]

    def _request(self, method: str, path: str, body: object) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)) as connection:
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                return response.status, response.read().decode(errors="replace")
            except TimeoutError:
                raise JudgedServerError(f"{method} {path}: no answer in {SECONDS:.0f} s") from None
            except (OSError, HTTPException) as error:
                raise JudgedServerError(f"{method} {path}: {type(error).__name__} {error}") from error

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process, number)

    def until(self, condition: Callable[[], bool]) -> None:
        _until(condition, SECONDS)

    def stop(self) -> None:
        """End it as a process manager does.

        Raises:
            JudgedServerError: it did not end by itself; it is killed then.
        """
        family = _family(self._process)
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGTERM)
        try:
            _until(lambda: not self.alive, SECONDS)
        except JudgedServerError:
            raise JudgedServerError(f"did not end in {SECONDS:.0f} s after SIGTERM ({self._log})") from None
        finally:
            _kill(family)

    def kill(self) -> None:
        """End all of its processes at once, as a machine dies."""
        _kill(_family(self._process))


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _until(lambda: not any(_about(process) for process in processes), SECONDS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise JudgedServerError(f"still not so after {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)


def _about(process: int) -> tuple[int, int] | None:
    """Parent and group of a process that has not ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[2]))


def _family(leader: int) -> set[int]:
    """A server, its group, and what these have started, in groups of their own too."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    known = {number: about for number in numbers if (about := _about(number))}
    family = {number for number, (_, group) in known.items() if number == leader or group == leader}
    while more := {number for number, (parent, _) in known.items() if parent in family} - family:
        family |= more
    return family


def _complaint(log: Path, start: int = 0) -> str:
    """The first error that was said since a place in a log, or the last line."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "WARNING" not in line]
    errors = [line for line in said if re.search(r"(error|Error|Exception): ", line)]
    return (errors[:1] or lines[-1:] or ["it said nothing"])[0][-300:]
