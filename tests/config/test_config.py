"""Options from code, TOML and the environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from asynchicache.config import CacheConfig, PrefetchOptions, load_factory, open_backend
from asynchicache.errors import ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.ports import AsyncioPort
from asynchicache.storage.limits import PoolLimits
from asynchicache.transfer.paths import CopyPath
from asynchicache.types import PrefetchPolicy, WritePolicy


def test_defaults_need_nothing():
    assert CacheConfig().storage is None
    assert CacheConfig().write_policy is WritePolicy.WRITE_THROUGH


def test_toml_then_environment(tmp_path: Path):
    path = tmp_path / "cache.toml"
    path.write_text(
        'host_ratio = 3.0\nwrite_policy = "write_back"\nstorage = "file"\nweight_version = "a1"\n'
        '[storage_options]\npath = "pages"\n[prefetch]\npolicy = "best_effort"\n'
    )
    environ = {
        "ASYNCHICACHE_HOST_RATIO": "4",
        "ASYNCHICACHE_DEVICE_SLOTS": "{kv = 64}",
        "ASYNCHICACHE_EVICTION": "lru",
        "ASYNCHICACHE_CHECKPOINTS": "prompt+2048",
        "ASYNCHICACHE_TEST_SWITCH": "1",
        "PATH": "/bin",
    }
    config = CacheConfig.load(path, environ)

    assert config.host_ratio == 4.0
    assert config.device_slots == {"kv": 64}
    assert config.eviction == "lru"
    assert config.checkpoints == "prompt+2048"
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.prefetch.policy is PrefetchPolicy.BEST_EFFORT
    assert config.storage_options == {"path": "pages"}


@pytest.mark.parametrize("text", ["1234567", "123e456", "0x1f", "true", "nan", "2024-01-01", "a1", "[1]", ""])
def test_words_of_the_environment_are_no_numbers(text: str):
    assert CacheConfig.load(environ={"ASYNCHICACHE_WEIGHT_VERSION": text}).weight_version == text
    assert CacheConfig.load(environ={"ASYNCHICACHE_SALT": f'"{text}"'}).salt == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "HOST_RATIO",
            "three",
            r"ASYNCHICACHE_HOST_RATIO: host_ratio 'three' must be a number",
        ),
        ("PREFETCH", "timeout", r"ASYNCHICACHE_PREFETCH: prefetch 'timeout' must be a table"),
        (
            "PREFETCH",
            "{polcy = 1}",
            r"PREFETCH: prefetch 'polcy' is not an option; did you mean 'policy'",
        ),
    ],
)
def test_a_variable_that_does_not_fit_is_named(name: str, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        CacheConfig.load(environ={f"ASYNCHICACHE_{name}": text})


def test_options_of_storage_are_not_shown():
    with pytest.raises(ConfigError, match=r"storage_options \*\*\* must be a table") as caught:
        CacheConfig.load(environ={"ASYNCHICACHE_STORAGE_OPTIONS": "{password = 'secret'"})
    assert "secret" not in str(caught.value)


def test_a_misspelt_variable_is_told_of_and_those_of_others_are_not(caplog: pytest.LogCaptureFixture):
    others = {"ASYNCHICACHE_TEST_SWITCH": "1", "ASYNCHICACHE_SERVICE_HOST": "10.0.0.1", "HOST_RATO": "3"}
    ports = {"ASYNCHICACHE_PORT": "tcp://10.0.0.1:80", "ASYNCHICACHE_SERVICE_PORT": "80"}
    assert CacheConfig.load(environ={"ASYNCHICACHE_HOST_RATO": "3", **others, **ports}) == CacheConfig()
    (told,) = caplog.messages
    assert told.startswith("ASYNCHICACHE_HOST_RATO is no option")
    assert "ASYNCHICACHE_HOST_RATIO meant" in told


def test_a_file_that_is_no_text_is_said_to_be_none(tmp_path: Path):
    path = tmp_path / "cache.toml"
    path.write_bytes(b'salt = "\xff"')
    with pytest.raises(ConfigError, match="does not fit: 'utf-8' codec"):
        CacheConfig.load(path, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("host_ration = 2", r"cache\.toml: 'host_ration' is not an option; did you mean 'host_ratio'"),
        ("colour = 2", r"'colour' is not an option; the options are audit, "),
        ('write_policy = "sometimes"', "sometimes"),
        ('host_ratio = "much"', "host_ratio"),
        ('checkpoints = "prompts"', "checkpoints 'prompts': must be prompt"),
        ("host_ratio = ", r"configuration .*cache\.toml does not fit"),
        (
            "[prefetch]\nbase_second = 1",
            r"'base_second' is not an option; did you mean 'base_seconds'",
        ),
        ("[prefetch]\nmax_seconds = -1", "max_seconds -1 must be a number of at least 0"),
        (
            "[storage_limits]\npatience = 1",
            r"storage limit 'patience' is not an option; the options are batch",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, words: str):
    path = tmp_path / "cache.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=words):
        CacheConfig.load(path, {})


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        CacheConfig.load(tmp_path / "nowhere.toml", {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "memory"}, "storage needs weight_version"),
        ({"eviction": "random"}, "eviction policy 'random' is none of"),
        ({"rank": 2, "ranks": 2}, "rank 2 of 2"),
        ({"io_threads": 0}, "io_threads 0 must be a whole number above 0"),
        ({"clean_share": 1.5}, "clean_share 1.5"),
        (
            {"write_policy": "writeback"},
            "write_policy 'writeback' must be one of 'write_through', .*'write_back'",
        ),
        (
            {"prefetch": "best_effort"},
            "prefetch 'best_effort' must be a table of options, or a PrefetchOptions",
        ),
        (
            {"device_bytes": "1G"},
            "device_bytes '1G' must be a whole number .*, or a size such as '10GiB' .*KiB",
        ),
        ({"device_bytes": "-1GB"}, "device_bytes '-1GB' must be a whole number of at least 0"),
        ({"write_polcy": "write_back"}, "'write_polcy' is not an option; did you mean 'write_policy'?"),
        ({"ranks": 1.5}, "ranks 1.5 must be a whole number above 0"),
        ({"audit": "0.5"}, "audit '0.5' must be a number from 0 to 1"),
        ({"inline": "yes"}, "inline 'yes' must be true or false"),
        ({"storage": "memory", "weight_version": 5}, "weight_version 5 must be text, or None"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**options)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (PoolLimits, {"deadline": "5"}, "storage limit deadline '5' must be a number"),
        (PoolLimits, {"retries": 1.5}, "storage limit retries 1.5 must be a whole number"),
        (PoolLimits, {"opening": 0}, "storage limit opening 0 must be a number above 0"),
        (PoolLimits, {"cooldown": float("nan")}, "storage limit cooldown nan must be a number above 0"),
        (PrefetchOptions, {"base_seconds": "2"}, "prefetch base_seconds '2' must be a number"),
    ],
)
def test_limits_of_another_type_are_refused(kind: type, options: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        kind(**options)


@pytest.mark.asyncio
async def test_an_unknown_backend_lists_those_found():
    port = AsyncioPort()
    with pytest.raises(ConfigError, match=r"storage 'tape' is none of .*'file'.*'memory'"):
        open_backend("tape", {}, port)
    await port.aclose()


@pytest.mark.asyncio
async def test_a_backend_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("asynchicache.backends.object")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    port = AsyncioPort(threads=1)
    try:
        with pytest.raises(ConfigError, match=r"cannot be imported: .*obstore.*asynchicache\[object\]"):
            open_backend("object", {"url": "memory:///"}, port)
    finally:
        await port.aclose()


@pytest.mark.parametrize("name", ["file", "memory", "mooncake"])
def test_what_is_no_extra_is_not_advised(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be imported: .*; pip install 'asynchicache'$"):
        load_factory(name, "asynchicache.backends.no_such_module:open_backend")


def test_storage_and_a_layout_that_cuts_pages_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="storage cannot use host_layout 'layer_first'"):
        CacheConfig(storage="memory", weight_version="1", host_layout=HostLayout.LAYER_FIRST)


def test_layout_and_path_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "cache.toml"
    file.write_text('host_layout = "page_first"\ncopy_path = "kernel"\n')

    config = CacheConfig.load(file, {})

    assert (config.host_layout, config.copy_path) == (HostLayout.PAGE_FIRST, CopyPath.KERNEL)
    with pytest.raises(ConfigError, match=r"copy_path 'kernels' must be one of 'batch', .*, or None"):
        CacheConfig(copy_path="kernels")


def test_code_may_use_the_words_of_a_file() -> None:
    given: dict[str, Any] = {
        "write_policy": "write_back",
        "device_bytes": "10GiB",
        "prefetch": {"policy": "wait_complete"},
        "storage_limits": {"batch_bytes": "8 MiB"},
    }
    config = CacheConfig(**given)

    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.device_bytes == 10 << 30
    assert config.prefetch == PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE)
    assert config.storage_limits == PoolLimits(batch_bytes=8 << 20)


def test_a_variable_may_be_a_size() -> None:
    assert CacheConfig.load(None, {"ASYNCHICACHE_HOST_BYTES": "1.5GiB"}).host_bytes == 3 << 29
