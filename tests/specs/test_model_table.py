"""The reference's table of model classes says what their specs say."""

from __future__ import annotations

import re
from pathlib import Path

from integrations.zoo import ALL, MODELS, tiny_spec

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
_POOLS = ("kv", "swa", "dsa", "mamba", "tail")
_ROW = re.compile(r"^\| `(\w+ForCausalLM)` \|" + r"(.*)\|" * len(_POOLS) + "$", re.MULTILINE)


def documented() -> dict[str, dict[str, str]]:
    """By class, the pools of its row and their tensors."""
    rows = _ROW.findall(_PAGE.read_text("utf-8"))
    return {
        name: {pool: cell.strip() for pool, cell in zip(_POOLS, cells, strict=True) if cell.strip()}
        for name, *cells in rows
    }


def described(name: str) -> dict[str, str]:
    return {pool.name: ", ".join(tensor.name for tensor in pool.tensors) for pool in tiny_spec(name).pools}


def test_the_table_has_every_tested_class_with_its_pools() -> None:
    expected = {f"{MODELS[name][0]}ForCausalLM": described(name) for name in ALL}
    assert documented() == expected
