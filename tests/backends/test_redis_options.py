"""Options of the redis engine: what they mean, and what is refused, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from asynchicache.backends.redis.options import RedisOptions, ServerLocation
from asynchicache.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("redis://cache", ServerLocation((("cache", 6379),), "", False, 0)),
        ("redis://cache:7000/3", ServerLocation((("cache", 7000),), "", False, 3)),
        ("valkey://cache", ServerLocation((("cache", 6379),), "", False, 0)),
        ("redis://[::1]:7000", ServerLocation((("::1", 7000),), "", False, 0)),
        ("redis://cache?db=4", ServerLocation((("cache", 6379),), "", False, 4)),
        ("rediss://cache", ServerLocation((("cache", 6379),), "", True, 0)),
        ("valkeys://cache:1", ServerLocation((("cache", 1),), "", True, 0)),
        (
            "redis://:p@a,b:7000,[::1]:1",
            ServerLocation((("a", 6379), ("b", 7000), ("::1", 1)), "", False, 0),
        ),
        ("unix:///run/redis.sock", ServerLocation((), "/run/redis.sock", False, 0)),
        ("unix:///run/my%20redis.sock?db=2", ServerLocation((), "/run/my redis.sock", False, 2)),
    ],
)
def test_urls(url: str, server: ServerLocation) -> None:
    assert RedisOptions.of({"url": url}).server == server


def test_who_we_are_comes_from_the_url_or_from_options() -> None:
    by_url = RedisOptions.of({"url": "redis://bob:p%40ss@cache"})
    by_options = RedisOptions.of({"url": "redis://cache", "username": "bob", "password": "p@ss"})
    both = RedisOptions.of({"url": "redis://bob:p%40ss@cache", "password": "other"})

    assert (by_url.username, by_url.password) == ("bob", "p@ss")
    assert by_url == by_options
    assert both.password == "other"
    assert RedisOptions.of({"url": "redis://:secret@cache"}).username is None


def test_a_password_of_another_type_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"option password=\*\*\* must be text"):
        RedisOptions.of({"url": "redis://cache", "password": 1234})
    with pytest.raises(ConfigError, match=r"option sentinel_password=\*\*\* must be text"):
        RedisOptions.of({"url": "redis://cache", "sentinel_password": 1234})


def test_a_password_is_never_shown() -> None:
    options = RedisOptions.of({"url": "redis://bob:s3cret@cache", "read_only": True})
    assert "s3cret" not in repr(options)
    wrong = ("redis://bob:s3cret@cache/x", "http://bob:s3cret@cache", "redis://bob:s3cret@cache:99999")
    for url in (*wrong, "redis:/bob:s3cret@cache", "bob:s3cret@cache"):
        with pytest.raises(ConfigError) as caught:
            RedisOptions.of({"url": url})
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"url='' must be redis://"),
        ({"url": 5}, r"url=5 must be text"),
        ({"url": "cache:6379"}, r"url='cache:6379' must be redis://"),
        ({"url": "redis://"}, r"url='redis:' must be redis://|url='redis://' must be redis://"),
        ({"url": "redis://cache:0"}, r"must be redis://"),
        ({"url": "redis://cache:70000"}, r"must be redis://"),
        ({"url": "redis://cache/one"}, r"must be redis://"),
        ({"url": "redis://cache/-1"}, r"must be redis://"),
        ({"url": "redis://cache?protocol=3"}, r"must be redis://"),
        ({"url": "unix://"}, r"must be redis://"),
        ({"url": "unix://host/path"}, r"must be redis://"),
        ({"url": "redis://c", "namespace": ""}, r"namespace='' must be text"),
        ({"url": "redis://c", "namespace": "a*"}, r"namespace='a\*' must be"),
        ({"url": "redis://c", "namespace": "a:b"}, r"namespace='a:b' must be"),
        ({"url": "redis://c", "namespace": "a\n"}, r"must be text that matches"),
        ({"url": "redis://c", "namespace": "é"}, r"must be text that matches"),
        ({"url": "redis://c", "namespace": "x" * 65}, r"must be text that matches"),
        ({"url": "redis://c", "connections": 0}, r"connections=0 must be a whole number above 0"),
        ({"url": "redis://c", "connections": True}, r"connections=True must be a whole number"),
        ({"url": "redis://c", "timeout_seconds": 0}, r"timeout_seconds=0 must be a number above 0"),
        ({"url": "redis://c", "timeout_seconds": float("inf")}, r"timeout_seconds=inf must be"),
        ({"url": "redis://c", "timeout_seconds": float("nan")}, r"timeout_seconds=nan must be"),
        ({"url": "redis://c", "ttl_seconds": -5}, r"ttl_seconds=-5 must be a whole number above 0"),
        ({"url": "redis://c", "username": "bob"}, r"username='bob' needs a password"),
        ({"url": "redis://c", "ca_file": "/ca.pem"}, r"ca_file='/ca.pem' needs a URL"),
        ({"url": "redis://c", "key_file": "/k.pem"}, r"key_file='/k.pem' needs a URL"),
        ({"url": "redis://a,,b"}, r"must be redis://"),
        ({"url": "redis://a:1,b:0"}, r"must be redis://"),
        ({"url": "unix:///run/redis.sock", "service": "m"}, r"service='m' must be a name, with a URL"),
        ({"url": "redis://c", "service": ""}, r"service='' must be a name"),
        ({"url": "redis://c", "sentinel_password": "p"}, r"service is missing; it says whose Sentinels"),
        (
            {"url": "redis://c", "service": "m", "sentinel_username": "u"},
            r"sentinel_username='u' needs a password",
        ),
        ({"url": "redis://c", "read_only": "yes"}, r"read_only='yes' must be true or false"),
        ({"url": "redis://c", "capacity_bytes": 1}, r"has no option 'capacity_bytes'"),
    ],
)
def test_what_is_refused(options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisOptions.of(options)


def test_a_certificate_of_ours_needs_its_key(tmp_path: Path) -> None:
    (tmp_path / "c.pem").touch()
    for one, other in (("cert_file", "key_file"), ("key_file", "cert_file")):
        with pytest.raises(ConfigError, match=f"{other} is missing"):
            RedisOptions.of({"url": "rediss://c", one: str(tmp_path / "c.pem")})


def test_a_missing_ca_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca_file='.*no\.pem' must be a file"):
        RedisOptions.of({"url": "rediss://c", "ca_file": str(tmp_path / "no.pem")})
