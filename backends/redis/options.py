"""Options of the redis backend: the server, the login, and how much of the server to use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit

from asynchicache.backends.options import BackendOptions, NamespaceName
from asynchicache.options import FiniteSeconds, Positive

_TCP, _TLS, _UNIX = ("redis", "valkey"), ("rediss", "valkeys"), ("unix",)
_PORT = 6379
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


class RedisOptions(BackendOptions, frozen=True):
    """Options of the redis backend.

    Attributes:
        url: where the server listens, and which database; `of` takes the login out of it.
        username, password: of the login. Default: none.
        ca_file: with TLS, certificates to trust, in PEM. Default: the system's.
        namespace: prefix of every key; other keys are not touched. Default: `asynchicache`.
        connections: limit for all pools together. Default: 4.
        timeout_seconds: deadline of one call, including the connect. Default: 5.
        ttl_seconds: pages expire this long after they were stored. Default: never.
        read_only: serve stored pages; store and delete nothing. Default: false.
    """

    backend: ClassVar[str] = "redis"

    url: str = ""
    username: str | None = None
    password: str | None = None
    ca_file: str | None = None
    namespace: NamespaceName = "asynchicache"
    connections: Positive = 4
    timeout_seconds: FiniteSeconds = 5.0
    ttl_seconds: Positive | None = None
    read_only: bool = False

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        blank = {"username", "password", "ca_file"}
        words = {name: one for name, one in given.items() if one is not None and (one or name not in blank)}
        if isinstance(url := words.get("url"), str):
            words["url"], login = _without_login(url)
            words = login | words
        return super().of(words)

    @property
    def server(self) -> ServerAddress:
        """Where the server listens."""
        return _location(self.url)[0]

    @property
    def database(self) -> int:
        return _location(self.url)[1]

    def check(self) -> None:
        try:
            server, _ = _location(self.url)
        except ValueError:
            raise self.refused("url", self.url, _RULE) from None
        if self.username and not self.password:
            raise self.refused("username", self.username, "needs a password")
        if self.ca_file and not server.tls:
            raise self.refused("ca_file", self.ca_file, "needs a URL that begins with rediss://")
        if self.ca_file and not Path(self.ca_file).is_file():
            raise self.refused("ca_file", self.ca_file, "must be a file of certificates in PEM")

    def __repr__(self) -> str:
        return f"RedisOptions({self.url!r})"  # without the password


def _without_login(text: str) -> tuple[str, dict[str, object]]:
    """A URL without its login, and the login; a URL that does not fit is left as it is."""
    try:
        url = urlsplit(text)
        _location(text)
    except ValueError:
        return text, {}
    login = {"username": unquote(url.username or ""), "password": unquote(url.password or "")}
    plain = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() if "@" in url.netloc else text
    return plain, {name: value for name, value in login.items() if value}


@cache
def _location(text: str) -> tuple[ServerAddress, int]:
    """The server and the database that a URL names.

    Raises:
        ValueError: it names none.
    """
    url = urlsplit(text)
    if url.scheme not in (*_TCP, *_TLS, *_UNIX) or url.port == 0:
        raise ValueError(text)
    if url.scheme in _UNIX:
        fits, server = bool(url.path) and not url.hostname, ServerAddress("", 0, unquote(url.path))
    else:
        fits = bool(url.hostname)
        server = ServerAddress(url.hostname or "", url.port or _PORT, tls=url.scheme in _TLS)
    path = "" if url.scheme in _UNIX else url.path.strip("/")
    query = parse_qs(url.query, keep_blank_values=True)
    database = query.pop("db", [path])[-1] or "0"
    if not fits or query or not database.isdecimal():
        raise ValueError(text)
    return server, int(database)
