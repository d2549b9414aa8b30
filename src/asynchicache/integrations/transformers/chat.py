"""How much of a prompt the next turn of a chat repeats: templates end a prompt with an invitation to answer,
and some rewrite what came before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os.path import commonprefix
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.forward import vocabulary_of
from asynchicache.planner.hints import MAX_REPEATS

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""The text of messages; and whether an invitation to answer is to follow them."""

_NEAR = 400  # characters before a difference that decide on its tokens

UNFIT = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError),
    *(ArithmeticError, MemoryError),  # of numbers, of a range that is too long, of a text that is
)
"""What a template raises that refuses messages, or meets values of another type than it expects."""

_MOST_LINES = 200_000
"""Of its code that a template may run for a question at start. Real ones run some hundreds."""

_ANSWER = {"role": "assistant", "content": "Yes."}
_QUESTION = {"role": "user", "content": "Go on."}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TURNS: tuple[tuple[Mapping[str, Any], ...], ...] = (
    (_ANSWER, _QUESTION),
    ({**_ANSWER, "reasoning_content": "Is it?"}, _QUESTION),
)
_CALLED: tuple[Mapping[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "name": "look", "content": "It is."},
)
"""What may follow a question. How much of an invitation is repeated depends on it: text joins its last mark,
thoughts take the place of none. A call is followed by its result, and, one turn on, by a question."""


class LongTemplateError(TemplateRuntimeError):
    """A template runs for too long."""


@contextmanager
def bounded() -> Iterator[None]:
    """Stop templates that this thread renders, with `LongTemplateError`, when they have run for long: what
    bounds each loop does not bound loops in loops."""
    left = _MOST_LINES

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise LongTemplateError(f"it runs more than {_MOST_LINES:,} lines: loops in loops")
        return count

    def enter(frame: FrameType, event: str, _: object) -> Any:
        return count if frame.f_code.co_filename == "<template>" else None  # as Jinja names what it compiles

    before = sys.gettrace()
    sys.settrace(enter)  # what a trace function raises ends tracing: one rendering for each `bounded`
    try:
        yield
    finally:
        sys.settrace(before)


def repeated_lengths(
    prompt: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    render: Render,
    encode: Callable[[str], list[int]],
    *,
    tools: bool = False,
) -> tuple[int, ...]:
    """Return the lengths up to which later prompts of a conversation repeat this one, ascending.

    They are for an answer and a new question, with and without thoughts; for a call of a tool, and the
    question after it; and, beyond the first, for what continues the last message. Empty if it is not known.

    Args:
        prompt: the encoded messages, with the invitation to answer.
        messages: of the conversation.
        render, encode: as they made the prompt.
        tools: whether a call of a tool may follow.
    """
    text = render(messages, True)

    def repeated(later: Sequence[Mapping[str, Any]], *, invited: bool = True) -> int:
        try:
            return _common(prompt, text, render(later, invited), encode)
        except UNFIT:  # it may want a tool's result first, or other roles in turn
            return 0

    answered = bool(messages) and messages[-1].get("role") == "assistant"
    turns = ((_QUESTION,),) if answered else (*_TURNS, _CALLED, (*_CALLED, *_TURNS[0])) if tools else _TURNS
    first, *others = (repeated((*messages, *turn)) for turn in turns)
    continued = repeated(messages, invited=False)
    lengths = (first, continued if continued >= first else 0, *others)
    found = dict.fromkeys(length for length in lengths if length)
    return tuple(sorted(list(found)[:MAX_REPEATS]))


def _common(prompt: Sequence[int], text: str, other: str, encode: Callable[[str], list[int]]) -> int:
    """How many tokens of the prompt `text` another text begins with. What is far before the first difference
    is encoded alike, and not again."""
    start = max(len(commonprefix([text, other])) - _NEAR, 0)  # noqa: RUF071  # no paths
    end = encode(text[start:])
    if (
        list(prompt[len(prompt) - len(end) :]) != end
    ):  # tokens that join there, or begin a text in another way
        start, end = 0, list(prompt)
    pairs = enumerate(zip(end, encode(other[start:]), strict=False))
    same = next((at for at, (one, two) in pairs if one != two), None)
    return len(prompt) if same is None else len(prompt) - len(end) + same


def highest_beyond(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> int:
    """The highest token id of text that a model of so many ids does not have; 0 if there is none. Special
    tokens may lie beyond, such as that of an image in a model for text: only a prompt that writes them out
    has them."""
    special = {*tokenizer.all_special_ids}
    special |= {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    beyond = (token for token in tokenizer.get_vocab().values() if token >= vocabulary)
    return max((token for token in beyond if token not in special), default=0)


class Invitations:
    """Recognises the end of a prompt that a chat template made, by its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: has the chat template; without one, no end is recognised.

        Raises:
            ConfigError: the template is none.
        """
        self._ends = {end for end in _endings(tokenizer) if end} if tokenizer.chat_template else set()

    def repeated(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """As `repeated_lengths`, as far as the end of the prompt says."""
        lengths = (len(prompt) - len(end) for end in self._ends if tuple(prompt[-len(end) :]) == end)
        return tuple(sorted(length for length in lengths if length > 0)[:MAX_REPEATS])


def invitations_of(tokenizer: PreTrainedTokenizerBase | None, model: PreTrainedModel) -> Invitations | None:
    """
    Raises:
        ConfigError: the tokenizer is of another model, or its chat template is none.
    """
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        cure = (
            "pass its `tokenizer`"
            if hasattr(tokenizer, "tokenizer")
            else "AutoTokenizer.from_pretrained(folder) reads one"
        )
        raise ConfigError(
            f"tokenizer {tokenizer!r:.200} is a {type(tokenizer).__name__}, and not one of transformers' "
            f"tokenizers: {cure}"
        )
    vocabulary = vocabulary_of(model)
    beyond = highest_beyond(tokenizer, vocabulary)
    if beyond:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has ids up to {beyond}, and the model's embeddings "
            f"are {vocabulary}: take tokenizer and weights from one checkpoint"
        )
    return Invitations(tokenizer)


_SWITCHES: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Variables that change a template's invitation."""


def _endings(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, ...]]:
    question = [{"role": "user", "content": "Is it?"}]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for variables in _SWITCHES:

        def render(
            messages: Sequence[Mapping[str, Any]], invited: bool, variables: Mapping[str, Any] = variables
        ) -> str:
            with bounded():
                text = tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=invited, **variables
                )
            return str(text)

        try:
            prompt = encode(render(question, True))
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of tokenizer {tokenizer.name_or_path!r}, line {error.lineno}: {error}: "
                "mend it, or set tokenizer.chat_template"
            ) from error
        except LongTemplateError as error:
            raise ConfigError(
                f"the chat template of tokenizer {tokenizer.name_or_path!r}: {error}: mend it, or set "
                "tokenizer.chat_template"
            ) from error
        except UNFIT:
            continue
        for length in repeated_lengths(prompt, question, render, encode, tools=True):
            yield tuple(prompt[length:])
