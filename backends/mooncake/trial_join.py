"""Joins a cluster and leaves: a script for a process of its own, run by `joining.try_to_join`.

`MooncakeDistributedStore.setup` holds the GIL, and tries for a minute and a half, or many, before it
fails. Here it keeps nobody waiting, and can be killed. The script imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Exit with 0 if a store can be set up as the argument says, and with 1 if not."""
    request = json.loads(sys.argv[1])
    sys.path[:] = request["path"]
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(request["setup"])
    os._exit(0 if code == 0 else 1)  # without the second that closing takes; it lends nothing


if __name__ == "__main__":
    main()
