"""An engine's host memory as pages of bytes: their location, and whether storage can use them in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from asynchicache.errors import ConfigError
from asynchicache.layouts import ALIGNMENT

ByteArray: TypeAlias = npt.NDArray[np.uint8]

_MAX_STORED_PARTS = 4  # more objects per page would cost storage more than a copy costs


class TensorLike(Protocol):
    """The methods of `torch.Tensor` that are used here."""

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    @property
    def device(self) -> Any: ...


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of `nbytes` of this process's memory, which must outlive the view.

    Raises:
        ConfigError: the address or size is not valid.
    """
    if address <= 0 or nbytes < 1:
        raise ConfigError(f"no memory of {nbytes} bytes at address {address}")
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def tensor_memory(tensor: TensorLike) -> memoryview:
    """Return a writable view of a contiguous host tensor, which must outlive the view.

    Raises:
        ConfigError: the tensor is on a device, or not contiguous.
    """
    if str(tensor.device) != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"a tensor on {tensor.device}, contiguous={tensor.is_contiguous()}; "
            "pages must lie in contiguous host memory"
        )
    return memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@dataclass(frozen=True, slots=True)
class PagePart:
    """One part of every page, at `memory[offset + page * stride:][:nbytes]`."""

    memory: memoryview
    offset: int
    stride: int
    nbytes: int

    def rows(self, pages: int) -> ByteArray:
        """Return a uint8 view `[pages, nbytes]`.

        Raises:
            ConfigError: pages overlap, or lie outside the memory.
        """
        end = self.offset + (pages - 1) * self.stride + self.nbytes
        if self.nbytes < 1 or self.stride < self.nbytes or self.offset < 0 or end > self.memory.nbytes:
            raise ConfigError(
                f"{pages} parts of {self.nbytes} bytes from byte {self.offset} on, {self.stride} apart, "
                f"do not fit into {self.memory.nbytes} bytes"
            )
        flat = np.frombuffer(self.memory, np.uint8)
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :], (pages, self.nbytes), (self.stride, 1), writeable=True
        )


class PageMemory:
    """Pages of equal size, each of one or more parts at any addresses.

    Storage holds a *unit* as one object. A unit is a part if a page has a few parts of equal size that are
    contiguous in whole blocks of 4,096 bytes, as `[parts, pages, bytes]`; otherwise it is the whole page.
    This depends on the geometry only, never on addresses, so that two processes agree.

    Attributes:
        page_bytes: bytes of one page, all parts.
        units: objects per page.
        unit_bytes: bytes of one object.
    """

    def __init__(self, parts: Sequence[PagePart], pages: int, *, owner: object = None) -> None:
        """
        Args:
            parts: parts of a page, in the order in which they are stored.
            owner: kept alive while the memory is used.

        Raises:
            ConfigError: no pages or parts, overlapping pages, or read-only memory.
        """
        if pages < 1 or not parts:
            raise ConfigError(f"{pages} pages of {len(parts)} parts; there must be 1 of each at least")
        if any(part.memory.readonly for part in parts):
            raise ConfigError("pages lie in memory that is read-only; storage must be able to write to it")
        self.pages = pages
        self.page_bytes = sum(part.nbytes for part in parts)
        self._parts = [part.rows(pages) for part in parts]
        self._whole = len(parts) > 1 and not self._back_to_back(parts)
        self.units = 1 if self._whole else len(parts)
        self.unit_bytes = self.page_bytes // self.units
        self._first = parts[0]
        self._owner = owner

    @classmethod
    def of_view(cls, view: memoryview, *, owner: object = None) -> PageMemory:
        """Take pages along the first dimension of a contiguous view `[pages, ...]`.

        Raises:
            ConfigError: the view has only one dimension, or is not contiguous, empty, or read-only.
        """
        if view.ndim < 2 or not view.c_contiguous or not view.nbytes:
            raise ConfigError(
                f"a view of shape {view.shape}, contiguous={view.c_contiguous}; "
                "pages need [pages, bytes...], contiguous and not empty"
            )
        pages = view.shape[0] if view.shape is not None else 0
        nbytes = view.nbytes // pages
        return cls([PagePart(view.cast("B"), 0, nbytes, nbytes)], pages, owner=owner)

    @classmethod
    def of_tensor(cls, tensor: Any, *, parts: int = 1) -> PageMemory:
        """Take pages of a contiguous host tensor `[pages, ...]`, or `[parts, pages, ...]` (keys and values).

        Raises:
            ConfigError: the tensor is on a device, not contiguous, or of another shape.
        """
        memory = tensor_memory(tensor)
        pages = tensor.shape[0] if parts == 1 else tensor.shape[1]
        if parts > 1 and tensor.shape[0] != parts:
            raise ConfigError(f"a tensor of shape {tuple(tensor.shape)} has no {parts} parts in front")
        nbytes = memory.nbytes // (pages * parts)
        cuts = [PagePart(memory, part * pages * nbytes, nbytes, nbytes) for part in range(parts)]
        return cls(cuts, pages, owner=tensor)

    @classmethod
    def at_addresses(
        cls, parts: Sequence[tuple[int, int, int]], pages: int, *, owner: object = None
    ) -> PageMemory:
        """Take pages at addresses in this process's memory.

        Args:
            parts: for each part, its address in page 0, its stride to the next page, and its size in bytes.
            owner: kept alive while the memory is used.

        Raises:
            ConfigError: an address is invalid, or pages overlap.
        """
        ends = [address + pages * stride for address, stride, _ in parts]
        if [address for address, _, _ in parts[1:]] == ends[:-1]:  # back to back: one run
            start, last = parts[0][0], parts[-1]
            run = memory_at(start, last[0] + (pages - 1) * last[1] + last[2] - start)
            cuts = [PagePart(run, address - start, stride, nbytes) for address, stride, nbytes in parts]
        else:
            cuts = [
                PagePart(memory_at(address, (pages - 1) * stride + nbytes), 0, stride, nbytes)
                for address, stride, nbytes in parts
            ]
        return cls(cuts, pages, owner=owner)

    def in_place(self) -> memoryview | None:
        """Return all units as one range of memory, in the order `part * pages + page`.

        None if storage cannot use them in place, because a unit is not aligned or does not fill its blocks.
        """
        address = self._parts[0].ctypes.data
        if self._whole or not self._dense(0) or address % ALIGNMENT or self.unit_bytes % ALIGNMENT:
            return None
        start = self._first.offset
        return self._first.memory[start : start + self.units * self.pages * self.unit_bytes]

    def obstacle(self) -> str:
        """Return why storage cannot use the pages in place."""
        if self._whole:
            return f"a page has {len(self._parts)} parts that are not equal blocks back to back"
        if not self._dense(0):
            return "pages do not lie back to back"
        if self.unit_bytes % ALIGNMENT:
            return f"{self.unit_bytes} bytes are not a multiple of {ALIGNMENT}"
        return f"its memory does not start on a multiple of {ALIGNMENT}"

    def unit(self, index: int) -> list[ByteArray]:
        """Return the pieces of unit `part * pages + page`; if pages are stored whole, of page `index`."""
        if self._whole:
            return [part[index] for part in self._parts]
        part, page = divmod(index, self.pages)
        return [self._parts[part][page]]

    def _dense(self, part: int) -> bool:
        return self.pages == 1 or self._parts[part].strides[0] == self._parts[part].shape[1]

    def _back_to_back(self, parts: Sequence[PagePart]) -> bool:
        first = self._parts[0]
        nbytes = first.shape[1]
        return (
            len(self._parts) <= _MAX_STORED_PARTS
            and nbytes % ALIGNMENT == 0
            and all(part.memory is parts[0].memory for part in parts)
            and all(
                part.shape == first.shape
                and self._dense(number)
                and part.ctypes.data == first.ctypes.data + number * self.pages * nbytes
                for number, part in enumerate(self._parts)
            )
        )

    def __repr__(self) -> str:
        return f"<PageMemory: {self.pages} pages of {self.page_bytes} bytes, {self.units} units each>"


def copy_pieces(sources: Sequence[ByteArray], destinations: Sequence[ByteArray]) -> None:
    """Copy pieces, in order, to pieces of other lengths but the same total length.

    Releases the interpreter lock while copying a piece.
    """
    if len(sources) == len(destinations):
        for source, destination in zip(sources, destinations, strict=True):
            np.copyto(destination, source)
        return
    pieces, run = (sources, destinations[0]) if len(destinations) == 1 else (destinations, sources[0])
    offset = 0
    for piece in pieces:
        part = run[offset : offset + len(piece)]
        if pieces is sources:
            np.copyto(part, piece)
        else:
            np.copyto(piece, part)
        offset += len(piece)
