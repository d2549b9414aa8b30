"""Options of the Mooncake backend."""

from __future__ import annotations

import re
from typing import ClassVar

from asynchicache.backends.options import BackendOptions, Namespace
from asynchicache.options import Positive, Seconds

LEAST_SEGMENT_BYTES = 16 << 20
"""Mooncake refuses to lend less."""

_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")


class MooncakeOptions(BackendOptions, frozen=True):
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

    backend: ClassVar[str] = "mooncake"

    master: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    local_hostname: str = "localhost"
    segment_bytes: int = 0
    replicas: Positive = 1
    threads: Positive = 4
    namespace: Namespace = "asynchicache"
    open_seconds: Seconds = 10.0

    def check(self) -> None:
        match = _ADDRESS.fullmatch(self.master)
        if "://" not in self.master and (match is None or not 0 < int(match["port"]) < 65536):
            raise self.refused("master", self.master, "must be host:port of a Mooncake master")
        if self.segment_bytes and self.segment_bytes < LEAST_SEGMENT_BYTES:
            rule = f"must be 0, or at least {LEAST_SEGMENT_BYTES}, the least that Mooncake lends"
            raise self.refused("segment_bytes", self.segment_bytes, rule)

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
