"""The flags of `bench stores`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from asynchicache.options import LARGEST_FLOAT, CommandOptions, Natural, Positive, Share, about, named_values
from asynchicache_lab.bench.stores.engines import Figures, figures

_Above0 = Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]


class StoresOptions(CommandOptions, frozen=True):
    """A fleet, its traffic and its model. The sizes are those of docs/howto/size_the_tiers.md.

    Raises:
        ConfigError: a value is outside its rule.
    """

    trace: Annotated[str, about("a trace, as of replay; default: half an hour of chats")] = ""
    block_size: Annotated[Natural, about("tokens of a block, for traces that do not state it")] = 0
    nodes: Annotated[Positive, about("nodes, each with a cache of its own")] = 100
    tokens_s: Annotated[_Above0, about("prompt tokens that reach a node in a second")] = 10_000
    host_gb: Annotated[_Above0, about("host memory of a node's cache, GB")] = 512
    roam: Annotated[Share, about("share of requests that go to any node, not to the one with the prefix")] = (
        0.25
    )
    page_size: Annotated[Positive, about("tokens of a page")] = 64
    page_bytes: Annotated[Positive, about("bytes of a page of attention, all layers")] = 1_572_864
    state_bytes: Annotated[
        Natural, about("bytes of a recurrent state, all layers; 0: the model has none")
    ] = 77_856_768
    hours: Annotated[_Above0, about("hours for which pages are kept; at least as long as the trace")] = 1
    write_policy: Annotated[
        Literal["write_through", "write_through_selective"],
        about("what is written: all, or what is hit again"),
    ] = "write_through"
    headroom: Annotated[
        float, Meta(ge=1, le=LARGEST_FLOAT), about("what stores are sized for, in mean loads")
    ] = 2
    measured: Annotated[
        tuple[str, ...], about("a JSON file of bench storage, whose rates replace the recorded ones")
    ] = ()
    rate: Annotated[tuple[str, ...], about("a figure of an engine, as redis.put_mb_s=2700")] = ()
    seed: int = 0

    def check(self) -> None:
        self.figures()

    @property
    def names(self) -> tuple[str, ...]:
        """The pools."""
        return ("kv", "mamba") if self.state_bytes else ("kv",)

    @property
    def slot_bytes(self) -> Mapping[str, int]:
        """Bytes of a page or a state, by pool."""
        return {"kv": self.page_bytes, "mamba": self.state_bytes}

    def figures(self) -> Mapping[str, Figures]:
        """By engine, what one server does and costs.

        Raises:
            ConfigError: a file or a figure is none.
        """
        return figures(self.measured, named_values("--rate", self.rate))
