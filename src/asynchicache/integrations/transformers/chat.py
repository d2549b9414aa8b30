"""How much of a prompt the next turn of a chat repeats: templates end a prompt with an invitation to answer,
and some rewrite what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Render = Callable[[Sequence[Mapping[str, Any]], bool], list[int]]
"""Encodes messages; and whether an invitation to answer is to follow them."""

UNFIT = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a template raises that refuses messages, or meets values of another type than it expects."""

_TURN = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."})


def repeated_lengths(
    prompt: Sequence[int], messages: Sequence[Mapping[str, Any]], render: Render
) -> tuple[int, ...]:
    """Return the lengths up to which later prompts of a conversation repeat this one, ascending.

    The first is for an answer and a new question; one beyond it, if any, for what continues the last message,
    such as further calls of tools. Empty if all is repeated, or it is not known.

    Args:
        prompt: the encoded messages, with the invitation to answer.
        messages: of the conversation.
        render: encodes other messages in the same way.
    """
    answered = bool(messages) and messages[-1].get("role") == "assistant"
    later = (*messages, *(_TURN[1:] if answered else _TURN))
    found = _repeated(prompt, render, later, True), _repeated(prompt, render, messages, False)
    lengths = sorted({length for length in found if length and length >= found[0]})
    return () if lengths == [len(prompt)] else tuple(lengths)


def _repeated(
    prompt: Sequence[int], render: Render, messages: Sequence[Mapping[str, Any]], invited: bool
) -> int:
    """How much of `prompt` other messages begin with; 0 if the template refuses them."""
    try:
        other = render(messages, invited)
    except UNFIT:  # it may want a tool's result first, or other roles in turn
        return 0
    pairs = enumerate(zip(prompt, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(prompt), len(other)))


class Invitations:
    """Recognises the end of a prompt that a chat template made, by its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer`: has the chat template; without one, no end is recognised."""
        self._ends = {end for end in _endings(tokenizer) if end} if tokenizer.chat_template else set()

    def repeated(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """As `repeated_lengths`, as far as the end of the prompt says."""
        lengths = (len(prompt) - len(end) for end in self._ends if tuple(prompt[-len(end) :]) == end)
        return tuple(sorted(length for length in lengths if length > 0))


_SWITCHES: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Variables that change a template's invitation."""


def _endings(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, ...]]:
    question = [{"role": "user", "content": "Is it?"}]
    for variables in _SWITCHES:

        def render(
            messages: Sequence[Mapping[str, Any]], invited: bool, variables: Mapping[str, Any] = variables
        ) -> list[int]:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=invited, **variables
            )
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        try:
            prompt = render(question, True)
        except UNFIT:
            continue
        lengths = repeated_lengths(prompt, question, render)
        if lengths:
            yield tuple(prompt[lengths[0] :])
