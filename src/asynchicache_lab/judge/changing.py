"""`asynchicache serve` as a program that changes its model's weights while it serves, as a trainer does.

    python -m asynchicache_lab.judge.changing serve ...

On SIGUSR1 the model gets the weights that now lie at its checkpoint's path. `/update_weights` names them.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from asynchicache.cli.main import main
from asynchicache.integrations.serve import loading

load_checkpoint = loading.load_checkpoint


def load_changing(folder: Path, **options: Any) -> loading.LoadedModel:
    """Load a checkpoint, and again at each signal."""
    loaded = load_checkpoint(folder, **options)

    def change(*_: object) -> None:
        loaded.model.load_state_dict(load_checkpoint(folder, **options).model.state_dict())

    signal.signal(signal.SIGUSR1, change)
    return loaded


if __name__ == "__main__":
    loading.load_checkpoint = load_changing
    sys.exit(main())
