"""Tokenizers with incremental decoding: a checkpoint's own, or one token per byte."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple, Protocol

from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.transformers.chat import UNFIT, repeated_lengths


class Conversation(NamedTuple):
    """What a chat template takes.

    Attributes:
        messages: each with `role` and `content`, and what else it has for the template.
        tools: descriptions of functions, as OpenAI's clients send them.
        variables: more variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}


_REPLACEMENT = "\ufffd"
_BY_ID = "token_id:"
_CONTEXT = 5  # prompt tokens decoded with the first answer tokens: they decide on a leading space
_FRAME = ("bos", "eos", "pad", "cls", "sep")
_LONGEST = 8  # most tokens of one character; a longer sequence without text never becomes text


class Detokenizer(Protocol):
    """Decodes the tokens of one answer as they arrive."""

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty within a character."""
        ...

    def finish(self) -> str:
        """Return the remaining text when the answer ends."""
        ...


class Tokenizer(Protocol):
    """The tokenizer interface of the server. Called from one thread at a time."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Encode a conversation and the beginning of the assistant's next turn.

        Raises:
            ApiError: the template refuses the conversation, or there is no template.
        """
        ...

    def repeated(self, conversation: Conversation, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths up to which later prompts of the conversation repeat its encoded `prompt`; none
        if it is not known."""
        ...

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for an answer to `prompt`."""
        ...

    def token_text(self, token: int) -> str:
        """Return the text of one token; `token_id:` and its id if it is a part of a character."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, for models without a tokenizer.

    Decoding and encoding round-trip: a conversation that a client sends back has the tokens that the model
    saw, even if random weights generated them. Bytes that are not valid UTF-8, and tokens above 255, become
    private-use characters: U+F0000 plus the token's id.

    Args:
        vocabulary: number of token ids of the model, 256 to `MAX_VOCABULARY`.
    """

    _ESCAPES = 0xF0000
    MAX_VOCABULARY = sys.maxunicode + 1 - _ESCAPES

    def __init__(self, vocabulary: int) -> None:
        self._escaped = re.compile(f"[{chr(self._ESCAPES)}-{chr(self._ESCAPES + vocabulary - 1)}]")

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        start = 0
        for escape in self._escaped.finditer(text):
            tokens += text[start : escape.start()].encode()
            tokens.append(ord(escape[0]) - self._ESCAPES)
            start = escape.end()
        return tokens + list(text[start:].encode())

    def encode_chat(self, conversation: Conversation) -> list[int]:
        turns = [_plain_turn(message) for message in conversation.messages]
        tools = [f"<|tools|>\n{json.dumps(conversation.tools)}\n"] if conversation.tools else []
        return self.encode("".join([*tools, *turns]) + "<|assistant|>\n")

    def repeated(self, conversation: Conversation, prompt: Sequence[int]) -> tuple[int, ...]:
        return ()

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return _ByteDetokenizer(self._ESCAPES, self._escaped)

    def token_text(self, token: int) -> str:
        return chr(token) if token < 0x80 else f"{_BY_ID}{token}"


def _plain_turn(message: Mapping[str, Any]) -> str:
    calls = f"{json.dumps(message['tool_calls'])}\n" if message.get("tool_calls") else ""
    return f"<|{message['role']}|>\n{message['content']}\n{calls}"


class _ByteDetokenizer:
    def __init__(self, escapes: int, escaped: re.Pattern[str]) -> None:
        self._escapes = escapes
        self._escaped = escaped
        self._pending = bytearray()  # bytes of an incomplete character

    def push(self, token: int) -> str:
        if token > 0xFF:
            return self.finish() + chr(self._escapes + token)
        self._pending.append(token)
        text = ""
        while self._pending:
            try:
                text += self._decoded()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += self._escape(self._pending[:1])
                del self._pending[0]
        return text

    def finish(self) -> str:
        text = self._escape(self._pending)
        self._pending.clear()
        return text

    def _decoded(self) -> str:
        text = self._pending.decode()
        # The model wrote a private-use character byte by byte: encoding must not turn it into one token.
        text = self._escape(self._pending) if self._escaped.search(text) else text
        self._pending.clear()
        return text

    def _escape(self, data: bytearray) -> str:
        return "".join(chr(self._escapes + byte) for byte in data)


class CheckpointTokenizer:
    """A checkpoint's tokenizer.

    Args:
        tokenizer: a transformers `PreTrainedTokenizerBase`.
        template: a Jinja chat template that replaces the tokenizer's own.
        stop_ids: tokens that end a text. Answers show no text of them, nor of the tokenizer's tokens that
            begin, end, separate or pad a text; but that of all other special tokens, such as the marks of
            tool calls.
    """

    def __init__(
        self, tokenizer: Any, template: str | None = None, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._hidden = stop_ids | {getattr(tokenizer, f"{name}_token_id") for name in _FRAME}
        self._texts: dict[int, str] = {}
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(token for token, one in added if one.special)}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, conversation: Conversation) -> list[int]:
        return self.encode_rendered(self.render(conversation))

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation and the beginning of the assistant's next turn.

        Raises:
            ApiError: as `encode_chat` does.
        """
        if not (self._template or self._tokenizer.chat_template):
            raise ApiError(
                "this model's tokenizer has no chat template: use /v1/completions, "
                "or start the server with --chat-template FILE",
                param="messages",
            )
        # What the method itself takes is no variable of the template.
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters
        for name in conversation.variables.keys() & {*taken, "messages", "add_generation_prompt"}:
            raise ApiError(
                f"chat_template_kwargs.{name} is set by the server: leave it out",
                param="chat_template_kwargs",
            )
        try:
            return self._render(conversation, conversation.messages, True)
        except UNFIT as error:
            rule = "the model's chat template refuses these messages"
            raise ApiError(f"{rule}: {error}", param="messages", rule=rule) from error

    def repeated(self, conversation: Conversation, prompt: Sequence[int]) -> tuple[int, ...]:
        render = partial(self._render, conversation)
        tools = bool(conversation.tools)
        return repeated_lengths(prompt, conversation.messages, render, self.encode_rendered, tools=tools)

    def for_guidance(self, vocabulary: int, stop_ids: Set[int]) -> Any:
        """Return the `LLTokenizer` of llguidance.

        Raises:
            ValueError: llguidance cannot read this tokenizer.
        """
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=vocabulary, eos_token=sorted(stop_ids) or None)

    def _render(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], invited: bool
    ) -> str:
        """The text of messages with the conversation's tools and variables; `invited`: to be answered."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(conversation.tools) or None,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=invited,
            **conversation.variables,
        )
        return text

    def encode_rendered(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has them

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        context = [token for token in prompt[-_CONTEXT:] if token not in self._special]
        return _SlidingDetokenizer(self._tokenizer, context, self._hidden)

    def token_text(self, token: int) -> str:
        if token not in self._texts:
            # The second of two, because decoding drops a space before the first.
            alone, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
            text = twice[len(alone) :]
            self._texts[token] = text if text and _REPLACEMENT not in text else f"{_BY_ID}{token}"
        return self._texts[token]


class _SlidingDetokenizer:
    """Decodes the last tokens with and without the new one; the difference is the new text.

    A token's text depends on its neighbours, so tokens cannot be decoded one by one. Follows `decode_token`
    of Hugging Face's text-generation-inference.

    `tokenizers.decoders.DecodeStream` is unsuitable: it never emits bytes that are not valid UTF-8, decodes
    all pending bytes again with every token, and drops the rest at the end of an answer.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int], hidden: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens = list(context)
        self._start, self._read = 0, len(context)

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        text = self._unread()
        unread = len(self._tokens) - self._read
        if not text and unread >= _LONGEST:  # such as a long run of ids that the tokenizer does not know
            del self._tokens[self._read :]
        if not text or (text.endswith(_REPLACEMENT) and unread < _LONGEST):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text

    def finish(self) -> str:
        text = self._unread()
        self._start = self._read = len(self._tokens)
        return text

    def _unread(self) -> str:
        known = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(known) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
