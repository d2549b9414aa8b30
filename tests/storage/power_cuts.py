"""A disk that loses power: what was asked of it is recorded, and cut, dropped, reordered and torn."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

SECTOR = 512


@dataclass(slots=True)
class Request:
    """Something asked of a file, in the order in which it began.

    Attributes:
        path: the file.
        kind: `write`, `size` or `sync`.
        offset: of a write; the new length of `size`.
        data: of a write.
        ended: requests that had begun when it ended; None while it runs.
        began: the same when it began.
    """

    path: Path
    kind: str
    began: int
    offset: int = 0
    data: bytes = b""
    ended: int | None = None

    def ended_by(self, number: int) -> bool:
        """Whether it had ended when so many requests had begun."""
        return self.ended is not None and self.ended <= number


class Promise(NamedTuple):
    """What the store has told its users after `at` requests.

    Attributes:
        at: how many.
        there: pages that are there.
        putting: pages that somebody puts from now on, until the next promise.
    """

    at: int
    there: frozenset[bytes]
    putting: frozenset[bytes]


@dataclass(slots=True)
class DiskLog:
    """Everything asked of the files below a folder, and what the store has promised meanwhile."""

    folder: Path
    requests: list[Request] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    given_up: list[tuple[int, bytes]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def promise(self, there: Iterable[bytes], putting: Iterable[bytes]) -> None:
        self.promises.append(Promise(len(self.requests), frozenset(there), frozenset(putting)))

    def give_up(self, pages: Iterable[bytes]) -> None:
        """The store has decided to evict or delete pages."""
        with self.lock:
            self.given_up += [(len(self.requests), page) for page in pages]

    def kept_at(self, cut: int) -> frozenset[bytes]:
        """Pages that must be there if the power fails then."""
        last = self._last(cut)
        return last.there - {page for at, page in self.given_up if last.at <= at <= cut}

    def gone_at(self, cut: int, pages: frozenset[bytes]) -> frozenset[bytes]:
        """Pages that must not be there if the power fails then: deleted, and nobody put them again."""
        last = self._last(cut)
        return pages - last.there - last.putting

    def _last(self, cut: int) -> Promise:
        return next(promise for promise in reversed(self.promises) if promise.at <= cut)

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patched:
            for name, kind in (
                ("pwritev", "write"),
                ("posix_fallocate", "size"),
                ("ftruncate", "size"),
                ("fdatasync", "sync"),
                ("fsync", "sync"),
            ):
                patched.setattr(os, name, self._recorder(getattr(os, name), name, kind))
            yield

    def _recorder(self, real: Callable[..., object], name: str, kind: str) -> Callable[..., object]:
        def record(descriptor: int, *arguments: object) -> object:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if not path.is_relative_to(self.folder):
                return real(descriptor, *arguments)
            with self.lock:
                request = Request(path.relative_to(self.folder), kind, len(self.requests))
                _describe(request, name, arguments)
                self.requests.append(request)
            try:
                return real(descriptor, *arguments)
            finally:
                with self.lock:
                    request.ended = len(self.requests)

        return record

    def image(self, cut: int, chance: random.Random, target: Path) -> None:
        """The files as they may be when the power fails before request number `cut`.

        Args:
            cut: the number.
            chance: decides what the disk has done.
            target: a copy of the folder as it was before the first request; gets the files.
        """
        begun = self.requests[:cut]
        for path in {request.path for request in begun if request.kind != "sync"}:
            sure, loose = self._split(path, cut)
            chance.shuffle(loose)
            file = target / path
            content = bytearray(file.read_bytes() if file.exists() else b"")
            for request in sure:
                _apply(request, content, None)
            for request in loose[: chance.randint(0, len(loose))]:
                _apply(request, content, chance)
            file.write_bytes(content)

    def _split(self, path: Path, cut: int) -> tuple[list[Request], list[Request]]:
        """Requests that a finished sync covers, and those that may have happened, in part or not at all."""
        begun = [request for request in self.requests[:cut] if request.path == path]
        synced = max(
            (request.began for request in begun if request.kind == "sync" and request.ended_by(cut)),
            default=-1,
        )
        changes = [request for request in begun if request.kind != "sync"]
        sure = [request for request in changes if request.ended_by(synced)]
        return sure, [request for request in changes if not request.ended_by(synced)]


def _describe(request: Request, name: str, arguments: Sequence[object]) -> None:
    if name == "pwritev":
        views, offset = arguments
        request.data, request.offset = b"".join(bytes(view) for view in views), offset
    elif name == "posix_fallocate":
        start, size = arguments
        request.offset = start + size
    elif name == "ftruncate":
        (request.offset,) = arguments


def _apply(request: Request, content: bytearray, chance: random.Random | None) -> None:
    """Do a request; with `chance`, a write in part, whole sectors at a time."""
    if request.kind == "size":
        content.extend(bytes(max(0, request.offset - len(content))))
        del content[request.offset :]
        return
    content.extend(bytes(max(0, request.offset + len(request.data) - len(content))))
    torn = chance is not None and chance.random() < 0.5
    start, end = request.offset, request.offset + len(request.data)
    while start < end:
        following = min(start - start % SECTOR + SECTOR, end)
        if not torn or chance.random() < 0.5:
            content[start:following] = request.data[start - request.offset : following - request.offset]
        start = following
