"""Prompts that a server reads from storage before it is ready."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.api import Api
from asynchicache.integrations.serve.messages import ChatRequest, CompletionRequest, decode_request
from asynchicache.integrations.serve.problems import ApiError

_log = logging.getLogger(__name__)


async def warm(api: Api, file: str, seconds: float) -> None:
    """Read the prompts of a file, one request body a line, the most useful first; see `HybridCache.warm`.

    Raises:
        ConfigError: the file cannot be read, or a line is no request; names it.
    """
    try:
        lines = (await asyncio.to_thread(Path(file).read_bytes)).splitlines()
    except OSError as error:
        raise ConfigError(f"--warm {file} cannot be read: {error}") from error
    clock = asyncio.get_running_loop().time
    end, prompts, tokens = clock() + seconds, 0, 0
    for number, line in enumerate(lines, 1):
        kind = ChatRequest if b'"messages"' in line else CompletionRequest
        try:
            request = decode_request(line, kind, context=api.served.context, ignore_unknown=True)
            wanted = [ids for ids, _ in await api.prompts(request)]
        except ApiError as error:
            raise ConfigError(f"--warm {file}, line {number}: {error}") from error
        done = await api.model.cache.warm(wanted, salt=request.cache_salt, seconds=max(end - clock(), 0))
        prompts, tokens = prompts + done.prefixes, tokens + done.tokens
        if not done.in_time:
            _log.warning("warming ended after %g s, at line %d of %d", seconds, number, len(lines))
            break
        if number % 100 == 0:
            _log.info("warming: line %d of %d, %d tokens", number, len(lines), tokens)
    _log.info("warmed %d prompts, %d tokens of them on the host", prompts, tokens)
