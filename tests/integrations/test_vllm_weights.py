"""What vLLM's block hashes do not say: weights that change, and what adapters and images hold."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.contents import (
    AdapterContents,
    VllmWeights,
    follow_weights,
    hash_contents,
    image_name,
    model_digest,
)

SEAM = json.loads((Path(__file__).parents[1] / "data" / "seams" / "vllm-0.33.0.json").read_text())
HASHES, CORE = "vllm.v1.core.kv_cache_utils", "vllm.v1.engine.core"


class EngineCore:
    def __init__(self) -> None:
        self.called: list[Any] = []

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self.called.append(method)
        return [method]

    def set_weight_version(self, weight_version: str) -> None:
        self.called.append(weight_version)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The functions and the class that are wrapped, as 0.33 has them; `seams` records their signatures."""
    hashes, core, package = ModuleType(HASHES), ModuleType(CORE), ModuleType("vllm")
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    core.EngineCore = type("EngineCore", (), dict(vars(EngineCore)))  # type: ignore[attr-defined]
    hashes._gen_lora_extra_hash_keys = lambda request: (  # type: ignore[attr-defined]
        [("lora", request.lora_request.lora_name, request.lora_request.lora_path)]
        if request.lora_request
        else []
    )
    hashes._gen_mm_extra_hash_keys = lambda request, start, end, first: (  # type: ignore[attr-defined]
        [("mm", name, 0) for name in request.images],
        first + 1,
    )
    for module in (hashes, core, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package.hashes, package.core = hashes, core  # type: ignore[attr-defined]
    return package


def lora(folder: Path, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name="sql", lora_int_id=number, lora_path=str(folder))


def trained(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    return folder


@pytest.mark.parametrize("name", ["_gen_lora_extra_hash_keys", "_gen_mm_extra_hash_keys"])
def test_what_is_wrapped_has_the_signatures_that_were_recorded(vllm: Any, name: str) -> None:
    recorded = SEAM[f"{HASHES}:{name}"]["signature"]
    assert len(inspect.signature(getattr(vllm.hashes, name)).parameters) == len(recorded)


# Adapters and images.


def test_an_adapter_is_hashed_by_its_content(vllm: Any, tmp_path: Path) -> None:
    def keys(content: bytes) -> Any:
        hash_contents()  # an engine starts
        request = SimpleNamespace(lora_request=lora(trained(tmp_path, content)))
        (key,) = vllm.hashes._gen_lora_extra_hash_keys(request)
        return key

    hash_contents()
    plain = vllm.hashes._gen_lora_extra_hash_keys
    assert plain(SimpleNamespace(lora_request=None)) == []
    first, other, again = keys(b"first"), keys(b"other"), keys(b"first")
    assert first[:3] == ("lora", "sql", str(tmp_path))
    assert first == again != other
    assert len(first) == 4


def test_a_request_keeps_its_adapters_name_and_files_that_change_under_vllm_have_one_that_nobody_finds(
    tmp_path: Path,
) -> None:
    contents, request = AdapterContents(), SimpleNamespace(lora_request=lora(trained(tmp_path, b"first")))
    name = contents.of_request(request)
    assert contents.of(request.lora_request) == name == AdapterContents().of(request.lora_request)
    trained(tmp_path, b"other")
    assert contents.of_request(request) == name
    changed = contents.of(request.lora_request)
    assert changed == contents.of(request.lora_request)
    assert changed not in (name, AdapterContents().of(request.lora_request))
    trained(tmp_path, b"first")
    assert contents.of(request.lora_request) not in (name, changed), "vLLM may have loaded either"
    assert contents.of(lora(tmp_path, number=2)) == name, "vLLM loads it anew"


def test_an_adapter_whose_files_are_not_here_is_known_in_this_process_only(tmp_path: Path) -> None:
    missing = lora(tmp_path / "nobody")
    one, two = AdapterContents(), AdapterContents()
    assert one.of(missing) == one.of(missing) != two.of(missing)


def test_names_that_clients_give_to_images_do_not_outlive_the_process(vllm: Any) -> None:
    hash_contents()
    content = "0123456789abcdef" * 4
    request = SimpleNamespace(lora_request=None, images=[content, f"sql:{content}", "cat", content[1:]])
    (keys, place) = vllm.hashes._gen_mm_extra_hash_keys(request, 0, 16, 0)
    names = [name for _, name, _ in keys]
    assert (names[:2], place) == ([content, f"sql:{content}"], 1)
    assert names[2].startswith("cat:")
    assert len(names[2]) > 32
    assert names[3] != content[1:]
    assert image_name("cat") == names[2]


def test_another_vllm_is_refused_by_name(vllm: Any) -> None:
    del vllm.hashes._gen_lora_extra_hash_keys
    with pytest.raises(ConfigError, match=r"use vLLM 0\.32 or 0\.33"):
        hash_contents()
    del vllm.core.EngineCore.set_weight_version
    with pytest.raises(ConfigError, match=r"use 0\.32 or 0\.33"):
        follow_weights()


def test_a_model_is_known_by_its_content_and_its_settings(tmp_path: Path) -> None:
    def digest(weights: bytes = b"first", cache_dtype: str = "auto", **more: Any) -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        config = {"rope_theta": 1.0, "_name_or_path": str(len(known))} | more.pop("config", {})
        model = {"model": str(tmp_path), "revision": None, "quantization": None, "dtype": "float32"} | more
        model["hf_config"] = SimpleNamespace(to_dict=lambda: config)
        return model_digest(SimpleNamespace(**model), SimpleNamespace(cache_dtype=cache_dtype))

    known: set[str] = set()
    known.add(digest())
    assert digest() in known, "where it lies is not in it"
    changes: list[dict[str, Any]] = [
        {"weights": b"other"},
        {"config": {"rope_theta": 2.0}},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e5m2"},
        {"cache_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16"},
    ]
    for change in changes:
        known.add(digest(**change))
    assert len(known) == 1 + len(changes)


# Weights.


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("reload_weights", True),
        ("update_weights", True),
        ("start_weight_update", True),
        ("load_model", True),
        ("a method of the user's", True),
        (lambda worker: None, True),
        ("get_model_inspection", False),
        ("check_health", False),
        ("synchronize_device", False),
    ],
)
def test_what_may_change_weights_is_noticed(vllm: Any, method: Any, changes: bool) -> None:
    first, core = follow_weights(), vllm.core.EngineCore()
    assert first.name() == ""
    assert core.collective_rpc(method, kwargs={}) == [method]
    assert bool(first.name()) is changes
    assert follow_weights().name() == "", "an engine that starts later in this process"


def test_a_version_names_weights_when_no_page_of_others_is_left(vllm: Any) -> None:
    weights, core = follow_weights(), vllm.core.EngineCore()
    names = [weights.name()]
    core.collective_rpc("reload_weights")
    core.set_weight_version("2")
    names.append(weights.name())
    weights.reset()
    assert weights.name() == "2"
    weights.reset()
    names.append(weights.name())
    weights.reset()
    core.set_weight_version("3")  # of weights that were changed in between
    assert weights.name() == "3"
    assert len({*names, "2"}) == 4
    assert core.called == ["reload_weights", "2", "3"]


def test_a_reset_forgets() -> None:
    weights = VllmWeights()
    before = weights.name()
    weights.reset()
    assert weights.name() != before
