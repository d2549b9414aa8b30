"""A follower of a `PrefixCachedModel` with its part of a model: `python served_process.py MODEL FOLDER`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from asynchicache.integrations.transformers.follower import run_follower
from ranks.sharded_model import LIMITS, TOKEN, join_model, options, rank_model, rank_spec


def main(name: str, folder: Path) -> None:
    join_model(folder, 1)
    following = run_follower(
        rank_model(name, 1),
        rank_spec(name, 1),
        f"unix:{folder / 'group'}",
        TOKEN,
        rank=1,
        config=options(name, folder / "pages"),
        limits=LIMITS,
    )
    asyncio.run(following)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
