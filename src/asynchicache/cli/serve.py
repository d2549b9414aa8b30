"""`asynchicache serve`: flags, and what a person sees of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from asynchicache.cli.options import TINY, ServeOptions
from asynchicache.cli.output import CommandResult, Output
from asynchicache.errors import ConfigError
from asynchicache.reports import facts

if TYPE_CHECKING:
    from asynchicache.config import CacheConfig
    from asynchicache.integrations.serve.api import RequestCounts
    from asynchicache.integrations.serve.loading import LoadedModel
    from asynchicache.integrations.serve.server import ServeSettings

_TINY_MEMORY: Mapping[str, object] = {"device_bytes": 256 << 20, "host_bytes": 1 << 30}
"""Of the tiny model, unless somebody says otherwise; others get a share of the machine's memory."""


def run(options: ServeOptions, output: Output) -> CommandResult:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: flags, model or machine do not fit, or a package is missing; says what to change.
    """
    from asynchicache.config import check_storage

    # Before what takes seconds: reading weights for their name, importing the server, loading the model.
    asked = options.cache_config({"weight_version": "not read yet"})
    if asked.storage is not None:
        check_storage(asked.storage, asked.storage_options)
    try:
        import uvicorn

        from asynchicache.integrations.model_files import checkpoint_digest
        from asynchicache.integrations.serve import server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'asynchicache[serve]'") from error
    _start_log(options)
    settings = settings_of(options, options.cache_config(_defaults(options, checkpoint_digest)))
    with server.bind(options.host, options.port) as listener:
        loaded = _load(options, settings.cache.device)
        where = server.address(listener)
        serving = server.serve(loaded, settings, listener, lambda _: _announce(output, where))
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            counts = runner.run(serving)
    return CommandResult({"address": where, "model": loaded.name} | asdict(counts), _present(counts))


def settings_of(options: ServeOptions, cache: CacheConfig) -> ServeSettings:
    """The settings of the server for flags, and for options of the cache."""
    from asynchicache.config import admin_token
    from asynchicache.integrations.serve.server import ServeSettings

    return ServeSettings(
        cache=cache,
        name=options.served_model_name,
        page_size=options.page_size,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        max_context=options.max_context,
        answer_tokens=options.answer_tokens,
        max_body_bytes=options.max_body_mib << 20,
        max_bodies_bytes=options.max_bodies_mib << 20,
        max_connections=options.max_connections,
        ignore_unknown=options.ignore_unknown_fields,
        drain_seconds=options.drain_seconds,
        kv_events=options.kv_events_config,
        record_trace=options.record_trace,
        warm=options.warm,
        warm_seconds=options.warm_seconds,
        role=options.role,
        wait_seconds=options.wait_seconds,
        trace=options.trace,
        admin_token=options.admin_token or admin_token(),
    )


def _start_log(options: ServeOptions) -> None:
    """Log to standard error: the library from the chosen level on, everything else its warnings."""
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    logging.basicConfig(
        level=max(level, logging.WARNING), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("asynchicache").setLevel(level)
    if not options.access_log:
        logging.getLogger("asynchicache.integrations.serve.access").setLevel(logging.WARNING)


def _defaults(options: ServeOptions, version: Callable[[Path], str]) -> Mapping[str, object]:
    """Default options of the cache."""
    if options.model == TINY:
        return {**_TINY_MEMORY, "weight_version": f"random-{options.seed}"}
    return {"weight_version": version(Path(options.model)) or "no files"}


def _load(options: ServeOptions, device: str) -> LoadedModel:
    from transformers.utils.logging import set_verbosity_error

    from asynchicache.integrations.serve import loading

    set_verbosity_error()  # that fused kernels are missing on a CPU is no news here
    if options.threads:
        import torch

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
        "cancelled": counts.cancelled,
    }
    refused = {f"refused with status {status}": number for status, number in sorted(counts.refused.items())}
    return facts([(name, f"{number:,}") for name, number in (numbers | refused).items()], "served")
