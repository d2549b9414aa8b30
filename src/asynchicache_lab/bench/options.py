"""Flags of the single-module benches. Imports little, so that `--help` and flag errors are fast."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.options import LARGEST_FLOAT, CommandOptions, Natural, Positive, about
from asynchicache_lab.bench.pool_sizes import PoolSizes


class MultiturnOptions(CommandOptions, frozen=True):
    """The flags of `bench multiturn`; lengths are in tokens."""

    num_clients: Annotated[Positive, about("conversations")] = 10
    num_rounds: Annotated[Positive, about("turns of each conversation")] = 12
    request_length: Annotated[Positive, about("new prompt tokens of a turn")] = 1024
    output_length: Annotated[Positive, about("tokens generated in a turn")] = 1024
    page_size: Annotated[Positive, about("tokens per page")] = 64
    checkpoint_interval: Annotated[Positive, about("tokens between places where a state can be kept")] = 256
    mamba_slots: Annotated[int, Meta(ge=3), about("states that the device holds")] = 6
    window: Annotated[Natural, about("tokens of a sliding window, instead of recurrent states; 0: none")] = 0
    host_ratio: Annotated[float, Meta(ge=0, le=LARGEST_FLOAT), about("host slots for each device slot")] = 2.0
    offload_mamba: Annotated[bool, about("let states leave the device for host memory and storage")] = True
    tails: Annotated[bool, about("let prefixes end inside a page, see the option tails")] = False
    move_bytes: Annotated[bool, about("move real bytes through the whole cache, ten times slower")] = False
    seed: int = 0

    def check(self) -> None:
        if self.tails and (self.window or self.move_bytes):
            raise ConfigError("--tails: not simulated with --window, nor with --move-bytes")
        if not self.window and self.checkpoint_interval % self.page_size:
            raise ConfigError(
                f"--checkpoint-interval {self.checkpoint_interval}: "
                f"must be a multiple of --page-size {self.page_size}"
            )

    def prompt(self, round_: int) -> int:
        """Prompt length of round `round_`, in tokens."""
        return self._history(round_) + self.request_length

    def kept(self, round_: int) -> int:
        """Maximum number of that prompt's tokens that can be restored.

        The last token of a history was never computed. Before it, the last multiple of the checkpoint
        interval has a state, and the last whole page has a window.
        """
        computed = max(self._history(round_) - 1, 0)
        if self.tails:
            return computed
        return computed // self.interval * self.interval

    def _history(self, round_: int) -> int:
        return round_ * (self.request_length + self.output_length)

    @property
    def interval(self) -> int:
        """Tokens between two positions where a prompt can resume."""
        return self.page_size if self.window else self.checkpoint_interval

    @property
    def sizes(self) -> PoolSizes:
        """Slots for every page and for states; or, with windows, for one window per conversation and, for the
        running one, the windows it resumes from and computes, with a chunk between them."""
        if not self.window:
            return PoolSizes(
                self.pages, self.mamba_slots, host_ratio=self.host_ratio, offload_states=self.offload_mamba
            )
        window = -(-self.window // self.page_size)
        slots = (self.num_clients + 3) * (window + 1) + 1  # a prefix keeps a page more than its window
        return PoolSizes(self.pages, windows=slots, window_pages=window, host_ratio=self.host_ratio)

    @property
    def pages(self) -> int:
        """Total pages of all finished conversations."""
        ends = 2 * self.num_clients + 1 if self.tails else 0
        return self.num_clients * -(-self._history(self.num_rounds) // self.page_size) + ends


class SharedPrefixOptions(CommandOptions, frozen=True):
    """The flags of `bench shared-prefix`; lengths are in tokens."""

    gsp_num_groups: Annotated[Positive, about("system prompts")] = 64
    gsp_prompts_per_group: Annotated[Positive, about("prompts that share one system prompt")] = 16
    gsp_system_prompt_len: Annotated[Positive, about("tokens of a system prompt")] = 2048
    gsp_question_len: Annotated[Positive, about("tokens of a question")] = 128
    gsp_output_len: Annotated[Positive, about("tokens generated for a question")] = 256
    page_size: Annotated[Positive, about("tokens per page")] = 64
    move_bytes: Annotated[bool, about("move real bytes through the whole cache, ten times slower")] = False
    seed: int = 0

    @property
    def shared(self) -> int:
        """Tokens in whole pages of a system prompt."""
        return self.gsp_system_prompt_len // self.page_size * self.page_size

    @property
    def prompts(self) -> int:
        return self.gsp_num_groups * self.gsp_prompts_per_group

    @property
    def sizes(self) -> PoolSizes:
        """Slots for every page, and for three states per prompt: at the ends of the system prompt, of the
        question and of the output."""
        tokens = self.gsp_system_prompt_len + self.gsp_question_len + self.gsp_output_len
        pages = -(-tokens // self.page_size)
        return PoolSizes(self.prompts * pages, 3 * self.prompts + 2)


class TreeOptions(CommandOptions, frozen=True):
    """The flags of `bench tree`."""

    scenario: Annotated[Literal["tiny", "chat", "big"], about("workload")] = "chat"
    page_size: Annotated[Positive, about("tokens per page, up to 512")] = 64
    fill: Annotated[Literal["fit", "half"], about("pools hold everything computed (fit), or half of it")] = (
        "fit"
    )
    window: Annotated[Positive, about("tokens of the sliding window")] = 1024
    seed: int | None = None


class BridgeOptions(CommandOptions, frozen=True):
    """The flags of `bench bridge`."""

    rounds: Annotated[Positive, about("times that each part is measured; medians are shown")] = 200
    pages: Annotated[Positive, about("pages of an operation, beside one state")] = 8
    seed: int = 0


class HostOptions(CommandOptions, frozen=True):
    """The flags of `bench host`."""

    rounds: Annotated[Positive, about("times that each case is measured; medians are shown")] = 20


class StallOptions(CommandOptions, frozen=True):
    """The flags of `bench stall`."""

    page_bytes: Annotated[int, Meta(ge=1024), about("bytes of a page, all layers")] = 1 << 20
    pages: Annotated[int, Meta(ge=2), about("pages that go down to the host and come back")] = 512
    seed: int = 0


class TransferOptions(CommandOptions, frozen=True):
    """The flags of `bench transfer`."""

    device: Annotated[str, about("cpu, cuda or cuda:N")] = "cpu"
    path: Annotated[Literal["auto", "batch", "kernel", "plain"], about("how to copy; auto measures")] = "auto"
    pool: Annotated[Literal["all", "mha", "mla", "dsa", "swa", "mamba"], about("whose pages to copy")] = "all"
    row_mib: Annotated[Positive, about("MiB that a row moves at a time")] = 256
    rounds: Annotated[Positive, about("rounds; medians are shown")] = 40
    seed: int = 0


class OverlapOptions(CommandOptions, frozen=True):
    """The flags of `bench overlap`. The size is that of 8,192 tokens of Llama 3 8B."""

    device: Annotated[str, about("cpu, cuda or cuda:N")] = "cpu"
    layers: Annotated[int, Meta(ge=2), about("layers of the model")] = 32
    layer_mib: Annotated[Positive, about("MiB that are loaded for a layer")] = 32
    rounds: Annotated[Positive, about("rounds; medians are shown")] = 30
    seed: int = 0
