"""Checkpoint policy: the lengths at which a prefill should end a forward to publish a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from asynchicache.errors import ConfigError

NOWHERE = "none"
_WORDS = ("prompt", "output", "branch")


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The lengths at which to keep a state.

    Covers SGLang's `mamba_track_interval` and `mamba_branching_seqlen` (sgl-project/sglang#20457), and the
    ends of prompts and outputs, where conversations continue.

    Attributes:
        prompt: at the end of a prompt, or where later prompts repeat it to (`CacheHint.repeats`), in whole
            pages.
        output: at the end of the output, in whole pages.
        branch: where full pages match but a state is missing, so from the second prompt that branches there.
        spacing: at every multiple of this many tokens of a prompt, a multiple of the page size; 0: never.
    """

    prompt: bool = True
    output: bool = True
    branch: bool = True
    spacing: int = 0

    def __post_init__(self) -> None:
        if self.spacing < 0:
            raise ConfigError(f"checkpoint spacing {self.spacing} must be a number of tokens, 0 at least")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse words joined by `+`: `prompt`, `output`, `branch`, a number of tokens (the spacing), or
        `none` alone. Example: `prompt+branch+2048`.

        Raises:
            ConfigError: a word is unknown or repeated.
        """
        words = [] if text == NOWHERE else text.split("+")
        numbers = [word for word in words if word.isdecimal() and int(word)]
        unknown = [word for word in words if word not in _WORDS and word not in numbers]
        if unknown or len(numbers) > 1 or len(set(words)) < len(words):
            raise ConfigError(
                f"checkpoints {text!r}: must be {', '.join(_WORDS)} and a number of tokens, each at most "
                f"once, joined by +, or {NOWHERE}"
            )
        spacing = int(numbers[0]) if numbers else 0
        return cls("prompt" in words, "output" in words, "branch" in words, spacing)

    def __str__(self) -> str:
        """The words that `parse` reads."""
        words = [word for word in _WORDS if getattr(self, word)]
        return "+".join([*words, *([str(self.spacing)] if self.spacing else [])]) or NOWHERE

    def check(self, page_size: int) -> None:
        """Check the spacing.

        Raises:
            ConfigError: the spacing is not a multiple of the page size.
        """
        if self.spacing % page_size:
            raise ConfigError(
                f"checkpoint spacing {self.spacing} must be a multiple of the page size, {page_size}"
            )

    def cuts(self, start: int, end: int, branch: int, repeated: Sequence[int] = ()) -> tuple[int, ...]:
        """Lengths in tokens at which a prefill should end a forward, ascending.

        Args:
            start: tokens that are restored.
            end: the tokens of the prompt in whole pages.
            branch: the length that full pages reach and where a state is missing; 0 for none.
            repeated: lengths up to which later prompts repeat this one. Default: `end`.
        """
        lengths: set[int] = set()
        if self.prompt:
            lengths.update(repeated or (end,))
        if self.branch:
            lengths.add(branch)
        if self.spacing:
            lengths.update(range(start + self.spacing - start % self.spacing, end + 1, self.spacing))
        return tuple(sorted(length for length in lengths if length > start))


DEFAULT_WORDS = "prompt+output+branch"
