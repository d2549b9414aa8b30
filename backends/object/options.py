"""Options of the object store backend."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from asynchicache.backends.options import BackendOptions
from asynchicache.hashing import GROUP_PAGES
from asynchicache.options import FiniteSeconds, Natural, Positive

SCHEMES = ("s3", "gs", "az", "file", "memory")
_RULE = "must be s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder or memory:///"

_CLIENT_KEYS = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_max_frame_size",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "timeout",
    "user_agent",
}
"""Settings of obstore's HTTP client (object_store's `ClientConfigKey`). As settings of a store they make
it panic, which raises a `BaseException` that is no `Exception`."""


class ObjectOptions(BackendOptions, frozen=True):
    """Options of the object store backend.

    Attributes:
        url: the bucket, and the prefix of every object's name.
        config: settings of the store by obstore's names: `endpoint`, `region`, `access_key_id`, ...
            Default: none; obstore then finds credentials as the cloud's own tools do.
        credentials_file: a file in JSON with credentials, read again before they expire. Default: none.
        credentials_command: a command that prints such credentials. Default: none.
        ca_file: certificates to trust beside the system's, in PEM. Default: none.
        requests: maximum number of concurrent requests for pages, over all pools, and of lookups beside them.
            Default: 32.
        timeout_seconds: time limit of one attempt of a request. Default: 10.
        retries: further attempts after a failure of the server or the network. Default: 2.
        object_pages: most consecutive pages of a path in one object, 1 to 64. With 1, the digest alone names
            an object, as in stores of older versions. Default: 32.
        refresh_days: age in days at which objects are copied within the store if their pages are used, in
            memory too, so that a rule that expires objects by age keeps them. 0: never. Default: 0.
        index: list a pool's pages when it is opened, and answer `exists` from that list; pages that others
            store later are not seen. Default: false.
        read_only: read only; store and delete nothing. Default: false.
    """

    backend: ClassVar[str] = "object"

    url: str = ""
    config: Mapping[str, str] = {}
    credentials_file: str | None = None
    credentials_command: str | None = None
    ca_file: str | None = None
    requests: Positive = 32
    timeout_seconds: FiniteSeconds = 10.0
    retries: Natural = 2
    object_pages: Positive = 32
    refresh_days: Natural = 0
    index: bool = False
    read_only: bool = False

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        settings = given.get("config")
        return super().of(given if settings is None else {**given, "config": cls._settings(settings)})

    @classmethod
    def _settings(cls, given: object) -> Mapping[str, str]:
        """Settings as strings. Messages show names only, because values may be secrets."""
        if not isinstance(given, Mapping):
            raise cls.refused("config", type(given).__name__, "must be a table of settings")
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, str | bool | int):
                raise cls.refused("config", {name: type(value).__name__}, "must map names to words")
            if name.lower() in _CLIENT_KEYS:
                raise cls.refused("config", name, f"is not a setting of a store: {_INSTEAD}")
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in given.items()
        }

    def check(self) -> None:
        if not _names_a_place(self.url):
            raise self.refused("url", self.url, _RULE)
        if self.object_pages > GROUP_PAGES:
            raise self.refused("object_pages", self.object_pages, f"must be at most {GROUP_PAGES}")
        if self.refresh_days and (self.object_pages == 1 or self.scheme == "file"):
            raise self.refused("refresh_days", self.refresh_days, "needs a bucket, and object_pages above 1")
        if self.config and self.scheme in ("file", "memory"):
            raise self.refused("config", sorted(self.config), f"has no effect with {self.scheme}://")
        for name in ("ca_file", "credentials_file", "credentials_command"):
            if getattr(self, name) is not None and self.scheme in ("file", "memory"):
                raise self.refused(name, getattr(self, name), f"has no effect with {self.scheme}://")
        if self.credentials_file is not None and self.credentials_command is not None:
            raise self.refused("credentials_file", self.credentials_file, "excludes credentials_command")
        if self.credentials_file is not None and not Path(self.credentials_file).is_file():
            raise self.refused("credentials_file", self.credentials_file, "must be a file")
        if self.credentials_command is not None and not _is_command(self.credentials_command):
            raise self.refused("credentials_command", self.credentials_command, "must be a command line")
        if self.ca_file is not None and not _holds_certificates(Path(self.ca_file)):
            raise self.refused("ca_file", self.ca_file, "must be a file of certificates in PEM")

    def __repr__(self) -> str:
        return f"ObjectOptions({self.url!r})"  # the settings may be secrets


_INSTEAD = "http:// is allowed where endpoint says so, and deadlines are option timeout_seconds"


def _is_command(line: str) -> bool:
    try:
        return bool(shlex.split(line))
    except ValueError:
        return False


def _holds_certificates(path: Path) -> bool:
    return path.is_file() and "-----BEGIN CERTIFICATE-----" in path.read_text("utf-8", "replace")


def _names_a_place(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if parts.query or parts.fragment or "@" in parts.netloc:
        return False
    if parts.scheme == "memory":
        return True
    return parts.scheme in SCHEMES and bool(parts.path.strip("/") if parts.scheme == "file" else parts.netloc)
