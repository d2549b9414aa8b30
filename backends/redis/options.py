"""Options of the redis backend: the server, the login, and how much of the server to use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from asynchicache.backends.options import Options

_TCP, _TLS, _UNIX = ("redis", "valkey"), ("rediss", "valkeys"), ("unix",)
_PORT = 6379
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RULE = (
    "must be redis://[user:password@]host[:port][/db], rediss://... for TLS, or unix:///path/of/socket[?db=n]"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens.

    Attributes:
        host, port: of TCP; empty and 0 for a unix socket.
        path: of a unix socket; empty for TCP.
        tls: encrypt, and check the server's certificate.
    """

    host: str
    port: int
    path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the redis backend.

    Attributes:
        server: where it listens; from option `url`.
        username, password: from `url`, or from options of their own. Default: none.
        database: from `url`. Default: 0.
        ca_file: with TLS, certificates to trust, in PEM. Default: the system's.
        namespace: prefix of every key; other keys are not touched. Default: `asynchicache`.
        connections: limit for all pools together. Default: 4.
        timeout_seconds: deadline of one call, including the connect. Default: 5.
        ttl_seconds: pages expire this long after they were stored. Default: never.
        read_only: serve stored pages; store and delete nothing. Default: false.
    """

    server: ServerAddress
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    ca_file: str | None = None
    namespace: str = "asynchicache"
    connections: int = 4
    timeout_seconds: float = 5.0
    ttl_seconds: int | None = None
    read_only: bool = False

    @classmethod
    def of(cls, options: Mapping[str, object]) -> RedisOptions:
        """
        Raises:
            ConfigError: an option is missing, unknown, or breaks its rule.
        """
        taken = Options("redis", options)
        url = _split(taken)
        server = _server(taken, url)
        made = cls(
            server,
            taken.take("username", str, unquote(url.username or "")) or None,
            taken.take("password", str, unquote(url.password or "")) or None,
            _database(taken, url),
            taken.take("ca_file", str, "") or None,
            taken.take("namespace", str, "asynchicache"),
            taken.positive("connections") or 4,
            taken.take("timeout_seconds", (int, float), 5.0),
            taken.positive("ttl_seconds"),
            taken.take("read_only", bool, False),
        )
        made._check(taken)
        taken.finish()
        return made

    def _check(self, taken: Options) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise taken.refused(
                "namespace", self.namespace, "must be 1 to 64 of letters, digits, '.', '_', '-'"
            )
        if not 0 < self.timeout_seconds < math.inf:
            raise taken.refused("timeout_seconds", self.timeout_seconds, "must be a number above 0")
        if self.username and not self.password:
            raise taken.refused("username", self.username, "needs a password")
        if self.ca_file and not self.server.tls:
            raise taken.refused("ca_file", self.ca_file, "needs a URL that begins with rediss://")
        if self.ca_file and not Path(self.ca_file).is_file():
            raise taken.refused("ca_file", self.ca_file, "must be a file of certificates in PEM")


def _split(taken: Options) -> SplitResult:
    text = taken.take("url", str, "")
    try:
        url = urlsplit(text)
        known = url.scheme in (*_TCP, *_TLS, *_UNIX) and (url.port is None or url.port > 0)
    except ValueError:
        known = False
    if not known:
        raise taken.refused("url", text, _RULE)
    return url


def _server(taken: Options, url: SplitResult) -> ServerAddress:
    if url.scheme in _UNIX:
        if not url.path or url.hostname:
            raise taken.refused("url", url.geturl(), _RULE)
        return ServerAddress("", 0, unquote(url.path))
    if not url.hostname:
        raise taken.refused("url", url.geturl(), _RULE)
    return ServerAddress(url.hostname, url.port or _PORT, tls=url.scheme in _TLS)


def _database(taken: Options, url: SplitResult) -> int:
    path = "" if url.scheme in _UNIX else url.path.strip("/")
    query = parse_qs(url.query, keep_blank_values=True)
    text = query.pop("db", [path])[-1] or "0"
    if query or not text.isdecimal():
        raise taken.refused("url", url.geturl(), _RULE)
    return int(text)
