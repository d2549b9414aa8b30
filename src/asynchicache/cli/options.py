"""The flags of commands. Light, so that `--help` and wrong flags are quick."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.admission import MAX_RUNNING, MAX_WAITING
from asynchicache.options import (
    LARGEST_FLOAT,
    CommandOptions,
    Natural,
    Positive,
    about,
    named_values,
    without_login,
)

if TYPE_CHECKING:
    from asynchicache.config import CacheConfig

TINY = "tiny"
_MAX_THREADS = 1024
"""Torch starts as many threads as it is told, and dies of too many."""


class ServeOptions(CommandOptions, frozen=True):
    """The flags of `serve`.

    Raises:
        ConfigError: a value is outside its rule, or two contradict each other.
    """

    model: Annotated[str, about("`tiny` (random weights) or the folder of a checkpoint")] = TINY
    served_model_name: Annotated[str, about("the model's name for clients; empty: the folder's name")] = ""
    host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    port: Annotated[Natural, about("port to listen on; 0 takes a free one and prints it")] = 8000
    tokenizer: Annotated[
        Literal["checkpoint", "bytes"], about("the checkpoint's tokenizer, or one token per byte")
    ] = "checkpoint"
    chat_template: Annotated[str, about("a Jinja template to use instead of the checkpoint's")] = ""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about("data type of the weights")] = (
        "auto"
    )
    threads: Annotated[Natural, about("torch's threads; 0: torch decides")] = 0
    config: Annotated[str, about("the cache's options: a TOML or JSON file, or a JSON object")] = ""
    page_size: Annotated[Positive, about("tokens per page")] = 16
    storage: Annotated[str, about("name of a storage engine, or several with commas, the nearest first")] = ""
    storage_option: Annotated[
        tuple[str, ...],
        about("an option of the engine, as name=value; of several, engine.name=value"),
    ] = ()
    storage_path: Annotated[str, about("folder for the file engine, short for --storage file")] = ""
    max_running: Annotated[Positive, about("requests that generate at once")] = MAX_RUNNING
    max_waiting: Annotated[Natural, about("requests that wait to generate; more get status 429")] = (
        MAX_WAITING
    )
    max_context: Annotated[Natural, about("tokens of a prompt and its answer; 0: as many as fit")] = 0
    answer_tokens: Annotated[Positive, about("tokens of a chat answer if the request sets no limit")] = 256
    max_body_mib: Annotated[Positive, about("MiB of one request; longer ones get status 413")] = 16
    max_bodies_mib: Annotated[Positive, about("MiB of all requests in progress; more get status 429")] = 256
    max_connections: Annotated[Positive, about("connections; requests on more get status 503")] = 4096
    ignore_unknown_fields: Annotated[bool, about("leave out unknown fields of requests; otherwise 400")] = (
        False
    )
    admin_token: Annotated[
        str, about("what operators send to flush, attach, ...; better: ASYNCHICACHE_ADMIN_TOKEN; empty: off")
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("least level of the log on standard error")
    ] = "info"
    access_log: Annotated[bool, about("log each request, at level info")] = True
    drain_seconds: Annotated[
        float, Meta(ge=0, le=LARGEST_FLOAT), about("how long requests may go on after SIGTERM")
    ] = 30.0
    kv_events_config: Annotated[str, about("publish KV events: a JSON object as for vLLM and SGLang")] = ""
    warm: Annotated[
        str, about("prompts to read from storage before the server is ready: a file, one request body a line")
    ] = ""
    warm_seconds: Annotated[float, Meta(ge=0, le=LARGEST_FLOAT), about("the longest that this takes")] = 60.0
    role: Annotated[
        Literal["both", "prefill", "decode"],
        about("compute prompts for others, or answer prompts that others compute; they share storage"),
    ] = "both"
    wait_seconds: Annotated[
        float,
        Meta(ge=0, le=LARGEST_FLOAT),
        about("the longest that a role waits for storage, before and after it computes"),
    ] = 30.0
    record_trace: Annotated[str, about("write a trace of the requests to this file, for `replay`")] = ""
    trace: Annotated[bool, about("make OpenTelemetry spans; start with `opentelemetry-instrument`")] = False
    seed: int = 0

    def check(self) -> None:
        if self.port >= 1 << 16:
            raise ConfigError(f"--port {self.port} must be 0 to 65535; 0 takes a free one")
        if self.threads > _MAX_THREADS:
            raise ConfigError(f"--threads {self.threads}: must be {_MAX_THREADS} at most")
        if self.storage and self.storage_path:
            raise ConfigError("--storage-path is short for --storage file: say one of them")
        if self.storage_option and not self.storage:
            name = self.storage_option[0].partition("=")[0]  # the value may be a password
            raise ConfigError(f"--storage-option {name}: say whose, with --storage")
        if self.model == TINY and self.chat_template:
            raise ConfigError(
                f"--chat-template {self.chat_template}: the tiny model has one; give a checkpoint"
            )

    def cache_config(self, defaults: Mapping[str, object]) -> CacheConfig:
        """Options of the cache: flags come before the environment, that before a file.

        Raises:
            ConfigError: one is unknown, or does not fit.
        """
        from asynchicache.config import CacheConfig

        inline = self.config.lstrip().startswith("{")
        values = _json_object(self.config) if inline else {}
        if self.storage_path:
            values |= {"storage": "file", "storage_options": {"path": self.storage_path}}
        if self.storage:
            values |= _storage(self.storage.split(","), named_values("--storage-option", self.storage_option))
        path = Path(self.config) if self.config and not inline else None
        return CacheConfig.load(path, values=values, defaults=defaults)


def _storage(names: list[str], options: Mapping[str, object]) -> dict[str, object]:
    """Storage by name, or a chain of it, whose options say first which engine they are for.

    Raises:
        ConfigError: an option is for none of the engines.
    """
    if len(names) == 1:
        return {"storage": names[0], "storage_options": options}
    tables: dict[str, dict[str, object]] = {name: {} for name in names}
    for option, value in options.items():
        engine, _, name = option.partition(".")
        if engine not in tables or not name:
            raise ConfigError(f"--storage-option {option}: say whose, as in {names[0]}.{option}")
        tables[engine][name] = value
    return {"storage": names, "storage_options": [tables[name] for name in names]}


class TopOptions(CommandOptions, frozen=True):
    """The flags of `top`."""

    url: Annotated[str, about("address of the server, such as http://127.0.0.1:8000", positional=True)] = ""
    interval: Annotated[float, Meta(ge=0.1, le=3600), about("seconds between two looks")] = 1.0
    once: Annotated[bool, about("look once, and end")] = False
    seed: int = 0


_REMOTE = {"rediss": "redis", "valkey": "redis", "valkeys": "redis", "unix": "redis"}


_FILTERS = ("pool", "fingerprint", "model", "version", "namespace")


class StoreOptions(CommandOptions, frozen=True):
    """Which store is meant, and which of its pools."""

    path: Annotated[
        str,
        about("folder of files, or URL of an object store, a Redis, a Mooncake or a 3FS", positional=True),
    ] = ""
    option: Annotated[tuple[str, ...], about("an option of the storage engine, as name=value")] = ()
    pool: Annotated[str, about("only pools of this name")] = ""
    fingerprint: Annotated[str, about("only pools whose fingerprint begins with this, in hex")] = ""
    model: Annotated[str, about("only pools of this model")] = ""
    version: Annotated[str, about("only pools of this weight version")] = ""
    namespace: Annotated[str, about("only pages of this namespace, such as a tenant")] = ""
    seed: int = 0

    def check(self) -> None:
        if set(self.fingerprint) - set(hexdigits):
            raise ConfigError(f"--fingerprint {self.fingerprint!r} must be hexadecimal digits")

    @property
    def selects(self) -> bool:
        """Whether not all pools are meant."""
        return any(getattr(self, name) for name in _FILTERS)

    @property
    def place(self) -> str:
        """The store, for messages: without a login."""
        return without_login(self.path) if "://" in self.path else self.path

    def engine(self) -> tuple[str, dict[str, object]]:
        """The storage engine and its options."""
        scheme, found, _ = self.path.partition("://")
        options = named_values("--option", self.option)
        if not found:
            return "file", {"path": self.path, **options}
        if scheme == "hf3fs":
            return "hf3fs", {"path": self.path.removeprefix("hf3fs://"), **options}
        if scheme == "mooncake":
            return "mooncake", {"master": self.path.removeprefix("mooncake://"), **options}
        if scheme in ("redis", *_REMOTE):
            return _REMOTE.get(scheme, "redis"), {"url": self.path, **options}
        return "object", {"url": self.path, **options}


class ListOptions(StoreOptions, frozen=True):
    """The flags of `ls`."""


class GcOptions(StoreOptions, frozen=True):
    """The flags of `gc`."""

    dry_run: Annotated[bool, about("say what would be removed, and remove nothing")] = False
    per_second: Annotated[Natural, about("pages to remove in a second at most; 0: no limit")] = 0


class VerifyOptions(StoreOptions, frozen=True):
    """The flags of `verify`."""

    repair: Annotated[
        bool, about("forget damaged pages of a file store, which must not be open elsewhere")
    ] = False
    per_second: Annotated[Natural, about("pages to read in a second at most; 0: no limit")] = 0

    def check(self) -> None:
        super().check()
        files = self.engine()[0] == "file"
        if self.namespace or (files and (self.selects or self.per_second)):
            raise ConfigError("verify reads all of a file store, whole pools of others: leave filters out")
        if self.repair and not files:
            raise ConfigError("--repair is for file stores; caches drop damaged pages of others")


class ClearOptions(GcOptions, frozen=True):
    """The flags of `clear`.

    Raises:
        ConfigError: it is not said which pools.
    """

    everything: Annotated[bool, about("all pools of the store")] = False

    def check(self) -> None:
        super().check()
        if not (self.selects or self.everything):
            flags = ", ".join(f"--{name}" for name in _FILTERS)
            raise ConfigError(f"say what to clear: {flags} or --everything")
        if self.everything and self.selects:
            raise ConfigError("--everything is more than --pool, --fingerprint, ...: say one of them")


class DoctorOptions(CommandOptions, frozen=True):
    """The flags of `doctor`."""

    report: Annotated[bool, about("print versions, machine and findings for a bug report")] = False
    store: Annotated[str, about("look at this store too: a folder or a URL, as of ls")] = ""
    option: Annotated[tuple[str, ...], about("an option of the store's engine, as name=value")] = ()
    seed: int = 0


def _json_object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ConfigError(f"--config is no JSON object: {error}") from error  # it may hold a password
