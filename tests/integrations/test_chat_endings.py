"""States stand where the next turn of a chat begins, whatever its template does with the end of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from asynchicache import CacheConfig, PrefixCachedModel, prefix_cached
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.tokenizers import CheckpointTokenizer, Conversation
from asynchicache.integrations.transformers.chat import Invitations, repeated_lengths
from asynchicache.planner.hints import MAX_REPEATS
from integrations.serve.checkpoints import bpe_tokenizer
from integrations.zoo import PAGE, tiny_config, tiny_model

_PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TEMPLATES = {
    "repeats all": _PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "begins to think": _PLAIN + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}",
    "does not think": _PLAIN
    + "{% if add_generation_prompt %}<assistant>{% if not enable_thinking %}<think>\n</think>\n{% endif %}"
    "{% endif %}",
    "always invites": _PLAIN + "<assistant><think>",
    "reminds in the last message": "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if loop.last %} Be brief.{% endif %}</s>{% endfor %}<assistant>",
    "tools in the last question": "{% for m in messages %}{% if loop.last %}[TOOLS]{{ tools }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "shows thoughts and calls": "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}{% elif m.tool_calls %}a{{ m.tool_calls }}{% endif %}{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant></think>{% endif %}",
    "shows the thoughts of this turn": "{% set at = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.index0 > at.last %}<think>"
    "{% endif %}{% if m.tool_calls %}<call>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}",
    "refuses two questions": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}",
}


def text_of(template: str, messages: Sequence[Mapping[str, Any]], invited: bool, **variables: Any) -> str:
    return str(
        bpe_tokenizer().apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=invited, **variables
        )
    )


def render(template: str, messages: Sequence[Mapping[str, Any]], invited: bool) -> list[int]:
    return encoded(text_of(template, messages, invited))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CALL = {"id": "call01234", "type": "function", "function": {"name": "page", "arguments": {"of": "what"}}}
CALLED = [
    {**answer(""), "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call01234", "content": "7"},
]
LATER = {
    "answer": [answer("Of pages."), user("And then?")],
    "thoughts": [{**answer("Of pages."), "reasoning_content": "Pages, then."}, user("And then?")],
    "call": CALLED,
    "call, then a question": [*CALLED, answer("Of pages."), user("And then?")],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_next_turn_repeats_is_foretold(name: str) -> None:
    """Also of long conversations, of which only the end is encoded again."""
    encode = partial(render, TEMPLATES[name], invited=True)
    for first in ("What is a cache?", "Be brief. " * 100):
        messages = [user(first), answer("A memory."), user("Of what?")]
        prompt = encode(messages)
        found = repeated_lengths(prompt, messages, partial(text_of, TEMPLATES[name]), encoded, tools=True)
        assert len(found) <= MAX_REPEATS
        for kind, turns in LATER.items():
            if name != "refuses two questions" or "call" not in kind:
                assert common(prompt, encode([*messages, *turns])) in found, kind


def test_a_conversation_in_a_server_has_tools_and_variables() -> None:
    tokenizer = CheckpointTokenizer(bpe_tokenizer(), TEMPLATES["does not think"])
    messages = [user("Why?")]
    for thinks in (False, True):
        talk = Conversation(messages, variables={"enable_thinking": thinks})
        prompt = tokenizer.encode_chat(talk)
        unlike = "" if thinks else "<think>\n</think>\n"
        assert tokenizer.repeated(talk, prompt)[0] == len(prompt) - len(encoded(unlike))


def encoded(text: str) -> list[int]:
    return list(bpe_tokenizer()(text, add_special_tokens=False)["input_ids"])


def with_template(name: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer, eos_token="</s>")
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def test_a_template_of_loops_in_loops_is_refused() -> None:
    tokenizer = with_template("begins to think")
    tokenizer.chat_template = 4 * "{% for number in range(9**5) %}" + 4 * "{% endfor %}"
    with pytest.raises(ConfigError, match=r"template of tokenizer .* more than 200,000 lines.*: mend it"):
        Invitations(tokenizer)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["begins to think", "does not think"])
async def test_no_turn_loses_its_state(name: str) -> None:
    """A hybrid model, prompts of every length modulo a page, and an answer of which the next turn keeps the
    words alone. The tokenizer's own template says where a prompt's invitation begins."""
    tokenizer = with_template(name)
    sizes = tiny_config("qwen3_5")
    sizes.vocab_size = len(tokenizer)
    model, config = Qwen3_5ForCausalLM(sizes).eval(), CacheConfig(device_slots={"kv": 256, "mamba": 128})
    encode = partial(render, TEMPLATES[name], invited=True)
    async with PrefixCachedModel.open(model, page_size=PAGE, tokenizer=tokenizer, config=config) as served:
        for extra in range(PAGE):
            messages = [user(f"{extra}" * (40 + extra))]
            first = encode(messages)
            second = encode([*messages, answer("yes"), user("go on")])
            for prompt, cached in ((first, None), (second, common(first, second) // PAGE * PAGE)):
                answered = served.generate(prompt, max_new_tokens=2, stop_token_ids=())
                assert len([token async for token in answered]) == 2
                assert cached is None or answered.cached_tokens == cached, extra


def test_a_blocking_generate_keeps_the_state_there_too() -> None:
    model, tokenizer = tiny_model("qwen3_5"), with_template("begins to think")
    vocabulary = model.get_input_embeddings().num_embeddings
    ending = [one % vocabulary for one in encoded("<think>\n")]
    repeated = [index % 40 + 1 for index in range(3 * PAGE)]
    with prefix_cached(
        model, page_size=PAGE, config=CacheConfig(device_slots={"kv": 64, "mamba": 16})
    ) as cached:
        cached._invitations = Invitations(tokenizer)
        cached._invitations._ends = {tuple(ending)}
        cached.generate(torch.tensor([[*repeated, *ending]]), max_new_tokens=2)
        cached.generate(torch.tensor([[*repeated, 7, 8, 9]]), max_new_tokens=2)
        assert cached.hit.tokens == len(repeated)


def test_an_ending_is_recognised_by_its_tokens() -> None:
    known = Invitations(with_template("does not think"))
    prompt = render(TEMPLATES["does not think"], [user("x")], True)
    assert known.repeated(prompt) == (len(prompt) - len(encoded("<think>\n</think>\n")),)
    assert known.repeated(prompt[:-1]) == ()
    assert Invitations(bpe_tokenizer()).repeated(prompt) == (), "it has no template"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "vocabulary", "words"),
    [
        ("a\n{% for %}", 300, r"chat template of tokenizer '.*', line 2: .*tokenizer\.chat_template"),
        (TEMPLATES["repeats all"], 256, r"ids up to 299, and the model's embeddings are 256: take"),
    ],
)
async def test_a_tokenizer_that_does_not_fit_is_refused_at_the_start(
    template: str, vocabulary: int, words: str
) -> None:
    tokenizer, sizes = with_template("repeats all"), tiny_config("qwen3_5")
    tokenizer.chat_template, sizes.vocab_size = template, vocabulary
    model = Qwen3_5ForCausalLM(sizes).eval()
    config = CacheConfig(device_slots={"kv": 8, "mamba": 4})
    with pytest.raises(ConfigError, match=words):
        await PrefixCachedModel.open(model, page_size=PAGE, tokenizer=tokenizer, config=config)
    with (
        pytest.raises(ConfigError, match=words),
        prefix_cached(model, page_size=PAGE, tokenizer=tokenizer, config=config),
    ):
        pass
