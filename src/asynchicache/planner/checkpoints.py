"""Where states are kept: at which lengths a prefill should end a forward, so that one can be published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asynchicache.errors import ConfigError

NOWHERE = "none"
_WORDS = ("prompt", "output", "branch")


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Which of the places where a forward can end are worth a state.

    What SGLang's `mamba_track_interval` and `mamba_branching_seqlen` are (sgl-project/sglang#20457),
    and the ends of prompts and outputs, where conversations go on.

    Attributes:
        prompt: at the end of a prompt, in whole pages.
        output: at the end of what was generated, in whole pages.
        branch: where other prompts left this one's path, found at the second prompt that comes by.
        spacing: at every multiple of so many tokens of a prompt, whole pages; 0: no such places.
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
        """A policy from its words joined by `+`: `prompt`, `output`, `branch`, a number of tokens (the
        spacing), or `none` alone. `prompt+branch+2048`.

        Raises:
            ConfigError: another word, or one twice.
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

    def check(self, page_size: int) -> None:
        """Refuse a spacing that no page ends at.

        Raises:
            ConfigError: names both numbers.
        """
        if self.spacing % page_size:
            raise ConfigError(
                f"checkpoint spacing {self.spacing} must be a multiple of the page size, {page_size}"
            )

    def cuts(self, start: int, end: int, branch: int) -> tuple[int, ...]:
        """Where a prefill should end a forward, ascending.

        Args:
            start: tokens that are restored.
            end: tokens of the prompt that are whole pages.
            branch: where a state is missing that the attention pages are there for; 0 for nowhere.
        """
        lengths = set()
        if self.prompt:
            lengths.add(end)
        if self.branch:
            lengths.add(branch)
        if self.spacing:
            lengths.update(range(start + self.spacing - start % self.spacing, end + 1, self.spacing))
        return tuple(sorted(length for length in lengths if length > start))


DEFAULT_WORDS = "prompt+output+branch"
DEFAULT_CHECKPOINTS = CheckpointPolicy.parse(DEFAULT_WORDS)
