"""What a user says about a Mooncake cluster, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.backends.options import Options

LEAST_SEGMENT_BYTES = 16 << 20
"""Mooncake refuses to lend less."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """How to join a Mooncake cluster.

    Attributes:
        master: `host:port` of the master, or what else Mooncake takes for it (`etcd://...`).
        metadata_server: where transfer engines find each other. Default: `P2PHANDSHAKE`, no server.
        protocol: `tcp`, `rdma` or another one of Mooncake's. Default: `tcp`.
        devices: network devices of RDMA, with commas; empty lets Mooncake choose. Default: empty.
        local_hostname: this machine's name or address, as other machines reach it. Default: `localhost`.
        segment_bytes: memory that this process lends to the cluster; what lies there ends with this
            process. Default: 0, none.
        replicas: copies of every page, on different nodes. Default: 1.
        threads: calls that run at once. Default: 4.
        namespace: what every key begins with; nothing else is touched. Default: `asynchicache`.
        open_seconds: how long opening may take. Default: 10.
    """

    master: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    local_hostname: str = "localhost"
    segment_bytes: int = 0
    replicas: int = 1
    threads: int = 4
    namespace: str = "asynchicache"
    open_seconds: float = 10.0

    @classmethod
    def of(cls, options: Mapping[str, object]) -> MooncakeOptions:
        """
        Raises:
            ConfigError: an option is missing, unknown, or breaks its rule.
        """
        taken = Options("mooncake", options)
        found = cls(
            master=_master(taken),
            metadata_server=taken.take("metadata_server", str, _DEFAULT.metadata_server),
            protocol=taken.take("protocol", str, _DEFAULT.protocol),
            devices=taken.take("devices", str, _DEFAULT.devices),
            local_hostname=taken.take("local_hostname", str, _DEFAULT.local_hostname),
            segment_bytes=_segment_bytes(taken),
            replicas=taken.positive("replicas") or _DEFAULT.replicas,
            threads=taken.positive("threads") or _DEFAULT.threads,
            namespace=_namespace(taken),
            open_seconds=_open_seconds(taken),
        )
        taken.finish()
        return found

    @property
    def master_address(self) -> tuple[str, int] | None:
        """Host and port of the master; None where it is found in another way."""
        match = _ADDRESS.fullmatch(self.master)
        return (match["host"].strip("[]"), int(match["port"])) if match else None

    def setup(self) -> dict[str, str]:
        """What `MooncakeDistributedStore.setup` takes."""
        return {
            "local_hostname": self.local_hostname,
            "metadata_server": self.metadata_server,
            "global_segment_size": str(self.segment_bytes),
            "local_buffer_size": "0",  # for values that are copied; pages go from and to their slots
            "protocol": self.protocol,
            "rdma_devices": self.devices,
            "master_server_addr": self.master,
        }


# `MooncakeOptions` has slots, so a default is read from an instance.
_DEFAULT = MooncakeOptions(master="")


def _master(taken: Options) -> str:
    master = taken.take("master", str, "")
    match = _ADDRESS.fullmatch(master)
    if "://" not in master and (match is None or not 0 < int(match["port"]) < 65536):
        raise taken.refused("master", master, "must be host:port of a Mooncake master")
    return master


def _segment_bytes(taken: Options) -> int:
    size = taken.take("segment_bytes", int, 0)
    if size and size < LEAST_SEGMENT_BYTES:
        rule = f"must be 0, or at least {LEAST_SEGMENT_BYTES}, the least that Mooncake lends"
        raise taken.refused("segment_bytes", size, rule)
    return size


def _namespace(taken: Options) -> str:
    namespace = taken.take("namespace", str, _DEFAULT.namespace)
    if not _NAMESPACE.fullmatch(namespace):
        raise taken.refused("namespace", namespace, "must be 1 to 64 letters, digits, `.`, `_` and `-`")
    return namespace


def _open_seconds(taken: Options) -> float:
    seconds = float(taken.take("open_seconds", (int, float), _DEFAULT.open_seconds))
    if not seconds > 0:
        raise taken.refused("open_seconds", seconds, "must be above 0")
    return seconds
