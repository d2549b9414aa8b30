"""Adapters and weights that change under a cache: nobody is served what others computed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path

import msgspec
import peft
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from asynchicache import CacheConfig, MissReason, PrefixCachedModel, UsageError
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.generate import prefix_cached
from asynchicache.integrations.transformers.generation import Generation
from integrations.zoo import PAGE, random_tokens, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter name:UserWarning"),
]

PROMPT = random_tokens(4 * PAGE + 3)
IDS = torch.tensor([PROMPT])
NEW = 8
CONFIG = CacheConfig(device_slots={"kv": 32})


def base() -> LlamaForCausalLM:
    return copy.deepcopy(tiny_model("llama"))


def lora(model: nn.Module, name: str, seed: int) -> nn.Module:
    """Add a random adapter: by the model's own mixin, or to a wrapper."""
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(seed)
    if isinstance(model, PreTrainedModel):
        model.add_adapter(config, adapter_name=name)
    else:
        model.add_adapter(name, config)
    return model.eval()


def wrapped() -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["k_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    return lora(peft.get_peft_model(base(), config, adapter_name="a"), "b", 6)


def mixed_in() -> nn.Module:
    return lora(lora(base(), "a", 5), "b", 6)


MODELS = {"mixed in": mixed_in, "wrapped": wrapped}


def plain(model: nn.Module) -> list[int]:
    output = model.generate(
        input_ids=IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
    )
    return output[0].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_generate_with_one_adapter_and_then_another(kind: str) -> None:
    model = MODELS[kind]()
    with prefix_cached(model, config=CONFIG, page_size=PAGE) as cached:
        answers, hits = {}, []
        for name in ("a", "b", "a", "b"):
            model.set_adapter(name)
            found = cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0].tolist()
            assert found == plain(model)
            answers[name] = found
            hits.append(cached.hit.tokens)
        assert answers["a"] != answers["b"]
        assert hits == [0, 0, 4 * PAGE, 4 * PAGE]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", MODELS)
async def test_requests_with_one_adapter_and_then_another(kind: str) -> None:
    model = MODELS[kind]()
    async with PrefixCachedModel.open(model, config=CONFIG, page_size=PAGE) as served:
        hits = []
        for name in ("a", "b", "a"):
            model.set_adapter(name)
            answer = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
            assert [*PROMPT, *[token async for token in answer]] == plain(model)
            hits.append(answer.cached_tokens)
        assert hits == [0, 0, 4 * PAGE]


@pytest.mark.asyncio
async def test_an_adapter_chosen_while_a_request_is_served() -> None:
    """What was computed with two adapters is of no use for either."""
    model = mixed_in()
    model.set_adapter("a")
    async with PrefixCachedModel.open(model, config=CONFIG, page_size=PAGE) as served:
        waiting = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
        model.set_adapter("b")  # before its turn
        assert [*PROMPT, *[token async for token in waiting]] == plain(model)
        assert waiting.miss_reason is MissReason.WEIGHTS
        changed = served.generate(PROMPT, max_new_tokens=4 * NEW, stop_token_ids=())
        async for _ in changed:
            model.set_adapter("a")
        whole = [*PROMPT, *changed.token_ids]
        for name in ("a", "b"):
            model.set_adapter(name)
            after = served.generate(whole, max_new_tokens=1, stop_token_ids=())
            assert [token async for token in after]
            assert after.cached_tokens <= len(PROMPT) // PAGE * PAGE  # of its prefill alone
            again = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
            assert [*PROMPT, *[token async for token in again]] == plain(model)


def factor(model: PreTrainedModel) -> None:
    for layer in model.modules():
        if hasattr(layer, "merged_adapters"):
            layer.scaling["a"] *= 3


def retrain(model: PreTrainedModel) -> None:
    torch.manual_seed(9)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".a." in name:
                weight.copy_(torch.randn_like(weight) / 4)


def merge(model: PreTrainedModel) -> None:
    for layer in model.modules():
        if hasattr(layer, "merged_adapters"):
            layer.merge(adapter_names=["a"])


def step(model: PreTrainedModel) -> None:
    with torch.enable_grad():
        weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=50.0)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


def scale_data(model: PreTrainedModel) -> None:
    """As PEFT merges, and trainers of policies copy weights: no version counter sees it."""
    for weight in model.model.layers[1].parameters():
        weight.data.mul_(1.5)


def swap_data(model: PreTrainedModel) -> None:
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.flip(0)


def swap_module(model: PreTrainedModel) -> None:
    old = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = nn.Linear(old.in_features, old.out_features, bias=False)


def load(model: PreTrainedModel) -> None:
    other = {name: weight * 1.5 for name, weight in model.state_dict().items()}
    model.load_state_dict(other)


def steer(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, output: output * 1.5)


def steer_before(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda module, given: (given[0] * -1.5, *given[1:]))


def replace_forward(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    computed = mlp.forward
    mlp.forward = lambda given: -3 * computed(given)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "an adapter's factor": factor,
    "an adapter's weights": retrain,
    "no adapter": lambda model: model.disable_adapters(),
    "two adapters": lambda model: lora(model, "c", 11) and model.set_adapter(["a", "c"]),
    "merged": merge,
    "a step of training": step,
    "in place": scale_data,
    "other memory": swap_data,
    "another module": swap_module,
    "another checkpoint": load,
    "a hook": steer,
    "a hook before": steer_before,
    "another method": replace_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    model = lora(base(), "a", 5)
    with prefix_cached(model, config=CONFIG, page_size=PAGE) as cached:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        before = cached.generate(IDS, **options)[0].tolist()
        CHANGES[change](model)
        after = cached.generate(IDS, **options)[0].tolist()
        assert cached.hit.tokens == 0
        assert after == plain(model)
        assert (before != after) == (change != "merged")
        assert cached.generate(IDS, **options)[0].tolist() == after
        assert cached.hit.tokens == 4 * PAGE


@pytest.mark.parametrize("seed", [5, 6])
def test_an_adapter_is_known_by_its_content_across_restarts(seed: int, tmp_path: Path) -> None:
    """An adapter trained again has the name of the old one, and storage outlives both."""
    config = CacheConfig(
        device_slots={"kv": 32}, storage="file", storage_options={"path": tmp_path}, weight_version="base"
    )
    for one, expected in ((5, 0), (seed, 4 * PAGE if seed == 5 else 0)):
        model = lora(base(), "a", one)
        with prefix_cached(model, config=config, page_size=PAGE) as cached:
            found = cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0].tolist()
            assert found == plain(model)
            assert cached.hit.tokens == expected


def test_weights_that_changed_are_not_those_of_the_next_process(tmp_path: Path) -> None:
    """Storage is of one weight version: what was computed after a change is not found there as that."""
    config = CacheConfig(
        device_slots={"kv": 32}, storage="file", storage_options={"path": tmp_path}, weight_version="base"
    )
    for change in (scale_data, lambda model: None):
        model = base()
        with prefix_cached(model, config=config, page_size=PAGE) as cached:
            change(model)
            found = cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0].tolist()
            assert (found, cached.hit.tokens) == (plain(model), 0)


INVOKED = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM")


@pytest.mark.asyncio
async def test_weights_that_are_named_when_they_change_are_found_by_the_next_process(tmp_path: Path) -> None:
    storage = {"storage": "file", "storage_options": {"path": tmp_path}}
    model, hits = base(), []
    for version in ("v1", "v2"):
        config = CacheConfig(device_slots={"kv": 32}, weight_version=version, **storage)
        async with PrefixCachedModel.open(model, config=config, page_size=PAGE) as served:
            if version == "v1":
                scale_data(model)
                await served.cache.update_weights("v2")
            answer = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
            assert [*PROMPT, *[token async for token in answer]] == plain(model)
            hits.append(answer.cached_tokens)
    assert hits == [0, 4 * PAGE]


def prompt_tuned() -> nn.Module:
    return peft.get_peft_model(
        base(),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, tokenizer_name_or_path=""),
    ).eval()


def invoked() -> nn.Module:
    return peft.get_peft_model(base(), INVOKED).eval()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (prompt_tuned, "adapter 'default' is PROMPT_TUNING"),
        (invoked, "is LORA with invocation tokens"),
        (lambda: nn.Linear(2, 2), "a Linear is no model of transformers"),
    ],
)
def test_adapters_that_are_more_than_weights(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words), prefix_cached(make(), config=CONFIG, page_size=PAGE):
        pass


def test_an_adapter_that_is_more_than_weights_added_later() -> None:
    model = base()
    with prefix_cached(model, config=CONFIG, page_size=PAGE) as cached:
        model.add_adapter(INVOKED, "late")
        with pytest.raises(UsageError, match="adapter 'late' is LORA with invocation tokens"):
            cached.generate(IDS, max_new_tokens=2)


# Weights that are named.


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(1.25)


def named(version: str) -> CacheConfig:
    return msgspec.structs.replace(CONFIG, weight_version=version)


async def told(generation: Generation) -> list[int]:
    async for _ in generation:
        pass
    return PROMPT + generation.token_ids


@pytest.mark.asyncio
@pytest.mark.parametrize("changes", ["by the call", "before the call"])
async def test_requests_end_before_weights_change_and_go_on_with_the_new_ones(changes: str) -> None:
    model, store = base(), MemoryStore()
    expected = [plain(model)]
    perturb(other := base())
    expected.append(plain(other))
    assert expected[0] != expected[1]
    async with PrefixCachedModel.open(
        model, config=named("1"), page_size=PAGE, storage=MemoryBackend(store)
    ) as served:
        running = [served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=()) for _ in range(2)]
        await anext(aiter(running[0]))
        if changes == "before the call":
            await served.drain()
            perturb(model)
        updating = asyncio.ensure_future(
            served.update_weights("2", (lambda: perturb(model)) if changes == "by the call" else None)
        )
        await asyncio.sleep(0)
        late = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
        await updating
        found = [await told(one) for one in (*running, late)]
        assert found == [expected[0], expected[0], expected[1]]
        assert late.cached_tokens == 0
        await told(served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=()))
        await served.drain()
    async with PrefixCachedModel.open(
        other, config=named("2"), page_size=PAGE, storage=MemoryBackend(store)
    ) as served:
        again = served.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=())
        assert await told(again) == expected[1]
        assert again.cached_tokens == 4 * PAGE


def test_a_cached_generate_is_told_the_name_of_its_weights() -> None:
    model, store = base(), MemoryStore()
    with prefix_cached(model, config=named("1"), page_size=PAGE, storage=MemoryBackend(store)) as cached:
        cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        perturb(model)
        cached.update_weights("2")
        cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        assert cached.hit.tokens == 0
    with prefix_cached(model, config=named("2"), page_size=PAGE, storage=MemoryBackend(store)) as cached:
        found = cached.generate(IDS, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0].tolist()
        assert (found, cached.hit.tokens) == (plain(model), 4 * PAGE)
