"""The server: binds, opens model and cache, serves until it is told to stop, and drains."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec
import uvicorn

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError, StorageError
from asynchicache.integrations.serve.api import Api, RequestCounts, ServedModel
from asynchicache.integrations.serve.app import build_app
from asynchicache.integrations.serve.loading import LoadedModel
from asynchicache.integrations.serve.protocol import Connection
from asynchicache.integrations.transformers.model import PrefixCachedModel

_log = logging.getLogger(__name__)

_KEEP_ALIVE = 60  # seconds; longer than the pauses of clients, which else meet a connection that closes
_STOPPING = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        cache: options of the cache; its `storage` is opened beside the server, and again when it fails.
        name: what clients call the model; empty for its own.
        page_size: tokens of a page.
        max_running, max_waiting: requests that generate, and that wait for that; more get status 429.
        max_context: tokens of a prompt and its answer; 0 for what model and cache have room for.
        answer_tokens: how many are generated if a chat does not say.
        max_body_bytes: longer requests get status 413.
        max_bodies_bytes: of all requests that are read and answered at a time; more get status 429.
        max_connections: what is sent over more gets status 503, but for questions how the server is.
        drain_seconds: how long requests may go on when the server is told to stop.
        attach_seconds: pause between attempts to open storage.
        kv_events: where events of pages are published, as JSON; empty for nowhere.
        trace: make OpenTelemetry spans, with the process's provider.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    name: str = ""
    page_size: int = 16
    max_running: int = 32
    max_waiting: int = 256
    max_context: int = 0
    answer_tokens: int = 256
    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 256 << 20
    max_connections: int = 4096
    drain_seconds: float = 30.0
    attach_seconds: float = 5.0
    kv_events: str = ""
    trace: bool = False

    def __post_init__(self) -> None:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes {self.max_bodies_bytes} must have room for one of {self.max_body_bytes}: "
                "raise --max-bodies-mib, or lower --max-body-mib"
            )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes one that is free.

    Raises:
        ConfigError: the address cannot be had; says why.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} must be 0 to 65535; 0 takes a free one")
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
    """Where a listener is reached: `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    loaded: LoadedModel,
    settings: ServeSettings,
    listener: socket.socket,
    ready: Callable[[ApiServer], object],
) -> RequestCounts:
    """Serve until SIGTERM, SIGINT or cancellation; then drain.

    Args:
        loaded: the model.
        settings: how it is served.
        listener: bound; closed at the end.
        ready: called with the server, once requests are taken.

    Returns:
        what became of the requests.

    Raises:
        ConfigError: model, cache and settings do not fit each other.
        CapacityError: the pools need more memory than there is.
    """
    async with open_api(loaded, settings) as api:
        app = build_app(
            api,
            max_body_bytes=settings.max_body_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            max_connections=settings.max_connections,
        )
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            http=Connection,  # of h11: httptools, which uvicorn prefers, takes headers of any size
            ws="none",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
            limit_concurrency=settings.max_connections,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
        server = ApiServer(config, api, ready)
        await server.serve(sockets=[listener])
        await api.idle()  # those that drained in vain were cancelled, and end now
        return api.counts


@asynccontextmanager
async def open_api(loaded: LoadedModel, settings: ServeSettings) -> AsyncIterator[Api]:
    """A model with its cache, ready to answer; on leaving, what was computed goes to storage.

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
        api = Api(model, _served(loaded, settings, model.capacity_tokens))
        try:
            async with (
                _signals(model.cache, settings),
                _storage(model.cache, config, settings.attach_seconds),
            ):
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
    )


@asynccontextmanager
async def _signals(cache: HybridCache, settings: ServeSettings) -> AsyncIterator[None]:
    """Spans and events, as far as they are wanted.

    Raises:
        ConfigError: a package is missing, or an endpoint cannot be used.
    """
    async with AsyncExitStack() as stack:
        try:
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


@asynccontextmanager
async def _storage(cache: HybridCache, config: CacheConfig, pause: float) -> AsyncIterator[None]:
    """Storage as soon as it can be opened: a server that has none for now serves from memory.

    Raises:
        ConfigError: it can never be opened with these options.
    """
    if config.storage is None or await _attached(cache, config.storage, config.storage_options):
        yield
        return
    task = asyncio.create_task(_attach_later(cache, config.storage, config.storage_options, pause))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _attached(cache: HybridCache, name: str, options: Mapping[str, object]) -> bool:
    try:
        await cache.attach_storage(name, options)
    except StorageError as error:
        _log.warning("storage %s cannot be opened, so nothing is kept there for now: %s", name, error)
        return False
    return True


async def _attach_later(cache: HybridCache, name: str, options: Mapping[str, object], pause: float) -> None:
    while True:
        await asyncio.sleep(pause)
        if await _attached(cache, name, options):
            _log.warning("storage %s is open now", name)
            return


async def _drain(cache: HybridCache, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await cache.drain()
    except TimeoutError:
        _log.warning("not everything went to storage within %g s", seconds)


class ApiServer(uvicorn.Server):
    """Stops by signal as uvicorn does, but comes back to close the cache: uvicorn would raise the signal
    again, and the process would die of it."""

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
        """Take no more requests, and end when those that are here are answered; at once if called again."""
        self.api.stopping = True
        self.force_exit = self.should_exit
        self.should_exit = True
        for task in self.server_state.tasks if self.force_exit else ():
            task.cancel()  # from Python 3.12.1 on uvicorn waits for every connection, forced or not
