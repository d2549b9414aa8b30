"""`asynchicache serve`: flags, and what a person sees of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from rich.console import RenderableType

from asynchicache.bench.options import check_minimums, named_values, option
from asynchicache.bench.serve.options import ServeBenchOptions
from asynchicache.bench.tables import facts
from asynchicache.cli.output import Outcome, Output
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError

if TYPE_CHECKING:
    from asynchicache.integrations.serve.api import RequestCounts
    from asynchicache.integrations.serve.loading import LoadedModel

TINY = "tiny"
_MOST_THREADS = 1024
"""Torch starts as many as it is told, and dies of too many."""
_TINY_MEMORY: Mapping[str, object] = {"device_bytes": 256 << 20, "host_bytes": 1 << 30}
"""Of the tiny model, unless somebody says otherwise; others get a share of the machine's memory."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `serve`.

    Raises:
        ConfigError: a value is outside its rule, or two contradict each other.
    """

    model: str = option(TINY, "`tiny`, which has random weights, or the folder of a checkpoint")
    served_model_name: str = option("", "what clients call the model; empty: the folder's name")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one, and prints it", minimum=0)
    tokenizer: str = option(
        "checkpoint", "whose: the checkpoint's, or a token a byte", choices=("checkpoint", "bytes")
    )
    chat_template: str = option("", "a Jinja file to use instead of the checkpoint's template")
    dtype: str = option("auto", "of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    threads: int = option(0, "threads of torch; 0: as many as it likes", minimum=0)
    config: str = option("", "options of the cache: a TOML or JSON file, or a JSON object")
    page_size: int = option(16, "tokens of a page", minimum=1)
    storage: str = option("", "name of a storage engine; empty: as the configuration says")
    storage_option: tuple[str, ...] = option((), "an option of the storage engine, as name=value")
    storage_path: str = option("", "a folder to keep pages in: the file engine")
    max_running: int = option(32, "requests that generate at a time", minimum=1)
    max_waiting: int = option(256, "requests that wait for that; more get status 429", minimum=0)
    max_context: int = option(
        0, "tokens of a prompt and its answer; 0: as many as there is room for", minimum=0
    )
    answer_tokens: int = option(256, "tokens of a chat's answer where the request has no limit", minimum=1)
    max_body_mib: int = option(16, "MiB of a request; longer ones get status 413", minimum=1)
    max_bodies_mib: int = option(
        256, "MiB of all requests that are read and answered; more get status 429", minimum=1
    )
    max_connections: int = option(4096, "connections; requests on more get status 503", minimum=1)
    drain_seconds: float = option(30.0, "how long requests may go on after SIGTERM", minimum=0)
    kv_events_config: str = option("", "publish events of pages: a JSON object as vLLM and SGLang take it")
    trace: bool = option(False, "make OpenTelemetry spans; start it by `opentelemetry-instrument`")
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)
        if self.threads > _MOST_THREADS:
            raise ConfigError(f"--threads {self.threads}: must be {_MOST_THREADS} at most")
        if self.storage and self.storage_path:
            raise ConfigError("--storage-path is short for --storage file: say one of them")
        if self.storage_option and not self.storage:
            raise ConfigError(f"--storage-option {self.storage_option[0]}: say whose, with --storage")
        if self.model == TINY and self.chat_template:
            raise ConfigError(
                f"--chat-template {self.chat_template}: the tiny model has one; give a checkpoint"
            )

    def cache_config(self, defaults: Mapping[str, object]) -> CacheConfig:
        """Options of the cache: flags come before the environment, that before a file.

        Raises:
            ConfigError: one is unknown, or does not fit.
        """
        inline = self.config.lstrip().startswith("{")
        values = _json_object(self.config) if inline else {}
        if self.storage_path:
            values |= {"storage": "file", "storage_options": {"path": self.storage_path}}
        if self.storage:
            values |= {
                "storage": self.storage,
                "storage_options": named_values("--storage-option", self.storage_option),
            }
        path = Path(self.config) if self.config and not inline else None
        return CacheConfig.load(path, values=values, defaults=defaults)


def run(options: ServeOptions, output: Output) -> Outcome:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: flags, model or machine do not fit, or a package is missing; says what to change.
    """
    try:
        import uvicorn

        from asynchicache.integrations.serve import loading, server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'asynchicache[serve]'") from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    settings = server.ServeSettings(
        cache=options.cache_config(_defaults(options, loading.weight_version)),
        name=options.served_model_name,
        page_size=options.page_size,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        max_context=options.max_context,
        answer_tokens=options.answer_tokens,
        max_body_bytes=options.max_body_mib << 20,
        max_bodies_bytes=options.max_bodies_mib << 20,
        max_connections=options.max_connections,
        drain_seconds=options.drain_seconds,
        kv_events=options.kv_events_config,
        trace=options.trace,
    )
    with server.bind(options.host, options.port) as listener:
        loaded = _load(options, settings.cache.device)
        where = server.address(listener)
        serving = server.serve(loaded, settings, listener, lambda _: _announce(output, where))
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            counts = runner.run(serving)
    return Outcome({"address": where, "model": loaded.name} | asdict(counts), _present(counts))


def bench(options: ServeBenchOptions, output: Output) -> Outcome:
    """Conversations with servers of their own processes.

    Raises:
        ConfigError: a package is missing, or a server does not start.
    """
    try:
        from transformers.utils.logging import set_verbosity_error

        from asynchicache.bench.serve.run import run_serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench serve needs {error.name}: pip install 'asynchicache[serve]'") from error
    set_verbosity_error()
    with output.bar("rounds") as advance:
        report = asyncio.run(run_serve(options, advance))
    return Outcome(report.as_json(), report.present(), report.ok)


def _defaults(options: ServeOptions, version: Callable[[Path], str]) -> Mapping[str, object]:
    """Options of the cache where nobody says otherwise."""
    if options.model == TINY:
        return {**_TINY_MEMORY, "weight_version": f"random-{options.seed}"}
    return {"weight_version": version(Path(options.model))}


def _load(options: ServeOptions, device: str) -> LoadedModel:
    from transformers.utils.logging import set_verbosity_error

    from asynchicache.integrations.serve import loading

    set_verbosity_error()  # that fused kernels are missing on a CPU is no news here
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.model == TINY:
        return loading.load_tiny(options.seed)
    return loading.load_checkpoint(
        Path(options.model),
        dtype=options.dtype,
        device=device,
        as_bytes=options.tokenizer == "bytes",
        template=Path(options.chat_template) if options.chat_template else None,
    )


def _announce(output: Output, where: str) -> None:
    """One line, for people and for programs that asked for port 0."""
    output.console.print(f"listening on {where}", soft_wrap=True, highlight=False, markup=False)


def _present(counts: RequestCounts) -> RenderableType:
    numbers = {
        "requests": counts.answered,
        "prompt tokens": counts.prompt_tokens,
        "of them cached": counts.cached_tokens,
        "generated tokens": counts.completion_tokens,
        "clients that left": counts.cancelled,
    }
    refused = {f"refused with status {status}": number for status, number in sorted(counts.refused.items())}
    return facts([(name, f"{number:,}") for name, number in (numbers | refused).items()], "served")


def _json_object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ConfigError(f"--config {text!r} is no JSON object: {error}") from error
