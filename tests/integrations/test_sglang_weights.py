"""Weights that change in a running SGLang: pages of other weights are not found, in memory or storage."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from asynchicache.errors import ConfigError
from asynchicache.integrations.served_weights import ServedWeights
from asynchicache.integrations.sglang.storage import AsynchicacheStorage
from asynchicache.integrations.sglang.weights import follow_weights
from integrations.sglang_engine import StandInEngine
from integrations.sglang_pools import RecordedPool, storage_config

SEAM = json.loads((Path(__file__).parents[1] / "data" / "seams" / "sglang-0.5.23.json").read_text())
KEYS = [f"{number:064x}" for number in range(3)]


def test_what_is_wrapped_has_the_signatures_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, owner in StandInEngine(monkeypatch).classes.items():
        wrapped = [name for name in vars(owner) if f"{module}:{owner.__name__}.{name}" in SEAM]
        assert wrapped
        for name in wrapped:
            recorded = SEAM[f"{module}:{owner.__name__}.{name}"]["signature"]
            parameters = inspect.signature(getattr(owner, name)).parameters
            assert list(parameters) == [each.rstrip("=") for each in recorded if each != "*"], name


# Names.


def test_the_start_needs_no_name_and_a_version_is_one() -> None:
    weights = ServedWeights()
    assert weights.name() == ""
    weights.changed("v2")
    weights.dropped()
    assert weights.name() == "v2"
    assert ServedWeights("v2").name() == "v2"


def test_weights_without_a_version_have_a_name_that_nobody_else_finds() -> None:
    names = set()
    for _ in range(2):
        weights = ServedWeights()
        weights.name()
        for _ in range(2):
            weights.changed()
            weights.dropped()
            assert weights.name() == weights.name()
            names.add(weights.name())
    assert len(names) == 4
    assert "" not in names


def test_memory_that_may_hold_pages_of_both_is_neither() -> None:
    weights = ServedWeights("v1")
    weights.name()
    weights.changed("v2")
    mixed = weights.name()
    assert mixed not in ("v1", "v2")
    weights.changed("v1")
    assert weights.name() not in ("v1", "v2", mixed)
    weights.dropped()
    assert weights.name() == "v1"


def test_nothing_is_mixed_before_a_page_was_asked_for() -> None:
    weights = ServedWeights("v1")
    weights.changed()
    weights.changed("v2")
    assert weights.name() == "v2"


# SGLang.


def stored(engine: StandInEngine, backend: AsynchicacheStorage, pool: RecordedPool) -> int:
    """How many pages are found; then they are stored."""
    found = backend.batch_exists(KEYS)
    assert backend.batch_set_v1(KEYS, pool.indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(KEYS) == 3
    return found


def opened(folder: Path, pool: RecordedPool, **more: Any) -> AsynchicacheStorage:
    extra = {
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "file",
        "storage_options": {"path": str(folder)},
    }
    backend = AsynchicacheStorage(storage_config(extra | more))
    backend.register_mem_pool_host(pool)
    return backend


@pytest.fixture
def pool() -> RecordedPool:
    pool = RecordedPool("mha-page_first_direct")
    for page in range(3):
        pool.fill(page, page)
    return pool


def test_an_update_hides_pages_until_their_weights_return(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    engine = StandInEngine(monkeypatch)
    backend = opened(tmp_path, pool)
    try:
        assert stored(engine, backend, pool) == 0
        engine.update("v2")
        assert stored(engine, backend, pool) == 0
        engine.update("v3")
        assert backend.batch_exists(KEYS) == 0
        assert backend.batch_get_v1(KEYS, pool.indices(0, 1, 2)) == [False] * 3
        engine.update("v2")
        assert backend.batch_exists(KEYS) == 3
    finally:
        backend.close()
    engine = StandInEngine(monkeypatch, "v2")
    backend = opened(tmp_path, pool)
    try:
        assert backend.batch_exists(KEYS) == 3, "a server that starts with these weights finds them"
    finally:
        backend.close()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda engine: engine.update(None),
        lambda engine: engine.update("v2", flush=False),
        lambda engine: engine.update(None, fails=True),
        lambda engine: engine.runner.begin_weight_update(),
        lambda engine: engine.runner.end_weight_update(run_post_load=True),
        lambda engine: setattr(engine.serving, "weight_version", "v2"),
    ],
    ids=["no version", "not flushed", "failed", "session", "written by others", "only the version"],
)
def test_no_change_of_weights_goes_unnoticed(
    change: Any, flat: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    """What is stored then is found in this process only: it may be of either weights."""
    engine = StandInEngine(monkeypatch)
    backend = opened(tmp_path, pool, interface_v1=int(not flat))
    page = pool.get_dummy_flat_data_page() if flat else None

    def there() -> bool:
        return backend.exists(KEYS[0]) if flat else backend.batch_exists(KEYS) == 3

    def store() -> None:
        assert backend.set(KEYS[0], page) if flat else backend.batch_set_v1(KEYS, pool.indices(0, 1, 2))

    try:
        store()
        assert there()
        change(engine)
        assert not there()
        store()
        assert there()
    finally:
        backend.close()
    for version in ("default", "v2"):
        StandInEngine(monkeypatch, version)
        backend = opened(tmp_path, pool, interface_v1=int(not flat))
        try:
            assert there() is (version == "default"), "of the first weights"
        finally:
            backend.close()


def test_tensors_that_come_in_parts_are_one_update(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    engine = StandInEngine(monkeypatch)
    weights = follow_weights()
    weights.name()
    engine.runner.begin_weight_update()
    for last in (False, False, True):
        engine.update("v2", flush=last)
    engine.runner.end_weight_update(run_post_load=False)
    assert weights.name() == "v2"
    assert follow_weights() is weights


@pytest.mark.parametrize("named", [True, False])
def test_weights_from_disk_are_known_by_their_content(
    named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    """Also a checkpoint that is trained again into the same folder, under the same names."""
    folder, version = tmp_path / "model", "v2" if named else "default"
    for number, expected in ((1, 0), (2, 0), (1, 3), (2, 3)):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(bytes([number]) * 10_000)
        StandInEngine(monkeypatch, version, folder=folder)
        backend = opened(tmp_path / "store", pool)
        try:
            assert backend.batch_exists(KEYS) == expected
            backend.batch_set_v1(KEYS, pool.indices(0, 1, 2))
        finally:
            backend.close()
    engine = StandInEngine(monkeypatch)
    backend = opened(tmp_path / "store", pool)
    try:
        assert backend.batch_exists(KEYS) == 0
        engine.update("v2" if named else None, folder=folder)
        assert backend.batch_exists(KEYS) == 3
    finally:
        backend.close()


@pytest.mark.parametrize(
    "setting", ["json_model_override_args", "kv_cache_dtype", "quantization", "quantization_param_path"]
)
def test_settings_that_change_pages_are_in_their_keys(
    setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    found = {}
    for value in ("a", "b", "a"):
        StandInEngine(monkeypatch, **{setting: value})
        backend = opened(tmp_path, pool)
        try:
            found.setdefault(value, backend.batch_exists(KEYS))
            backend.batch_set_v1(KEYS, pool.indices(0, 1, 2))
            assert backend.batch_exists(KEYS) == 3
        finally:
            backend.close()
    assert found == {"a": 0, "b": 0}


# Adapters.


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def request_key(engine: StandInEngine, extra_key: str | None = None, lora_id: str | None = None) -> object:
    return engine.request("r", lora_id=lora_id, extra_key=extra_key).extra_key  # type: ignore[arg-type]


def test_an_adapter_is_known_by_its_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    keys = []
    for content in (b"first", b"other", b"first"):
        folder = adapter(tmp_path / "sql", content)
        engine = StandInEngine(monkeypatch, adapters={"sql": folder})
        for _ in range(2):
            opened(tmp_path / "store", pool).close()
        keys.append(request_key(engine, lora_id="id of sql"))
        assert str(keys[-1]).endswith("id of sql"), "SGLang finds the adapter's name by it"
        assert request_key(engine, lora_id="of a later load") == "of a later load"
        assert request_key(engine) is None
    assert keys[0] == keys[2] != keys[1]


def test_no_client_can_write_the_key_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    engine = StandInEngine(monkeypatch, adapters={"sql": adapter(tmp_path / "sql", b"first")})
    opened(tmp_path / "store", pool).close()
    key = str(request_key(engine, lora_id="id of sql"))
    assert request_key(engine, extra_key=key) != key
    assert request_key(engine, extra_key="tenant", lora_id="id of sql") not in (key, "tenant")


def test_an_adapter_whose_files_are_not_here_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pool: RecordedPool
) -> None:
    StandInEngine(monkeypatch, adapters={"sql": tmp_path / "nobody"})
    with pytest.raises(ConfigError, match=r"adapter sql: no files in .*load it by /load_lora_adapter"):
        opened(tmp_path / "store", pool)


def test_another_sglang_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = StandInEngine(monkeypatch)
    del type(engine.manager).record_weight_version_after_update
    with pytest.raises(ConfigError, match=r"weights of the SGLang.*sglang==0\.5\.23"):
        follow_weights()
