"""A file descriptor that is readable while something is ready: an eventfd, or two sockets without one."""

from __future__ import annotations

import os
import socket
from typing import Protocol


class Wakeup(Protocol):
    """Readable for `select`, `poll`, `epoll` and `loop.add_reader` while it is set.

    Not locked: whoever sets and clears it from several threads does so under a lock of theirs.
    """

    def fileno(self) -> int:
        """The descriptor to wait for; -1 once it is closed."""
        ...

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None:
        """Twice is harmless."""
        ...


class EventfdWakeup:
    """A Linux eventfd: one descriptor, one system call to set it."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        if not self._set and self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)
            self._set = True

    def clear(self) -> None:
        if self._set and self._descriptor >= 0:
            os.eventfd_read(self._descriptor)
        self._set = False

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SocketWakeup:
    """Where the system has no eventfd."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._set = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        if not self._set and self._writer.fileno() >= 0:
            self._writer.send(b"\0")
            self._set = True

    def clear(self) -> None:
        if self._set and self._reader.fileno() >= 0:
            self._reader.recv(1)
        self._set = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def open_wakeup() -> Wakeup:
    """The best that the system has, not set."""
    return EventfdWakeup() if hasattr(os, "eventfd") else SocketWakeup()
