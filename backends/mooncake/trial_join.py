"""Script that joins a cluster and leaves. `joining.try_to_join` runs it in a child process.

`MooncakeDistributedStore.setup` holds the GIL, and can try for 90 seconds or many minutes before it
fails. In a child process it blocks no other thread and can be killed. The script does not import this
package.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Exit with 0 if a store can be set up with the given settings, else with 1."""
    request = json.loads(sys.argv[1])
    sys.path[:] = request["path"]
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(request["setup"])
    os._exit(0 if code == 0 else 1)  # skips closing, which takes a second; the client lends no memory


if __name__ == "__main__":
    main()
