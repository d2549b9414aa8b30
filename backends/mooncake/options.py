"""Options of the Mooncake backend."""

from __future__ import annotations

import re
from typing import ClassVar

from asynchicache.backends.options import BackendOptions, NamespaceName
from asynchicache.options import Natural, Positive, Seconds

LEAST_SEGMENT_BYTES = 16 << 20
"""Smallest segment that Mooncake accepts."""

DEFAULT_TENANT = "default"
_ADMIN_PORT = 9003
_DAY_SECONDS = 86_400
_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<port>[0-9]{1,5})")


class MooncakeOptions(BackendOptions, frozen=True):
    """How to join a Mooncake cluster.

    Attributes:
        master: `host:port` of the master, or `etcd://host:port` where several masters stand by.
        metadata_server: where transfer engines find each other. Default: `P2PHANDSHAKE`, no server.
        protocol: `tcp`, `rdma` or another Mooncake protocol. Default: `tcp`.
        devices: RDMA network devices, comma-separated; empty lets Mooncake choose. Default: empty.
        local_hostname: this machine's name or address, as other machines reach it. Default: `localhost`.
        segment_bytes: memory that this process lends to the cluster; its contents are lost when this
            process ends. Default: 0, none.
        replicas: copies of every page, on different nodes, as far as there are so many. Default: 1.
        soft_pin_seconds: for how long after it was stored a page stays while others can be evicted, up to a
            day. Default: 0, no such pin.
        tenant: whose pages these are, for a master with tenants. Default: `default`.
        threads: number of concurrent calls that move pages, and of lookups beside them. Default: 4.
        namespace: prefix of every key; other keys are not touched. Default: `asynchicache`.
        open_seconds: deadline for opening. Default: 10.
        admin: `host:port` where the leading master lists names, its `--metrics_port`; only `ls`, `verify`,
            `clear` and `gc` ask it. Default: port 9003 of the master's host.
    """

    backend: ClassVar[str] = "mooncake"

    master: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    local_hostname: str = "localhost"
    segment_bytes: int = 0
    replicas: Positive = 1
    soft_pin_seconds: Natural = 0
    tenant: NamespaceName = DEFAULT_TENANT
    threads: Positive = 4
    namespace: NamespaceName = "asynchicache"
    open_seconds: Seconds = 10.0
    admin: str = ""

    def check(self) -> None:
        match = _ADDRESS.fullmatch(self.master)
        if "://" not in self.master and (match is None or not 0 < int(match["port"]) < 65536):
            raise self.refused("master", self.master, "must be host:port of a Mooncake master")
        if self.segment_bytes and self.segment_bytes < LEAST_SEGMENT_BYTES:
            rule = f"must be 0, or at least {LEAST_SEGMENT_BYTES}, the least that Mooncake lends"
            raise self.refused("segment_bytes", self.segment_bytes, rule)

        if self.admin and not _ADDRESS.fullmatch(self.admin):
            raise self.refused("admin", self.admin, "must be host:port of a Mooncake master's metrics")
        if self.soft_pin_seconds > _DAY_SECONDS:
            rule = f"must be at most {_DAY_SECONDS}, the most that a master grants"
            raise self.refused("soft_pin_seconds", self.soft_pin_seconds, rule)

    @property
    def master_address(self) -> tuple[str, int] | None:
        """Host and port of the master; None if `master` is a URL."""
        match = _ADDRESS.fullmatch(self.master)
        return (match["host"].strip("[]"), int(match["port"])) if match else None

    @property
    def admin_address(self) -> str:
        """Host and port where the master lists names."""
        host = self.master.rpartition("://")[2].rpartition(":")[0]
        return self.admin or f"{host}:{_ADMIN_PORT}"

    def setup(self) -> dict[str, str]:
        """The argument of `MooncakeDistributedStore.setup`."""
        return {
            "local_hostname": self.local_hostname,
            "metadata_server": self.metadata_server,
            "global_segment_size": str(self.segment_bytes),
            "local_buffer_size": "0",  # only copied values need it; pages move directly to and from slots
            "protocol": self.protocol,
            "rdma_devices": self.devices,
            "master_server_addr": self.master,
            "tenant_id": self.tenant,
        }
