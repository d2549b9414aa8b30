"""The pages on SGLang and on other engines' pages name every option, with its real default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from asynchicache.integrations.page_store import PageStoreConfig
from asynchicache.integrations.sglang.options import SGLangOptions
from asynchicache.integrations.sglang.seam import SUPPORTED
from asynchicache.integrations.sglang.storage import AsynchicacheStorage

DOCS = Path(__file__).parents[2] / "docs"
HOWTO = (DOCS / "howto/sglang.md").read_text("utf-8")
REFERENCE = (DOCS / "reference/foreign_pages.md").read_text("utf-8")


def rows(text: str) -> dict[str, str]:
    """Defaults by option; a row may name several."""
    found = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: default for names, default in found for name in re.findall(r"`(\w+)`", names)}


def test_the_json_of_the_page_is_accepted_and_names_the_backend() -> None:
    text = HOWTO[HOWTO.index("pages.json\n") + len("pages.json\n") :]
    options = SGLangOptions.of(json.JSONDecoder().raw_decode(text)[0])
    assert options.module_path == AsynchicacheStorage.__module__
    assert options.class_name == AsynchicacheStorage.__name__
    assert options.interface_v1 == 1


def test_every_option_is_in_the_reference_with_its_default() -> None:
    shown = {None: "`None`", "": '`""`', 64 << 20: "64 MiB", 1 << 30: "1 GiB", msgspec.NODEFAULT: "required"}
    defaults = rows(REFERENCE)
    for options in (PageStoreConfig, SGLangOptions):
        for field in msgspec.structs.fields(options):
            plain = field.default_factory is msgspec.NODEFAULT and field.name != "storage_limits"
            if plain:
                assert defaults[field.name] == shown.get(field.default, str(field.default)), field.name
            assert field.name in defaults


def test_the_page_names_the_release_that_is_supported() -> None:
    assert f"SGLang {SUPPORTED}" in HOWTO
    assert f"sglang=={SUPPORTED}" in HOWTO
