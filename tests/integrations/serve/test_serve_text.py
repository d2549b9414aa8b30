"""Text that comes token by token is the text of all tokens, and nothing of it is shown too early."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AddedToken, PreTrainedTokenizerBase

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.loading import load_checkpoint
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.stops import StopStrings
from asynchicache.integrations.serve.tokenizers import (
    ByteTokenizer,
    CheckpointTokenizer,
    Conversation,
    Tokenizer,
)
from integrations.serve.checkpoints import CHAT_TEMPLATE, bpe_tokenizer, save_checkpoint

BYTES = ByteTokenizer(512)
TEXT = "naïve café, 東京 🙂‍↔️ and e\u0301\n"


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, 511)))
def test_any_byte_tokens_come_back_from_their_text(tokens: list[int]) -> None:
    text = "".join(pieces(BYTES, tokens))
    assert BYTES.encode(text) == tokens
    text.encode()  # no half surrogates: it can be sent as JSON


@given(st.lists(st.sampled_from([0xF3, 0xB0, 0x80, 0x81, 0xE2, 0x82, 0xAC, 0x41, 300])))
def test_broken_and_private_characters_come_back_too(tokens: list[int]) -> None:
    assert BYTES.encode("".join(pieces(BYTES, tokens))) == tokens


def test_a_character_is_shown_when_it_is_whole() -> None:
    assert pieces(BYTES, list("aé🙂".encode())) == ["a", "", "é", "", "", "", "🙂", ""]


def test_half_a_character_is_shown_at_the_end_only() -> None:
    *early, late = pieces(BYTES, [0xF0, 0x9F])
    assert early == ["", ""]
    assert BYTES.encode(late) == [0xF0, 0x9F]


def test_a_chat_begins_like_the_one_before() -> None:
    turns = [{"role": "user", "content": "hi"}]
    first = BYTES.encode_chat(Conversation(turns))
    answer = [0xFF, 300, 65]
    text = "".join(pieces(BYTES, answer))
    turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert BYTES.encode_chat(Conversation(turns))[: len(first) + 3] == first + answer


def test_a_checkpoints_tokens_give_the_text_of_all_of_them(tmp_path: Path) -> None:
    raw = bpe_tokenizer()
    tokens = raw(TEXT)["input_ids"]
    assert len(tokens) > len(TEXT) / 3
    parts = pieces(CheckpointTokenizer(raw), tokens, tokens[:7])
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)


def test_what_is_no_text_is_shown_after_a_while() -> None:
    raw = bpe_tokenizer()
    broken = raw.convert_tokens_to_ids("ð")  # the first of the four bytes of a smiley
    parts = pieces(CheckpointTokenizer(raw), [broken] * 20)
    assert "".join(parts) == "\ufffd" * 20
    assert any(parts[:10])


def tokenizer_with_marks() -> PreTrainedTokenizerBase:
    """A tokenizer whose tool-call marks are special tokens, in two ways to say so."""
    tokenizer = copy.deepcopy(bpe_tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]", "<|end|>"]})
    tokenizer.add_tokens(AddedToken("[ARGS]", special=True))
    return tokenizer


def test_marks_that_are_special_tokens_are_shown_and_the_ends_of_texts_are_not() -> None:
    raw = tokenizer_with_marks()
    stops = frozenset({raw.convert_tokens_to_ids("<|end|>")})
    said = raw('<s>[TOOL_CALLS]price[ARGS]{"é": 1}</s><pad>[TOOL_CALLS]<|end|>')["input_ids"]
    parts = pieces(CheckpointTokenizer(raw, stop_ids=stops), said, said[:3])
    assert "".join(parts) == '[TOOL_CALLS]price[ARGS]{"é": 1}[TOOL_CALLS]'
    assert parts[:3] == ["", "[TOOL_CALLS]", "p"]


def test_the_space_that_begins_a_word_does_not_depend_on_marks_of_the_prompt() -> None:
    raw = tokenizer_with_marks()
    raw._tokenizer.decoder = decoders.Metaspace()
    raw.add_tokens(["▁yes", "▁no"])
    yes, no = raw.convert_tokens_to_ids(["▁yes", "▁no"])
    tokenizer = CheckpointTokenizer(raw)
    assert pieces(tokenizer, [yes, no], raw("</s>[ARGS]")["input_ids"]) == ["yes", " no", ""]
    assert pieces(tokenizer, [yes, no], [no]) == [" yes", " no", ""]


def test_a_template_is_used_and_its_refusal_is_told() -> None:
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}|{% endfor %}"
    tokenizer = CheckpointTokenizer(bpe_tokenizer(), template)
    tokens = tokenizer.encode_chat(Conversation([{"role": "user", "content": "hi"}]))
    assert "".join(pieces(tokenizer, tokens)) == "hi|"
    with pytest.raises(ApiError, match="no system"):
        tokenizer.encode_chat(Conversation([{"role": "system", "content": "be"}]))


def test_a_template_gets_tools_and_variables() -> None:
    template = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ mood }}|{{ messages[0].tool_calls }}"
    tokenizer = CheckpointTokenizer(bpe_tokenizer(), template)
    message = {"role": "assistant", "content": "", "tool_calls": [1]}
    tools = [{"type": "function", "function": {"name": "look"}}]
    tokens = tokenizer.encode_chat(Conversation([message], tools, {"mood": "calm"}))

    assert "".join(pieces(tokenizer, tokens)) == "look calm|[1]"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "tools", "messages"])
def test_a_template_variable_cannot_be_what_the_server_sets(name: str) -> None:
    chat = Conversation([{"role": "user", "content": "hi"}], variables={name: False})
    with pytest.raises(ApiError, match=f"chat_template_kwargs.{name} is set by the server"):
        CheckpointTokenizer(bpe_tokenizer(), CHAT_TEMPLATE).encode_chat(chat)


def test_values_that_a_template_cannot_use_are_the_clients_fault() -> None:
    template = "{{ tools[0].function.name + 'x' }}"
    chat = Conversation([{"role": "user", "content": "hi"}], tools=[{"function": {"name": 5}}])
    with pytest.raises(ApiError, match="template refuses"):
        CheckpointTokenizer(bpe_tokenizer(), template).encode_chat(chat)


def test_tools_come_first_where_there_is_no_template() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [1]}
    text = BYTES.encode_chat(Conversation([call], [{"a": 1}]))
    assert bytes(text).decode() == '<|tools|>\n[{"a": 1}]\n<|assistant|>\n\n[1]\n<|assistant|>\n'


def test_without_a_template_chats_are_refused() -> None:
    with pytest.raises(ApiError, match="--chat-template"):
        CheckpointTokenizer(bpe_tokenizer()).encode_chat(Conversation([{"role": "user", "content": "hi"}]))


@given(st.text("ab|", max_size=30), st.lists(st.text("ab|", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_cut_where_the_first_begins(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    matcher = StopStrings(stops)
    bounds = [0, *cuts, len(text)]
    shown = "".join(matcher.push(text[a:b]) for a, b in pairwise(bounds)) + matcher.finish()

    # In what order pieces come decides which of two stops is seen first; it is one of the earliest ends.
    ends = {stop: at + len(stop) for stop in stops if (at := text.find(stop)) >= 0}
    assert matcher.found == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(stop, len(shown)) for stop in stops)


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    matcher = StopStrings(["STOP", "ST!"])
    assert [matcher.push(part) for part in ("aS", "T", "Ab", "S", "T!", "more")] == [
        "a",
        "",
        "STAb",
        "",
        "",
        "",
    ]
    assert matcher.found
    assert matcher.finish() == ""


def test_vocabularies_that_characters_cannot_name_are_refused(tmp_path: Path) -> None:
    assert len(ByteTokenizer(ByteTokenizer.MAX_VOCABULARY).encode(chr(sys.maxunicode))) == 1

    save_checkpoint(tmp_path, vocabulary=ByteTokenizer.MAX_VOCABULARY + 1)
    with pytest.raises(ConfigError, match="131073"):
        load_checkpoint(tmp_path, as_bytes=True)


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    tokenizer = bpe_tokenizer()
    lengths: list[int] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: Sequence[int], **options: Any) -> Any:
            lengths.append(len(tokens))
            return tokenizer.decode(tokens, **options)

    said = [
        *tokenizer("a cache")["input_ids"],
        *[tokenizer.eos_token_id] * 100,
        *tokenizer(" keeps")["input_ids"],
    ]
    assert "".join(pieces(CheckpointTokenizer(Counted()), said)) == "a cache keeps"
    assert max(lengths) < 20
