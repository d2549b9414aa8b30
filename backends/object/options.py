"""What the user chooses: which store, how much patience, how many requests at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from asynchicache.backends.options import Options

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
"""Settings of obstore's HTTP client (object_store's `ClientConfigKey`): among a store's they make it panic,
with what is no `Exception`."""


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """What the user chooses.

    Attributes:
        url: the bucket and what every object's name begins with.
        config: the store's own settings by name, as obstore has them: `endpoint`, `region`,
            `access_key_id`, ... Default: none; obstore looks for credentials where the cloud's own tools do.
        requests: most at once, of all pools. Default: 32.
        timeout_seconds: for one try of one request. Default: 10.
        retries: further tries of a request that failed for the server's or the network's sake. Default: 2.
        index: list a pool's pages when it is opened, and answer `exists` from memory from then on; pages
            that others store later are not seen. Default: false.
        read_only: serve what is there, store and delete nothing. Default: false.
    """

    url: str
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    requests: int = 32
    timeout_seconds: float = 10.0
    retries: int = 2
    index: bool = False
    read_only: bool = False

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @classmethod
    def of(cls, options: Mapping[str, object]) -> ObjectOptions:
        """
        Raises:
            ConfigError: an option is missing, unknown, or breaks its rule.
        """
        taken = Options("object", options)
        made = cls(
            taken.take("url", str, ""),
            _config(taken),
            taken.positive("requests") or 32,
            taken.take("timeout_seconds", (int, float), 10.0),
            taken.take("retries", int, 2),
            taken.take("index", bool, False),
            taken.take("read_only", bool, False),
        )
        made._check(taken)
        taken.finish()
        return made

    def _check(self, taken: Options) -> None:
        if not _names_a_place(self.url):
            raise taken.refused("url", self.url, _RULE)
        if not 0 < self.timeout_seconds < math.inf:
            raise taken.refused("timeout_seconds", self.timeout_seconds, "must be a number above 0")
        if self.retries < 0:
            raise taken.refused("retries", self.retries, "must be 0 or more")
        if self.config and self.scheme in ("file", "memory"):
            raise taken.refused("config", sorted(self.config), f"means nothing to {self.scheme}://")


_INSTEAD = "http:// is allowed where endpoint says so, and patience is option timeout_seconds"


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


def _config(taken: Options) -> Mapping[str, str]:
    """Settings as strings; names only are shown in messages: values may be secrets."""
    given = taken.take("config", object, {})
    if not isinstance(given, Mapping):
        raise taken.refused("config", type(given).__name__, "must be of type Mapping")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int):
            raise taken.refused("config", {name: type(value).__name__}, "must map names to words")
        if name.lower() in _CLIENT_KEYS:
            raise taken.refused("config", name, f"is no setting of a store: {_INSTEAD}")
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()
    }
