"""Checkpoints as people have them: for text and images too, and half of one, or of two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import BadRequestError
from transformers import AddedToken, AutoTokenizer

from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.loading import load_checkpoint
from asynchicache.integrations.transformers.asking import spec_from_model
from integrations.serve.checkpoints import WRAPPERS, save_checkpoint, save_wrapper
from integrations.serve.serving import as_text, running, uncached

QUESTION = "what is kept, and what is brought back? " * 3
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WRAPPERS)
async def test_a_model_for_text_and_images_serves_text(name: str, tmp_path: Path) -> None:
    loaded = load_checkpoint(save_wrapper(tmp_path, name))
    slots = {pool.name: 64 for pool in spec_from_model(loaded.model).owners}
    cache = CacheConfig(device_slots=slots, host_slots=slots, weight_version="test")
    prompt = loaded.tokenizer.encode(QUESTION)
    expected = as_text(loaded, uncached(loaded, prompt, 6))
    async with running(loaded, cache=cache) as served:
        for cached in (0, len(prompt) // 16 * 16):
            answer = await served.openai.completions.create(
                model=tmp_path.name,
                prompt=QUESTION,
                max_tokens=6,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.choices[0].text == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
        with pytest.raises(BadRequestError, match=r"image_url.*send text"):
            await served.openai.chat.completions.create(
                model=tmp_path.name,
                messages=[{"role": "user", "content": [IMAGE]}],
            )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in four files; unchanged by tests."""
    return save_checkpoint(tmp_path_factory.mktemp("whole"), max_shard_size="200KB")


Change = Callable[[Path], object]
SHARD, INDEX = "model-00002-of-00004.safetensors", "model.safetensors.index.json"


def written(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def config(**fields: object) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def cut(folder: Path) -> None:
    file = folder / SHARD
    file.write_bytes(file.read_bytes()[:-100])


def listed_short(folder: Path) -> None:
    """A weight that no file has, and no list either."""
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"]["lm_head.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != shard}
    (folder / INDEX).write_text(json.dumps(index))


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def with_token(*, special: bool) -> Change:
    """The tokenizer has a token that the model does not."""

    def change(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(AddedToken("<image>", special=special))
        tokenizer.save_pretrained(folder)

    return change


TEMPLATE = "chat_template.jinja"


def without_merges(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    del content["model"]["merges"]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / SHARD).unlink(), f"{INDEX}: 1 of 4 files are missing: {SHARD}"),
        (cut, f"{SHARD}: not whole"),
        (written(SHARD, "version https://git-lfs.github.com/spec/v1"), f"{SHARD}: not whole"),
        (lambda folder: (folder / INDEX).unlink(), "no weights"),
        (written(INDEX, "{"), f"{INDEX}: no JSON"),
        (written(INDEX, "{}"), f"{INDEX}: weight_map"),
        (listed_short, "weights are missing: lm_head.weight"),
        (written("config.json", "{"), "config.json: no JSON"),
        (written("config.json", "[]"), "config.json: no JSON object"),
        (config(model_type="t5"), "config.json: .*'t5'"),
        (config(model_type="nonesuch"), "config.json: model_type 'nonesuch'.*upgrade"),
        (config(model_type="nonesuch", auto_map={"AutoConfig": "a.B"}), "auto_map.*convert"),
        (config(num_hidden_layers=7), "config.json: .*num_hidden_layers"),
        (config(layer_types=["full_attention", "bogus"] * 2), "config.json: .*layer_type.*bogus"),
        (config(num_key_value_heads=3), r"k_proj.weight is \[48, 64\] by config.json, but \[32, 64\]"),
        (config(num_attention_heads=0), "config.json: .*zero"),
        (config(hidden_size="a"), "config.json: .*hidden_size"),
        (config(max_position_embeddings=-1), "config.json: max_position_embeddings is -1"),
        (config(dtype="float99"), "config.json: .*float99"),
        (written("generation_config.json", "{"), "generation_config.json: no JSON"),
        (
            written("generation_config.json", '{"eos_token_id": "x"}'),
            "generation_config.json: eos_token_id 'x'",
        ),
        (written("generation_config.json", '{"temperature": "hot"}'), "generation_config.json: .*hot"),
        (without_tokenizer, "no tokenizer.*--tokenizer bytes"),
        (written("tokenizer.json", "{}"), "its tokenizer cannot be loaded"),
        (without_merges, "its tokenizer cannot be loaded: .*merges"),
        (with_token(special=False), "tokenizer has ids up to 300, but vocab_size of config.json is 300"),
        (written(TEMPLATE, "a\n{% for %}"), f"{TEMPLATE}: line 2: .*--chat-template"),
        (written(TEMPLATE, "{{ raise_exception('never') }}"), f"{TEMPLATE}: .*never"),
        (written(TEMPLATE, "{# nothing #}"), f"{TEMPLATE}: .*nothing"),
        (written(TEMPLATE, ""), f"{TEMPLATE}: the chat template is empty"),
        (written(TEMPLATE, "{% for i in range(10**9) %}{% endfor %}"), f"{TEMPLATE}: .*Range too big"),
        (written(TEMPLATE, 4 * "{% for i in range(9**5) %}" + 4 * "{% endfor %}"), f"{TEMPLATE}: .*200,000"),
        (written(TEMPLATE, "{{ messages | length // 0 }}"), f"{TEMPLATE}: .*zero"),
        (written(TEMPLATE, "{{ 'x' * 10**10 }}"), f"{TEMPLATE}: .*one operation takes more than 256 MiB"),
        (written(TEMPLATE, "{{ 'x' | center(9**10) }}"), f"{TEMPLATE}: .*more than 256 MiB"),
        (written(TEMPLATE, "{{ 10 ** (10**9) }}"), f"{TEMPLATE}: .*more than 1 s"),
        (written(TEMPLATE, "{{ 'x' * 10**7 }}"), f"{TEMPLATE}: .*10,000,000 characters"),
    ],
)
def test_what_does_not_fit_together_is_refused_at_the_start(
    change: Change, words: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(load_checkpoint.__globals__, "_MOST_SECONDS", 1)
    folder = shutil.copytree(whole, tmp_path / "model")
    change(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        load_checkpoint(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 300
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        with_token(special=True),
        written(TEMPLATE, "{% if not tools %}{{ raise_exception('tools') }}{% endif %}hi"),
    ],
    ids=["a mark of images", "a template for tools"],
)
def test_what_only_some_prompts_meet_is_no_reason(change: Change, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    change(folder)
    load_checkpoint(folder)


def test_a_template_that_writes_a_token_of_another_vocabulary_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    with_token(special=True)(folder)
    (folder / TEMPLATE).write_text("<image>{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=r"token 300, but vocab_size of config\.json is 300"):
        load_checkpoint(folder)


def test_an_end_that_the_model_cannot_write_is_told_of_once(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    written("generation_config.json", '{"eos_token_id": [3, 999999, -1]}')(folder)
    loaded = load_checkpoint(folder)
    assert 3 in loaded.stop_ids
    assert loaded.stop_ids <= {*range(loaded.vocabulary)}
    (told,) = [record.getMessage() for record in caplog.records if "eos_token_id" in record.getMessage()]
    assert "-1, 999999" in told
