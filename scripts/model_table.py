"""What `python scripts/model_table.py` prints: published configurations, their pools, and whether their
models agree; with `--types`, instead, the default configuration of each class of transformers that generates.

Each model is built without weights, on torch's meta device, at its real size. It fails if a model contradicts
an accepted spec, or if a refusal does not say what to do. `scripts/data/configurations.json` has the values
that decide what a model caches, as published; models that share them are one entry.
"""
# ruff: noqa: T201  # it prints for people

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)

from asynchicache import ModelSpec
from asynchicache.errors import CacheError, ConfigError
from asynchicache.integrations.serve.checkpoint_files import UNREADABLE, read_config
from asynchicache.integrations.transformers import asking

CONFIGURATIONS = Path(__file__).parent / "data" / "configurations.json"
CURE = re.compile(
    r"write its pools yourself|upgrade transformers|convert it|mend config\.json|pass dtype="
    r"|multiples of \d+ fit|set head_dim|has no pools of its own|compute its prompts whole"
)
"""What a refusal tells a user to do; or that the model is of a kind that has no prefix to cache."""


class Row(NamedTuple):
    """One line of the table. `agrees`: None if the model cannot be asked."""

    name: str
    kind: str
    verdict: str
    sizes: str = ""
    agrees: bool | None = None
    why: str = ""

    @property
    def problem(self) -> str:
        if self.agrees is False:
            return f"the model contradicts the spec: {self.why}"
        return "" if self.sizes or CURE.search(self.why) else f"no cure: {self.why}"


def published(
    named: Container[str] | None = None,
) -> Iterator[tuple[str, PreTrainedConfig | ConfigError]]:
    """The published configurations (`named`: only those), as a checkpoint's folder gives them; or why it does
    not."""
    for entry in json.loads(CONFIGURATIONS.read_text("utf-8")):
        if named is not None and ", ".join(entry["models"]) not in named:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(entry["config"]))
            try:
                yield ", ".join(entry["models"]), read_config(folder)
            except ConfigError as error:
                yield ", ".join(entry["models"]), ConfigError(str(error).replace(name, "."))


def every_type() -> Iterator[tuple[str, PreTrainedConfig | ConfigError]]:
    """The default configuration of each class that generates text."""
    for kind, known in CONFIG_MAPPING.items():
        if known in MODEL_FOR_CAUSAL_LM_MAPPING or known in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            try:
                yield kind, known()
            except UNREADABLE as error:
                first = " ".join(str(error).split())[:200]
                yield kind, ConfigError(f"transformers has no default ({first}); mend config.json")


def judge(name: str, config: PreTrainedConfig | ConfigError) -> Row:
    """Make the spec, and ask the model. Where a refusal says which page size or dtype fits, that is taken."""
    if isinstance(config, ConfigError):
        return Row(name, "", "refused", why=str(config))
    page_size, dtype, notes = 16, None, []
    while True:
        try:
            spec = asking.spec_from_model(config, page_size=page_size, dtype=dtype)
            break
        except CacheError as error:
            fits = re.search(r"multiples of (\d+) fit", str(error))
            if fits and page_size == 16:
                page_size = int(fits[1])
                notes.append(f"pages of {page_size}")
            elif "pass dtype=" in str(error) and dtype is None:
                dtype = "bfloat16"
                notes.append(f"with dtype={dtype!r}")
            else:
                return Row(name, config.model_type, "refused", why=str(error))
    agrees, why = ask(config, spec)
    verdict = "accepted" if _recipe(config, page_size, dtype) == spec else "asked"
    return Row(name, config.model_type, ", ".join([verdict, *notes]), sizes(spec), agrees, why)


def _recipe(config: PreTrainedConfig, page_size: int, dtype: str | None) -> ModelSpec | None:
    """The spec that the configuration gives without its model; None for a class without a recipe."""
    try:
        return ModelSpec.from_config(config, page_size=page_size, dtype=dtype)
    except CacheError:
        return None


def ask(config: PreTrainedConfig, spec: ModelSpec) -> tuple[bool | None, str]:
    """Whether a spec that `check_spec` let pass counts as many numbers as the model keeps."""
    try:
        cache = asking._forward(config, spec.page_size, spec.pools[0].tensors[0].dtype)  # noqa: SLF001
    except asking._NOT_ASKED as error:  # noqa: SLF001
        return None, f"not asked: {type(error).__name__}: {error}"
    tensors = [(pool, tensor) for pool in spec.pools for tensor in pool.tensors]
    wanted = sum(prod(pool.item_shape(one, spec.page_size)) * len(one.layers) for pool, one in tensors)
    # DeepSeek-V4's windows have the same keys as values.
    once = any(tensor.name == "window" for _, tensor in tensors)
    kept = sum(
        _numbers(held)
        for layer in cache.layers
        for name, held in vars(layer).items()
        if not (once and name == "values")
    )
    return kept == wanted, f"a page and a state are {kept:,} numbers in the model, {wanted:,} in the spec"


def _numbers(held: object) -> int:
    """How many numbers a field of a cache layer holds; a tensor without dimensions counts tokens."""
    if isinstance(held, torch.Tensor):
        return held.numel() if held.dim() else 0
    return sum(map(_numbers, held.values())) if isinstance(held, Mapping) else 0


def sizes(spec: ModelSpec) -> str:
    """Bytes of each pool: per token, and of a state."""
    parts = []
    for pool in spec.pools:
        size = pool.slot_bytes(spec.page_size)
        parts.append(f"{pool.name} {size // spec.page_size if pool.per_token else size:,}")
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", action="store_true", help="the defaults of all classes of transformers")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose name has the word")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| model | type | verdict | bytes per token, or of a state | the model |\n|---|---|---|---|---|")
    rows = []
    for name, config in every_type() if options.types else published():
        if options.only.lower() in name.lower():
            rows.append(row := judge(name, config))
            told = {True: "equal", False: "DIFFERENT", None: row.why}[row.agrees]
            print(f"| {row.name} | {row.kind} | {row.verdict} | {row.sizes} | {told} |", flush=True)
    problems = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    agreed = sum(row.agrees is True for row in rows)
    unasked = sum(row.agrees is None and bool(row.sizes) for row in rows)
    refused = sum(not row.sizes for row in rows)
    print(f"\n{len(rows)} rows: {agreed} equal to their models, {unasked} not asked, {refused} refused")
    print("\n".join(f"NOT OK: {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
