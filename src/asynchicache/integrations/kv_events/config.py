"""How KV events are published: one JSON object, with the names that the engines use."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.options import Natural, Options, Positive


class KvEventsConfig(Options, frozen=True, kw_only=True):
    """Where and how events are published.

    Attributes:
        endpoint: of the PUB socket. It is bound if it has a `*`, a `::`, or is `ipc://` or `inproc://`, and
            connected to otherwise. A port is raised by `data_parallel_rank`. Default: `tcp://*:5557`.
        replay_endpoint: of the ROUTER socket for replays and snapshots, always bound; None for none.
        topic: in front of every message. Default: empty.
        buffer_steps: batches that can be replayed. Default: 10,000.
        buffer_bytes: their bytes at most. Default: 64 MiB.
        hwm: messages that wait for a slow subscriber before it loses some. Default: 100,000.
        max_queue_size: events that wait to be published; beyond it the stream begins anew with a
            snapshot. Default: 100,000.
        data_parallel_rank: in every batch. Default: 0.
        hashes: `int64`, the first eight bytes of a digest as SGLang has them, which both engines' decoders
            take; or `bytes`, the whole of it, which vLLM's does. Default: `int64`.
        media: names of the tiers: `vllm` (GPU, CPU, STORAGE) or `sglang` (GPU, CPU_PINNED, DISK).
            Default: `vllm`.
        pools: which are published; None for all.
    """

    subject: ClassVar[str] = "KV events: "

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: Positive = 10_000
    buffer_bytes: Positive = 64 << 20
    hwm: Positive = 100_000
    max_queue_size: Positive = 100_000
    data_parallel_rank: Natural = 0
    hashes: Literal["int64", "bytes"] = "int64"
    media: Literal["vllm", "sglang"] = "vllm"
    pools: tuple[str, ...] | None = None

    @classmethod
    def from_json(cls, text: str) -> KvEventsConfig:
        """Options as the engines take them in `--kv-events-config`, their `publisher` and
        `enable_kv_cache_events` included, which can only say that there is one.

        Raises:
            ConfigError: no JSON object, an unknown option, or a value that does not fit; names it.
        """
        try:
            options: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
            if options.pop("publisher", "zmq") != "zmq" or not options.pop("enable_kv_cache_events", True):
                raise ConfigError("KV events have one publisher, 'zmq'; to have none, configure none")
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise ConfigError(f"the configuration of KV events does not fit: {error}") from error
        return cls.read(options)


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of one data-parallel rank: ports are raised by it, as both engines do.

    Raises:
        ConfigError: a tcp endpoint without a port that is a number, or `*` for any.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if port == "*" or port == "0":
        return endpoint
    if not port.isdecimal() or int(port) + rank > 65535:
        raise ConfigError(
            f"endpoint {endpoint!r} at rank {rank} has no port of 1 to 65535, as in tcp://*:5557"
        )
    return f"{host}:{int(port) + rank}"
