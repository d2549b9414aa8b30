"""The page on vLLM has what the connector has: its metrics, and a configuration that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from asynchicache.integrations.vllm.metrics import FAMILIES
from asynchicache.integrations.vllm.options import ConnectorOptions, read_options

PAGE = (Path(__file__).parents[2] / "docs/howto/vllm.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([\w:-]+)` \| (.*) \|$", PAGE, re.MULTILINE))


def test_every_option_of_its_own_is_on_the_page() -> None:
    assert set(ConnectorOptions.__struct_fields__) <= ROWS.keys()


def test_every_metric_is_on_the_page_with_its_labels() -> None:
    shown = {
        name: tuple(re.findall(r"`(\w+)`", row.split("|")[0]))
        for name, row in ROWS.items()
        if name.startswith("vllm:asynchicache_connector_")
    }

    assert shown == {f"{family.full_name}_total": family.labels for family in FAMILIES}


def test_the_configuration_is_one_that_the_connector_takes() -> None:
    block = next(text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if "kv_connector" in text)
    given = json.loads(block)["kv_connector_extra_config"]

    assert read_options(given, replica=0).cache.storage == "file"
