"""The cache's options, from code, files or the environment, and storage backends by name.

The only module that reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from logging import getLogger
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec
from msgspec.inspect import StrType

from asynchicache.errors import ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.options import Given, Natural, Positive, Seconds, Share, default, options_of, parse_value
from asynchicache.planner.options import PlannerOptions, PrefetchOptions, WriteWord
from asynchicache.ports import Port
from asynchicache.storage.chain import ChainStage, StageName, StagePolicy, StorageChain
from asynchicache.storage.deadlines import as_storage_error
from asynchicache.storage.labels import Inventory
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import StorageBackend, check_backend
from asynchicache.transfer.paths import CopyPath
from asynchicache.types import PrefetchPolicy, WritePolicy

ENVIRONMENT_PREFIX = "ASYNCHICACHE_"
BACKEND_GROUP = "asynchicache.backends"

_log = getLogger(__name__)

_OWN_BACKENDS = {
    name: f"asynchicache.backends.{name}:open_backend"
    for name in ("memory", "file", "hf3fs", "mooncake", "object", "redis")
}
"""Found without installed metadata too: a source tree on the path has none."""

_BACKEND_OPTIONS = {
    "memory": "memory:MemoryOptions",
    "file": "file.backend:FileOptions",
    "hf3fs": "hf3fs.options:Hf3fsOptions",
    "mooncake": "mooncake.options:MooncakeOptions",
    "object": "object.options:ObjectOptions",
    "redis": "redis.options:RedisOptions",
}

_LISTED = ("file", "hf3fs", "mooncake", "object", "redis")
"""Backends with an inventory."""

_EXTRAS = {
    "hf3fs": "asynchicache[hf3fs]",
    "object": "asynchicache[object]",
    "redis": "asynchicache[redis]",
}
"""What brings a backend's packages; the package itself where it is not here. `mooncake` says it itself."""


class OpenBackend(Protocol):
    """What an entry point of group `asynchicache.backends` names."""

    def __call__(self, options: Mapping[str, object], port: Port) -> StorageBackend: ...


StorageNames: TypeAlias = str | Sequence[str | Mapping[str, Any]]
StorageOptions: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class StageOptions(StagePolicy, frozen=True, kw_only=True):
    """One stage of a chain of stores; the options of `StagePolicy` say what it gets.

    Attributes:
        backend: name of a backend.
        name: its name in statistics, 1 to 64 of letters, digits and `._-`. Default: that of the backend.
        options: the backend's own.
    """

    backend: str
    name: StageName = ""
    options: Given[dict[str, Any], Mapping[str, Any]] = default({})

    def check(self) -> None:
        super().check()
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.backend)


class CacheConfig(PlannerOptions, frozen=True, kw_only=True):
    """How a cache is set up; `PlannerOptions` and `SizeOptions` have the options that decide, and the sizes.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`, ... Default: `cpu`.
        inline: on a CPU, run copies on the loop at once instead of in threads: deterministic, no
            overlap. Default: False.
        host_layout: in which order host memory holds layers, pages and tokens, see `layouts.HostLayout`.
            Default: `page_first_direct`.
        copy_path: `batch`, `kernel` or `plain`: how pages are copied between device and host; None
            measures when the cache is opened, and chooses by the length of runs. Default: None.
        audit: share of the pages that leave the device whose SHA-256 is compared when they come back.
            Default: 0.
        prefetch: how long a request waits for storage, see `planner.options.PrefetchOptions`.
        storage: name of a backend; a list of names or tables (`StageOptions`) for a chain of stores, the
            nearest first; or None for two tiers. Default: None.
        storage_options: the backend's own; for a chain a list of them, one for each stage.
        storage_limits: patience with the backend, see `storage.limits.PoolLimits`.
        store_bytes: bytes of storage writes in flight; more is shed. Default: 1 GiB.
        store_parts: store pages as so many tensor-parallel ranks would, so that groups of other sizes find
            them (`ModelSpec.shard`). Default: 0, as this rank holds them.
        weight_version: names the weights, so that pages of others are never taken for theirs. Required
            with storage.
        salt: keeps this cache's pages apart from others' in the same storage. Default: empty.
        rank, ranks: which part of a sharded model this is. Default: 0 of 1.
        count_namespaces: namespaces that the statistics tell apart; the others are one. Default: 0.
        close_seconds: how long closing waits for work in flight and writes what only memory has. Default: 30.
        io_threads: threads for storage. Default: 8.
        seed: of all randomness; None draws one. Default: None.
    """

    device: str = "cpu"
    inline: bool = False
    host_layout: Given[HostLayout, Literal["page_first_direct", "page_first", "layer_first"]] = default(
        HostLayout.PAGE_FIRST_DIRECT
    )
    copy_path: Given[CopyPath | None, Literal["batch", "kernel", "plain"]] = default(None)
    audit: Share = 0.0
    prefetch: Given[PrefetchOptions, Mapping[str, object]] = default(PrefetchOptions())
    storage: Given[str | list[Any] | None, StorageNames] = default(None)
    storage_options: Given[dict[str, Any] | list[dict[str, Any]], StorageOptions] = default({})  # copied
    storage_limits: Given[PoolLimits, Mapping[str, object]] = default(PoolLimits())
    store_bytes: Given[Positive, str] = default(1 << 30)
    store_parts: Natural = 0
    weight_version: str | None = None
    salt: str = ""
    rank: Natural = 0
    ranks: Positive = 1
    count_namespaces: Natural = 0
    close_seconds: Seconds = 30.0
    io_threads: Positive = 8
    seed: int | None = None

    if TYPE_CHECKING:  # mypy forgets what an inherited option reads as
        device_bytes: Given[int | None, str] = default(None)
        host_bytes: Given[int | None, str] = default(None)
        write_policy: Given[WritePolicy, WriteWord] = default(WritePolicy.WRITE_THROUGH)

    def check(self) -> None:
        super().check()
        if self.storage is not None:
            self.check_storage()
        elif self.storage_options:
            given = sorted(self.storage_options) if isinstance(self.storage_options, dict) else ["..."]
            raise ConfigError(f"storage_options {given} without storage: name it, such as storage='file'")
        if self.rank >= self.ranks:
            raise ConfigError(f"rank {self.rank} of {self.ranks}: ranks count from 0")

    @property
    def storage_name(self) -> str:
        """The name of the backend, or those of the stages of a chain; empty without storage."""
        if self.storage is None or isinstance(self.storage, str):
            return self.storage or ""
        return "+".join(stage.name for stage in stages_of(self.storage, self.storage_options))

    def check_storage(self) -> None:
        """
        Raises:
            ConfigError: something that storage needs is missing.
        """
        if isinstance(self.storage, list):
            stages_of(self.storage, self.storage_options)
        if not self.weight_version:
            raise ConfigError(
                "storage needs weight_version: a name that changes with the weights, such as a commit hash"
            )
        if not self.host_layout.whole_slots:
            raise ConfigError(
                f"storage cannot use host_layout {self.host_layout.value!r}, in which a page is in pieces; "
                "page_first_direct and page_first keep it whole"
            )

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        values: Mapping[str, object] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> CacheConfig:
        """Options from a TOML or JSON file, then from the environment: `ASYNCHICACHE_HOST_RATIO=3`.

        Values of the environment are TOML where they are not plain words: numbers, `true`, or a table
        such as `{kv = 1024}`. Those of options that are words are taken as they are: `1234567` may be a
        commit. A file is JSON if its name ends so.

        Args:
            path: of the file.
            environ: the process's environment if None.
            values: options that come before file and environment.
            defaults: options where nothing else names them.

        A variable that is nearly an option's is told of in the log; others are left alone, for they may be
        anybody's (Kubernetes makes some of a service's name).

        Raises:
            ConfigError: an unknown option, or a value that does not fit; names it, and where it stands.
        """
        sources = [("the defaults", defaults or {}), (str(path), {} if path is None else _read(path))]
        sources += _variables(os.environ if environ is None else environ)
        sources += [("the options given", values or {})]
        merged: dict[str, Any] = {}
        for where, part in sources:
            merged |= _converted(where, part)
        return cls(**merged)


_OPTIONS = {option.name: option for option in options_of(CacheConfig)}
_WORDS = {name for name, option in _OPTIONS.items() if isinstance(option.kind, StrType)}


def _read(path: Path) -> Mapping[str, object]:
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        return decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} does not fit: {error}") from error


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Options of the environment, by the name of their variable."""
    for variable, text in environ.items():
        option = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if option in _OPTIONS:
            yield variable, {option: _value_of(option, text)}
        elif near := get_close_matches(option, _OPTIONS, 1, cutoff=0.8):
            meant = ENVIRONMENT_PREFIX + near[0].upper()
            _log.warning("%s is no option, and is left alone: is %s meant?", variable, meant)


def _converted(where: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Values of options, from what a file or the environment has words for.

    Raises:
        ConfigError: an option does not exist, or a value does not fit; says where it was given.
    """
    try:
        return CacheConfig.read_some(given, strict=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _value_of(option: str, text: str) -> object:
    """What a variable gives an option: a commit hash that looks like a number is none."""
    value = parse_value(text)
    return text if option in _WORDS and not isinstance(value, str) else value


def admin_token() -> str:
    """What operators of a server send, from ASYNCHICACHE_ADMIN_TOKEN; empty if there is none."""
    return os.environ.get(ENVIRONMENT_PREFIX + "ADMIN_TOKEN", "")


def python_hash_seed() -> str | None:
    """Python's PYTHONHASHSEED, from which vLLM seeds hashes that are not cryptographic."""
    return os.environ.get("PYTHONHASHSEED")


def open_storage(
    names: StorageNames, options: StorageOptions, port: Port, *, without: Collection[str] = ()
) -> StorageBackend:
    """The storage backend of that name, or a chain of them.

    Args:
        without: stages of a chain that begin detached: they are not opened.

    Raises:
        ConfigError: a stage is unknown, there twice, or a chain itself; or as `open_backend`.
        StorageError: it cannot be opened; of a chain, none can.
    """
    if isinstance(names, str):
        if not isinstance(options, Mapping):
            raise ConfigError(f"storage {names!r} takes one table of options, not {len(options)}")
        return open_backend(names, options, port)
    stages = stages_of(names, options)
    return StorageChain(
        [
            ChainStage(
                one.name,
                partial(open_backend, one.backend, one.options, port),
                StagePolicy(one.write, one.promote, one.durable, one.limits),
                detached=one.name in without,
            )
            for one in stages
        ],
        port,
    )


def check_storage(names: StorageNames, options: StorageOptions) -> None:
    """Check what can be checked of storage without opening it: the names, and the options of our backends.

    Raises:
        ConfigError: as `open_storage`.
        StorageError: a package is broken.
    """
    if isinstance(names, str):
        names, options = [names], [options] if isinstance(options, Mapping) else options
    for stage in stages_of(names, options):
        _entry_point(stage.backend)
        if value := _BACKEND_OPTIONS.get(stage.backend):
            kind: Any = load_factory(stage.backend, f"asynchicache.backends.{value}")
            kind.of(stage.options)


def stages_of(names: Sequence[str | Mapping[str, Any]], options: StorageOptions) -> list[StageOptions]:
    """The stages of a chain.

    Raises:
        ConfigError: there is none; one is a chain itself, has options twice, or is the same store as another.
    """
    if not names:
        raise ConfigError("storage is an empty chain of stores; name two stages or more, one store, or None")
    none = isinstance(options, Mapping) and not options
    tables = [options] if isinstance(options, Mapping) else list(options)
    if len(tables) != len(names) and not none:
        raise ConfigError(
            f"storage has {len(names)} stages, and storage_options {len(tables)}: one table for each, or none"
        )
    stages: list[StageOptions] = []
    for place, named in enumerate(names):
        stage = _stage(named, {} if none else tables[place])
        for other in stages:
            if _same_store(stage, other):
                raise ConfigError(
                    f"storage stages {other.name!r} and {stage.name!r} are the same store; name it once"
                )
        stages.append(stage)
    return stages


def _stage(named: str | Mapping[str, Any], options: Mapping[str, Any]) -> StageOptions:
    if isinstance(named, str):
        return StageOptions(backend=named, options=options)
    if isinstance(named, list | tuple):
        raise ConfigError(f"storage stage {named!r} is a chain in a chain; write its stages into one list")
    if not isinstance(named, Mapping):
        raise ConfigError(f"storage stage {named!r} must be the name of a backend, or a table of options")
    stage = StageOptions.read(named)
    if stage.options and options:
        raise ConfigError(
            f"storage stage {stage.name!r} has options, and storage_options has some for it too"
        )
    return msgspec.structs.replace(stage, options=dict(stage.options or options))


_PLACES = ("path", "url", "urls", "master", "metadata", "namespace")
"""Options of our backends that say which store is meant."""
_ENDPOINTS = ("endpoint", "base_url", "account_name")
"""Settings of an object store that say so too."""
_LOOPBACK = re.compile(r"(?<![\w.-])(localhost|\[::1\])(?![\w.-])", re.IGNORECASE)


def _same_store(one: StageOptions, other: StageOptions) -> bool:
    """Whether two stages are one store, as far as their options say."""
    if one.backend != other.backend:
        return False
    if one.backend == "memory":  # without a name it is the cache's own
        return bool(one.options.get("name")) and one.options.get("name") == other.options.get("name")
    own = one.backend in _OWN_BACKENDS
    return _place(one.options, own=own) == _place(other.options, own=own)


def _place(options: Mapping[str, object], *, own: bool) -> Mapping[str, object]:
    if not own:
        return options
    place = {name: _plain(str(options[name])) for name in _PLACES if name in options}
    place.setdefault("namespace", "asynchicache")
    if "path" in options:
        place["path"] = str(Path(str(options["path"])).expanduser().resolve())
    settings = options.get("config")
    if isinstance(settings, Mapping):
        place |= {name: _plain(str(settings[name])) for name in _ENDPOINTS if name in settings}
    return place


def _plain(text: str) -> str:
    """What the address of a store names, however it is written."""
    text = _LOOPBACK.sub("127.0.0.1", text).rstrip("/")
    with suppress(ValueError):  # of an address that the store will refuse
        url = urlsplit(text)
        if url.scheme.startswith(("redis", "valkey")):
            hosts = url.netloc.lower().rpartition("@")[2].split(",")
            ports = sorted(host if ":" in host else f"{host}:6379" for host in hosts)
            return f"{','.join(ports)}/{url.path.strip('/') or 0}"
    return text


def open_backend(name: str, options: Mapping[str, object], port: Port) -> StorageBackend:
    """The storage backend of that name, imported now.

    Raises:
        ConfigError: the name is not registered, or a package that it needs is missing.
        StorageError: the backend cannot be opened.
    """
    value = _entry_point(name)
    factory = load_factory(name, value)
    with as_storage_error(f"opening storage {name!r}"):
        backend = factory(options, port)
    return check_backend(f"storage {name!r}: {value} gave {backend!r}, which", backend)


def _entry_point(name: str) -> str:
    found = {entry.name: entry.value for entry in entry_points(group=BACKEND_GROUP)}
    backends = found | _OWN_BACKENDS  # another package cannot replace one of ours
    if name not in backends:
        raise ConfigError(f"storage {name!r} is none of the backends found: {sorted(backends)}")
    return backends[name]


def open_inventory(name: str, options: Mapping[str, object], port: Port, *, writes: bool) -> Inventory:
    """What lists all pools of a store, whoever they belong to.

    Raises:
        ConfigError: there is no such backend, it cannot list its pages, or its options do not fit.
        StorageError: the store cannot be used.
    """
    if name not in _OWN_BACKENDS:
        raise ConfigError(f"storage {name!r} is none of {sorted(_OWN_BACKENDS)}")
    if name not in _LISTED:
        raise ConfigError(f"storage {name!r} cannot be listed; {', '.join(_LISTED)} can")
    factory = load_factory(name, f"asynchicache.backends.{name}.inventory:open_inventory")
    with as_storage_error(f"opening storage {name!r}"):
        return cast("Inventory", factory(options, port, writes=writes))


def load_factory(name: str, value: str) -> Callable[..., Any]:
    """What opens the backend `name`, imported now.

    Args:
        name: for messages.
        value: of its entry point.

    Raises:
        ConfigError: a package is missing, or there is no such function in it.
        StorageError: the package is broken.
    """
    with as_storage_error(f"importing storage {name!r}"):
        try:
            found = resolve_name(value)
        except ImportError as error:
            package = _EXTRAS.get(name, "asynchicache")
            advice = f"; pip install '{package}'" if name in _OWN_BACKENDS else ""
            raise ConfigError(f"storage {name!r} cannot be imported: {error}{advice}") from error
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"storage {name!r}: entry point {value!r} names nothing: {error}") from error
    if not callable(found):
        raise ConfigError(f"storage {name!r}: entry point {value!r} names {found!r}, no function")
    return cast("Callable[..., Any]", found)


__all__ = [
    "CacheConfig",
    "PrefetchOptions",
    "PrefetchPolicy",
    "StageOptions",
    "WritePolicy",
    "check_storage",
    "load_factory",
    "open_backend",
    "open_storage",
]
