"""The page on object stores: its options and their defaults, its settings of each cloud, and its versions."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import fields
from obstore.store import AzureStore, GCSStore, S3Store

from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.stores import make_store
from asynchicache.errors import StorageError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/object_store.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE))
SETTINGS = dict(re.findall(r"^\| `(s3|gs|az)://\w+/prefix` \| (.*) \|$", PAGE, re.MULTILINE))


def test_every_option_is_on_the_page_with_its_default() -> None:
    defaults = {"url": "required", "config": "none"}
    options = ObjectOptions("memory:///")
    for field in fields(ObjectOptions):
        value = getattr(options, field.name)
        shown = f"`{str(value).lower()}`" if isinstance(value, bool) else str(value).removesuffix(".0")
        assert ROWS[field.name] == defaults.get(field.name, shown)


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_every_configuration_makes_a_store(text: str) -> None:
    store = make_store(ObjectOptions.of(tomllib.loads(text)["storage_options"]))
    assert isinstance(store, S3Store | GCSStore | AzureStore)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_settings_of_each_cloud_are_known(scheme: str) -> None:
    names = re.findall(r"`([a-z_]+)(?: = true)?`", SETTINGS[scheme])
    assert names
    for name in names:
        options = ObjectOptions.of({"url": f"{scheme}://bucket", "config": {name: "true"}})
        with suppress(StorageError):  # a key that is none, say; an unknown setting is a ConfigError
            make_store(options)


def test_versions_are_those_that_are_installed() -> None:
    script = (ROOT / "scripts/install_engines.sh").read_text("utf-8")
    for package in ("moto[s3]==5.2.5", "azurite@3.35.0"):
        assert package in script
        assert package in PAGE
