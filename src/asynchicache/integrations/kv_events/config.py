"""Configuration of the KV event publisher: one JSON object, with the engines' option names."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.options import Natural, Options, Positive


class KvEventsConfig(Options, frozen=True, kw_only=True):
    """Options of the publisher.

    Attributes:
        endpoint: address of the PUB socket. The socket binds if the address contains `*` or `::` or starts
            with `ipc://` or `inproc://`, and connects otherwise. `data_parallel_rank` is added to the port.
            Default: `tcp://*:5557`.
        replay_endpoint: address of the ROUTER socket for replays and snapshots; always bound. Default: None,
            no such socket.
        topic: topic of all messages. Default: empty.
        buffer_steps: most batches kept for replay. Default: 10,000.
        buffer_bytes: most bytes of those batches. Default: 64 MiB.
        hwm: most messages queued for a slow subscriber; further ones are dropped. Default: 100,000.
        max_queue_size: most events queued for publication; beyond it the stream restarts with a snapshot.
            Default: 100,000.
        data_parallel_rank: rank in every batch. Default: 0.
        hashes: `int64`, the first eight bytes of a digest as in SGLang, which both engines' decoders accept;
            or `bytes`, the whole digest, which vLLM's accepts. Default: `int64`.
        media: names of the tiers: `vllm` (GPU, CPU, STORAGE) or `sglang` (GPU, CPU_PINNED, DISK).
            Default: `vllm`.
        pools: pools to publish. Default: None, all.
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
        """Read options in the format of the engines' `--kv-events-config`.

        The engines' `publisher` and `enable_kv_cache_events` are accepted if they enable a ZeroMQ publisher.

        Raises:
            ConfigError: not a JSON object, an unknown option, or an invalid value; names it.
        """
        try:
            options: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
            if options.pop("publisher", "zmq") != "zmq" or not options.pop("enable_kv_cache_events", True):
                raise ConfigError("KV events have one publisher, 'zmq'; to have none, configure none")
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise ConfigError(f"the configuration of KV events does not fit: {error}") from error
        return cls.read(options)


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one data-parallel rank: the rank is added to the port, as in both engines.

    Raises:
        ConfigError: a tcp endpoint whose port is neither a number nor `*`.
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
