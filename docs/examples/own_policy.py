"""An eviction order of your own, compared with the default on a real trace."""

from pathlib import Path

from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.run import run_replay
from asynchicache.tree.node import Node
from asynchicache.tree.policies import Policy, Use

TRACE = Path(__file__).parents[2] / "tests/data/traces/mooncake_conversation_h1.jsonl.gz"


class Recent(Policy):
    """Least recently used first."""

    def worth(self, node: Node, clock: float, use: Use) -> float:
        return clock


if __name__ == "__main__":
    for name in ("own_policy:Recent", "lru", "size"):
        options = ReplayOptions(str(TRACE), policy=name, capacity_share="0.05")
        report = run_replay(options, lambda done, total: None)
        print(f"{name:18} {report.hit_rate:.2%}")
