"""The server: bind, open model and cache, serve until stopped, and drain."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec
import uvicorn

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.api import Api, RequestCounts, Role, ServedModel
from asynchicache.integrations.serve.app import build_app
from asynchicache.integrations.serve.attaching import ServedStorage
from asynchicache.integrations.serve.description import describe
from asynchicache.integrations.serve.loading import LoadedModel
from asynchicache.integrations.serve.protocol import Connection
from asynchicache.integrations.serve.warming import warm
from asynchicache.integrations.transformers.model import PrefixCachedModel

_log = logging.getLogger(__name__)

_KEEP_ALIVE = 60  # seconds; longer than pauses of clients, or they would reuse a closing connection
_LAST_SECONDS = 1.0  # for clients that do not read
_LEAST_TOKEN = 16  # characters, so that it cannot be guessed
_OF_ONE_PROCESS = {"file", "memory"}  # storage that no second server can have open
_STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of the server.

    Attributes:
        cache: options of the cache; the server starts even if `storage` cannot be opened, and retries.
        name: model name for clients; empty for the model's own name.
        page_size: tokens per page.
        max_running: most requests that generate at a time.
        max_waiting: most requests in the queue; more get status 429.
        max_context: most tokens of a prompt and its answer; 0 for the limit of model and cache.
        answer_tokens: default limit on the answer of a chat.
        max_body_bytes: most bytes of a body; longer ones get status 413.
        max_bodies_bytes: most bytes of all bodies that are being read or answered; more get status 429.
        ignore_unknown: leave out unknown fields of requests instead of refusing them.
        max_connections: most connections; generation requests on further ones get status 503.
        drain_seconds: how long running requests may continue after the server is stopped.
        kv_events: configuration of the KV event publisher, as JSON; empty for none.
        record_trace: the file of a trace for `replay`; empty: none.
        trace: create OpenTelemetry spans, with the process's provider.
        admin_token: what operators send; empty turns their endpoints off.
        attach_seconds: pause between attempts to open storage.
        warm, warm_seconds: a file of prompts to read from storage before the server is ready, and the longest
            that this takes; empty: none.
        role: `prefill` computes prompts, and answers when storage has them; `decode` waits until storage has
            a prompt, and ends an answer when storage has that too; `both` asks no other server.
        wait_seconds: the longest that a role waits for storage, before and after it computes.
    """

    cache: CacheConfig
    name: str
    page_size: int
    max_running: int
    max_waiting: int
    max_context: int
    answer_tokens: int
    max_body_bytes: int
    max_bodies_bytes: int
    max_connections: int
    ignore_unknown: bool
    drain_seconds: float
    kv_events: str
    record_trace: str
    trace: bool
    admin_token: str = ""
    attach_seconds: float = 5.0
    warm: str = ""
    warm_seconds: float = 60.0
    role: Role = "both"
    wait_seconds: float = 30.0

    def __post_init__(self) -> None:
        names = self.cache.storage_name
        if self.role != "both" and set(names.split("+")) <= {"", *_OF_ONE_PROCESS}:
            raise ConfigError(
                f"--role {self.role} hands prompts over by storage, which is {names or 'none'!r}: name one "
                "that both servers open, such as redis or an object store"
            )
        if self.admin_token and len(self.admin_token) < _LEAST_TOKEN:
            raise ConfigError(
                f"the admin token has {len(self.admin_token)} characters: take {_LEAST_TOKEN} or more"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes {self.max_bodies_bytes} must have room for one of {self.max_body_bytes}: "
                "raise --max-bodies-mib, or lower --max-body-mib"
            )


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free port.

    Raises:
        ConfigError: the address cannot be bound; says why.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port} of {host} is in use: stop who has it, or take --port 0"
            ) from error
        raise ConfigError(f"--host {host} --port {port} cannot be bound: {error}") from error


def address(listener: socket.socket) -> str:
    """Return the URL of a listener, such as `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    loaded: LoadedModel,
    settings: ServeSettings,
    listener: socket.socket,
    ready: Callable[[ApiServer], object],
) -> RequestCounts:
    """Serve until SIGTERM, SIGINT or cancellation, then drain; returns the results of requests.

    Args:
        listener: a bound socket; closed at the end.
        ready: called with the server once it accepts requests.

    Raises:
        ConfigError: model, cache and settings do not match.
        CapacityError: the pools do not fit into memory.
    """
    async with open_api(loaded, settings) as api:
        app = build_app(
            api,
            admin_token=settings.admin_token,
            max_body_bytes=settings.max_body_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            max_connections=settings.max_connections,
            ignore_unknown=settings.ignore_unknown,
        )
        for line in describe(api):
            _log.info("%s", line)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            http=Connection,  # h11: httptools, uvicorn's default, does not limit the size of headers
            ws="none",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
            limit_concurrency=settings.max_connections,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
        server = ApiServer(config, api, ready)
        await server.serve(sockets=[listener])
        await api.idle()  # requests that did not drain in time were cancelled, and end now
        if tasks := server.server_state.tasks:
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)  # which tell their clients
        return api.counts


@asynccontextmanager
async def open_api(loaded: LoadedModel, settings: ServeSettings) -> AsyncIterator[Api]:
    """Open a model with its cache; on exit, pages in memory are written to storage.

    Raises:
        ConfigError, CapacityError: as `serve`.
    """
    config = settings.cache
    without = msgspec.structs.replace(config, storage=None, storage_options={})
    async with PrefixCachedModel.open(
        loaded.model,
        config=without,
        page_size=settings.page_size,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
    ) as model:
        served = _served(loaded, settings, model.capacity_tokens)
        storage = ServedStorage(model.cache, config, settings.attach_seconds)
        api = Api(model, served, storage, records=bool(settings.record_trace))
        try:
            async with (
                _signals(model.cache, settings),
                api.storage,
            ):
                if settings.warm:
                    await warm(api, settings.warm, settings.warm_seconds)
                yield api
                await _drain(model.cache, config.close_seconds)
        finally:
            api.close()


def _served(loaded: LoadedModel, settings: ServeSettings, capacity: int) -> ServedModel:
    room = min(loaded.context, capacity)
    if settings.max_context > room:
        raise ConfigError(
            f"--max-context {settings.max_context}: the model takes {loaded.context} tokens, the cache's "
            f"device for {capacity}: lower it, or raise device_bytes or device_slots"
        )
    return ServedModel(
        name=settings.name or loaded.name,
        tokenizer=loaded.tokenizer,
        vocabulary=loaded.vocabulary,
        stop_ids=loaded.stop_ids,
        context=settings.max_context or room,
        answer_tokens=settings.answer_tokens,
        temperature=loaded.temperature,
        top_p=loaded.top_p,
        folder=loaded.folder,
        choices=settings.max_running + settings.max_waiting,
        role=settings.role,
        wait_seconds=settings.wait_seconds,
    )


@asynccontextmanager
async def _signals(cache: HybridCache, settings: ServeSettings) -> AsyncIterator[None]:
    """Open tracing and the KV event publisher, if configured.

    Raises:
        ConfigError: a package is missing, or an endpoint cannot be used.
    """
    async with AsyncExitStack() as stack:
        try:
            if settings.record_trace:
                cache.record(settings.record_trace)
            if settings.trace:
                from asynchicache.integrations.otel import instrument

                instrument(cache)
            if settings.kv_events:
                from asynchicache.integrations.kv_events.config import KvEventsConfig
                from asynchicache.integrations.kv_events.publisher import KvEventPublisher

                options = KvEventsConfig.from_json(settings.kv_events)
                await stack.enter_async_context(KvEventPublisher.open(cache, options))
        except ModuleNotFoundError as error:
            package = "asynchicache[kv-events]" if error.name == "zmq" else "asynchicache[otel]"
            raise ConfigError(f"{error.name} is missing: pip install '{package}'") from error
        yield


async def _drain(cache: HybridCache, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await cache.drain()
    except TimeoutError:
        _log.warning("not everything went to storage within %g s", seconds)


class ApiServer(uvicorn.Server):
    """A uvicorn server that returns after a signal, so that the cache can be closed.

    uvicorn itself raises the signal again after serving, which ends the process.
    """

    def __init__(self, config: uvicorn.Config, api: Api, ready: Callable[[ApiServer], object]) -> None:
        super().__init__(config)
        self.api = api
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in _STOPPING:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _STOPPING:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Refuse new requests, and end when running ones are answered; if called again, end at once."""
        self.api.stopping = True
        self.force_exit = self.should_exit
        self.should_exit = True
        for task in self.server_state.tasks if self.force_exit else ():
            task.cancel()  # since Python 3.12.1, uvicorn waits for all connections even with force_exit
