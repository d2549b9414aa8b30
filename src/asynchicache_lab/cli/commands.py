"""The commands of the laboratory, as data; the library's command line finds them by an entry point."""

from __future__ import annotations

from asynchicache.cli.commands import Command

_BENCH, _CLI = "asynchicache_lab.bench", "asynchicache_lab.cli"

COMMANDS: tuple[Command, ...] = (
    Command(
        ("demo",),
        "serve a small hybrid model four ways, and write a report that compares them",
        f"{_BENCH}.demo.options:DemoOptions",
        f"{_CLI}.demo:run",
    ),
    Command(
        ("bench", "multiturn"),
        "conversations of many rounds: how much of each prompt is served from the cache",
        f"{_BENCH}.options:MultiturnOptions",
        f"{_CLI}.benches:multiturn",
        f"{_BENCH}.multiturn",
    ),
    Command(
        ("bench", "shared-prefix"),
        "groups of prompts with a common beginning: does only the first one pay for it",
        f"{_BENCH}.options:SharedPrefixOptions",
        f"{_CLI}.benches:shared_prefix",
        f"{_BENCH}.shared_prefix",
    ),
    Command(
        ("bench", "tree"),
        "turns of a chat through the tree alone: how fast it matches and inserts",
        f"{_BENCH}.options:TreeOptions",
        f"{_CLI}.benches:tree",
        f"{_BENCH}.tree",
    ),
    Command(
        ("bench", "bridge"),
        "what it costs the event loop to submit copies, and to be told of their end",
        f"{_BENCH}.options:BridgeOptions",
        f"{_CLI}.benches:bridge",
        f"{_BENCH}.bridge",
    ),
    Command(
        ("bench", "host"),
        "what a load costs the host a layer, with a CUDA driver that only counts",
        f"{_BENCH}.options:HostOptions",
        f"{_CLI}.benches:host",
        f"{_BENCH}.host",
    ),
    Command(
        ("bench", "stall"),
        "how long the event loop stands still while pages move between the tiers",
        f"{_BENCH}.options:StallOptions",
        f"{_CLI}.benches:stall",
        f"{_BENCH}.stall",
    ),
    Command(
        ("bench", "transfer"),
        "pages between device and host, beside one plain copy of as many bytes",
        f"{_BENCH}.options:TransferOptions",
        f"{_CLI}.benches:transfer",
        f"{_BENCH}.transfer",
    ),
    Command(
        ("bench", "overlap"),
        "a forward that starts on each layer as soon as it is loaded, and one that waits for all",
        f"{_BENCH}.options:OverlapOptions",
        f"{_CLI}.benches:overlap",
        f"{_BENCH}.overlap",
    ),
    Command(
        ("bench", "ranks"),
        "a leader and followers as processes: what a group adds to a step, beside a collective",
        f"{_BENCH}.ranks.options:RanksOptions",
        f"{_CLI}.benches:ranks",
        f"{_BENCH}.ranks.run",
    ),
    Command(
        ("bench", "storage"),
        "pages to a storage engine and back, beside the plainest client of the same medium",
        f"{_BENCH}.storage.options:StorageBenchOptions",
        f"{_CLI}.benches:storage",
        f"{_BENCH}.storage.run",
    ),
    Command(
        ("bench", "stores"),
        "many nodes before one store, simulated from a trace: requests, bytes, servers, cost of each engine",
        f"{_BENCH}.stores.options:StoresOptions",
        f"{_CLI}.benches:stores",
        f"{_BENCH}.stores.run",
    ),
    Command(
        ("soak",),
        "run conversations against a real storage backend that fails; check for errors, stalls and leaks",
        f"{_BENCH}.soak.options:SoakOptions",
        f"{_CLI}.benches:soak",
        f"{_BENCH}.soak.run",
    ),
    Command(
        ("bench", "serve"),
        "conversations with `serve`, beside a server without hits, and with its storage killed",
        f"{_BENCH}.serve.options:ServeBenchOptions",
        f"{_CLI}.benches:serve",
    ),
    Command(
        ("bench", "handover"),
        "first tokens of prompts that another server has computed, beside those of prompts on the host",
        f"{_BENCH}.serve.options:HandoverOptions",
        f"{_CLI}.benches:handover",
    ),
    Command(
        ("chaos",),
        "search for wrong bytes, hangs and leaks: random traffic, faults and orders of events, by seed",
        "asynchicache_lab.chaos.options:ChaosOptions",
        f"{_CLI}.chaos:run",
    ),
)
