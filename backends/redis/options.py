"""Options of the redis backend: the servers, the login, and how much of them to use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

from asynchicache.backends.options import BackendOptions, NamespaceName
from asynchicache.options import FiniteSeconds, Positive

_TCP, _TLS, _UNIX = ("redis", "valkey"), ("rediss", "valkeys"), ("unix",)
_PORT = 6379
_OTHER_CONNECTIONS = 16  # that only ask
_RULE = (
    "must be redis://[user:password@]host[:port][,host[:port]...][/db], rediss://... for TLS, or "
    "unix:///path/of/socket[?db=n]"
)
_FILES = ("ca_file", "cert_file", "key_file")
_LOGIN = ("username", "password", "sentinel_username", "sentinel_password")


class ServerLocation(NamedTuple):
    """What a URL names.

    Attributes:
        hosts: host and port of each server; empty for a unix socket.
        path: of a unix socket; empty for TCP.
        tls: encrypt, and check the servers' certificates.
    """

    hosts: tuple[tuple[str, int], ...]
    path: str
    tls: bool
    database: int

    def __str__(self) -> str:
        return self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)


class RedisOptions(BackendOptions, frozen=True):
    """Options of the redis backend.

    Attributes:
        url: where the server listens, and which database; of a cluster, or of Sentinels, some or all of
            them. `of` takes the login out of it.
        service: the URL names Sentinels; this is their name for the master. Default: it names the server.
        username, password: of the login. Default: none.
        sentinel_username, sentinel_password: of the login at the Sentinels. Default: none.
        ca_file: with TLS, certificates to trust, in PEM. Default: the system's.
        cert_file, key_file: with TLS, our own certificate and its key, in PEM, for servers that ask for one.
        namespace: prefix of every key; other keys are not touched. Default: `asynchicache`.
        connections: how many may move pages at once, for all pools together. Default: 4.
        timeout_seconds: deadline of one call, including the connect. Default: 5.
        ttl_seconds: pages expire this long after they were stored. Default: never.
        read_only: serve stored pages; store and delete nothing. Default: false.
    """

    backend: ClassVar[str] = "redis"

    url: str = ""
    service: str | None = None
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    namespace: NamespaceName = "asynchicache"
    connections: Positive = 4
    timeout_seconds: FiniteSeconds = 5.0
    ttl_seconds: Positive | None = None
    read_only: bool = False

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        blank = {*_LOGIN, *_FILES}
        words = {name: one for name, one in given.items() if one is not None and (one or name not in blank)}
        if isinstance(url := words.get("url"), str):
            words["url"], login = _without_login(url)
            words = login | words
        return super().of(words)

    @property
    def server(self) -> ServerLocation:
        """Where the server listens, or the servers."""
        return _location(self.url)

    def check(self) -> None:
        try:
            server = _location(self.url)
        except ValueError:
            raise self.refused("url", self.url, _RULE) from None
        for user, word in (_LOGIN[:2], _LOGIN[2:]):
            if getattr(self, user) and not getattr(self, word):
                raise self.refused(user, getattr(self, user), "needs a password")
        if self.service is not None and (not self.service or not server.hosts):
            raise self.refused("service", self.service, "must be a name, with a URL that names Sentinels")
        if self.sentinel_password and self.service is None:
            raise self.missing("service", "says whose Sentinels sentinel_password is for")
        for name in _FILES:
            self._check_file(name, server)
        if bool(self.cert_file) != bool(self.key_file):
            raise self.missing("key_file" if self.cert_file else "cert_file", "belongs to the other one")

    def _check_file(self, name: str, server: ServerLocation) -> None:
        path = getattr(self, name)
        if path and not server.tls:
            raise self.refused(name, path, "needs a URL that begins with rediss://")
        if path and not Path(path).is_file():
            raise self.refused(name, path, "must be a file in PEM")

    def connecting(self) -> dict[str, Any]:
        """How redis-py connects to each server: who we are, what we trust, how long we wait."""
        seconds = self.timeout_seconds
        words: dict[str, Any] = {"protocol": 2, "max_connections": self.connections + _OTHER_CONNECTIONS}
        words |= {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        return words | self._tls() | {"username": self.username, "password": self.password}

    def connecting_to_sentinels(self) -> dict[str, Any]:
        login = {"username": self.sentinel_username, "password": self.sentinel_password}
        return self.connecting() | login

    def _tls(self) -> dict[str, Any]:
        if not self.server.tls:
            return {}
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        return {"ssl": True, **files}

    def __repr__(self) -> str:
        return f"RedisOptions({self.url!r})"  # without the password


def _without_login(text: str) -> tuple[str, dict[str, object]]:
    """A URL without its login, and the login; a URL that does not fit is left as it is."""
    try:
        _location(text)
    except ValueError:
        return text, {}
    url = urlsplit(text)
    login = {"username": unquote(url.username or ""), "password": unquote(url.password or "")}
    plain = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() if "@" in url.netloc else text
    return plain, {name: value for name, value in login.items() if value}


@cache
def _location(text: str) -> ServerLocation:
    """
    Raises:
        ValueError: the URL does not follow the rule.
    """
    url = urlsplit(text)
    names = url.netloc.rpartition("@")[2]
    unix = url.scheme in _UNIX
    query = parse_qs(url.query, keep_blank_values=True)
    database = query.pop("db", ["" if unix else url.path.strip("/")])[-1] or "0"
    fits = url.scheme in (*_TCP, *_TLS, *_UNIX) and bool(names) != unix and (bool(url.path) or not unix)
    if not fits or query or not database.isdecimal():
        raise ValueError(text)
    hosts = () if unix else tuple(_host(name) for name in names.split(","))
    return ServerLocation(hosts, unquote(url.path) if unix else "", url.scheme in _TLS, int(database))


def _host(text: str) -> tuple[str, int]:
    one = urlsplit(f"//{text}")
    if not one.hostname or one.port == 0:
        raise ValueError(text)
    return one.hostname, one.port or _PORT
