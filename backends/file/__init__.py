"""The embedded file engine: pages in preallocated files of a local folder, which survive a restart."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynchicache.backends.file.backend import FileBackend, open_backend

__all__ = ["FileBackend", "open_backend"]


def __getattr__(name: str) -> object:
    """Import the engine on first use: `verify` and `clear` read the files without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynchicache.backends.file import backend

    return getattr(backend, name)
