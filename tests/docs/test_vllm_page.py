"""The page on the tier for vLLM has every option, hint and metric, and its JSON is one that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from asynchicache.integrations.vllm.hints import RequestHints
from asynchicache.integrations.vllm.metrics import DEFINITIONS
from asynchicache.integrations.vllm.options import TierOptions
from asynchicache.integrations.vllm.words import OffloadingCounterMetadata

PAGE = (Path(__file__).parents[2] / "docs/howto/vllm_tier.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([\w:-]+)` \| (.*) \|$", PAGE, re.MULTILINE))


def test_every_option_is_on_the_page() -> None:
    assert set(TierOptions.__struct_fields__) <= ROWS.keys()


def test_every_hint_is_on_the_page() -> None:
    """`cache` is one of the connector, which has a page of its own."""
    assert set(RequestHints.__dataclass_fields__) - {"ignored", "cache"} <= ROWS.keys()


def test_every_metric_is_on_the_page_with_its_labels() -> None:
    shown = {
        name: tuple(re.findall(r"`(\w+)`", row.split("|")[0]))
        for name, row in ROWS.items()
        if name.startswith("vllm:asynchicache_tier_")
    }

    assert shown == {
        name + "_total" * isinstance(metric, OffloadingCounterMetadata): metric.labelnames
        for name, metric in DEFINITIONS.items()
    }


def test_the_configuration_is_one_that_the_tier_takes() -> None:
    block = next(text for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if "kv_connector" in text)
    (tier,) = json.loads(block)["kv_connector_extra_config"]["secondary_tiers"]

    options = {name: value for name, value in tier.items() if name not in ("type", "module_path")}

    assert TierOptions.of(options).storage == "file"
