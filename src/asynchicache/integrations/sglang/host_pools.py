"""SGLang's host pools as pages of bytes, at addresses that the pool reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asynchicache.errors import ConfigError
from asynchicache.integrations.page_memory import PageMemory

_STATES = "mamba"
_LAYOUTS_OF_STATES = ("page_first", "page_first_direct")
_FIX = "start SGLang with --hicache-mem-layout page_first_direct and --hicache-io-backend direct"


def host_pages(name: str, pool: Any) -> PageMemory:
    """Return the pages of a `HostKVCache`.

    `get_page_buffer_meta` gives the addresses of the first two pages and of the last page; the others
    follow at the same stride. Every layout that SGLang can address therefore works (page_first,
    page_first_direct, page_head, layer_first) for all kinds of pools. Exception: SGLang keeps states only
    in the first two layouts.

    Args:
        name: of the pool.
        pool: kept alive while the pages are used.

    Raises:
        ConfigError: the pool does not report addresses, or its pages are not evenly spaced; names the
            flag that helps.
    """
    if name == _STATES and pool.layout not in _LAYOUTS_OF_STATES:
        raise ConfigError(f"pool {name!r}: SGLang has no states in layout {pool.layout!r}; {_FIX}")
    count = int(pool.page_num)
    wanted = sorted({0, min(1, count - 1), count - 1})
    pointers, sizes = _buffers(name, pool, wanted)
    parts = len(pointers) // len(wanted)
    first, last = pointers[:parts], pointers[-parts:]
    second = pointers[parts : 2 * parts] if count > 1 else first
    strides = [b - a for a, b in zip(first, second, strict=True)] if count > 1 else list(sizes[:parts])
    expected = [a + (count - 1) * stride for a, stride in zip(first, strides, strict=True)]
    if last != expected:
        raise ConfigError(f"pool {name!r}: pages of layout {pool.layout!r} are not evenly spaced; {_FIX}")
    places = list(zip(first, strides, sizes[:parts], strict=True))
    return PageMemory.at_addresses(places, count, owner=pool)


def _buffers(name: str, pool: Any, pages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return addresses and sizes of all parts of `pages`, page by page."""
    size = pool.page_size
    indices = torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])
    try:
        pointers, sizes = pool.get_page_buffer_meta(indices)
    except (AttributeError, AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"pool {name!r}: layout {getattr(pool, 'layout', None)!r} of {type(pool).__name__} cannot be "
            f"moved in place ({error or type(error).__name__}); {_FIX}"
        ) from error
    return [int(pointer) for pointer in pointers], [int(nbytes) for nbytes in sizes]


def pool_layout(pool: Any) -> str:
    """Return what must be equal, besides dtype and sizes, for two processes to share pages."""
    layers = f"{getattr(pool, 'start_layer', '')}-{getattr(pool, 'end_layer', '')}"
    tag = getattr(pool, "storage_format_tag", None) or ""
    return f"{pool.layout}:{pool.page_size}:{layers}:{tag}"


def page_numbers(pool: Any, host_indices: torch.Tensor | None, keys: int) -> list[int] | None:
    """Convert token indices to page numbers; None if they are not exactly one page per key."""
    if host_indices is None or host_indices.numel() != keys * pool.page_size:
        return None
    return [index // pool.page_size for index in host_indices[:: pool.page_size].tolist()]
