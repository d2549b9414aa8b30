"""Page digests and object keys.

Digests are byte for byte those of SGLang HiCache's SHA-256 chain, so tools work with both
(`get_hash_str` and `storage_namespace_seed` in sglang 0.5.23).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from asynchicache.errors import ConfigError

DIGEST_BYTES = 32
_NARROW = 0xFFFFFFFF
_NAMESPACE_TAG = b"sglang-cache-namespace-v1"
_SHARD_TEXT = str.maketrans("/-", "-_")  # shards contain no `_`, so the text is unique


class ObjectKey(NamedTuple):
    """The name of one page of one pool in storage. Backends never build keys.

    Attributes:
        fingerprint: 32 bytes, `pool_fingerprint`: pages are interchangeable only if it is equal.
        digest: 32 bytes, the page digest: identifies the tokens of the page and all before it.
        pool: the pool's name.
        shard: the part of the page, e.g. `0/2` for rank 0 of 2; empty if all ranks share one.
    """

    fingerprint: bytes
    digest: bytes
    pool: str
    shard: str = ""

    def text(self) -> str:
        """One line of letters, digits, `.`, `_` and `-`, safe as a file name or object name."""
        return self._family() + self.digest.hex()

    def pattern(self) -> str:
        """A glob that matches `text` of exactly the pages of this pool, fingerprint and shard."""
        return self._family() + "?" * len(self.digest.hex())

    def _family(self) -> str:
        shard = f".{shard_text(self.shard)}" if self.shard else ""
        return f"{self.fingerprint.hex()[:32]}.{self.pool}{shard}."


def shard_text(shard: str) -> str:
    """A shard as part of a file or object name; unique for each shard."""
    return shard.translate(_SHARD_TEXT)


def namespace_seed(extra_key: str | None, salt: str | None = None) -> bytes:
    """The digest before page 0; empty without a namespace, so that plain prefixes are the same everywhere.

    Args:
        extra_key: LoRA id, tenant or any other name that isolates prefixes.
        salt: the request's cache salt.

    Raises:
        ConfigError: one of them is neither a string nor None, or has an unpaired surrogate.
    """
    if extra_key is None and salt is None:
        return b""
    digest = sha256(_NAMESPACE_TAG)
    for part in (extra_key, salt):
        if part is None:
            digest.update(b"\x00")
        elif not isinstance(part, str):
            raise ConfigError(f"namespace or salt {part!r} must be a string, or None")
        else:
            text = _utf8("namespace or salt", part)
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!r:.80} is no text: {error.reason}") from error


def page_digests(tokens: array[int] | memoryview, page_size: int, prior: bytes = b"") -> list[bytes]:
    """Chained digests of the whole pages in `tokens`.

    Args:
        tokens: token ids, or the words of page keys; a tail shorter than a page is ignored.
        page_size: tokens, or words, per page.
        prior: the digest of the page before, the namespace's seed, or empty.

    Returns:
        32 bytes per page: SHA-256 of the prior digest and the page's ids as little-endian uint32. A page
        with an id above 2**32 - 1 is hashed as 0xFF followed by the ids as uint64.
    """
    import numpy as np  # here: commands that move no pages start without it

    ids = np.frombuffer(tokens, np.uint64)  # words of page keys use all 64 bits
    pages = len(ids) // page_size
    if not pages:
        return []
    ids = ids[: pages * page_size]
    wide = ids.max() > _NARROW
    words = memoryview(ids.astype("<u4").tobytes())
    step = page_size * 4
    digests = []
    for page in range(pages):
        run = ids[page * page_size : (page + 1) * page_size] if wide else None
        if run is not None and run.max() > _NARROW:
            prior = sha256(prior + b"\xff" + run.astype("<u8").tobytes()).digest()
        else:
            prior = sha256(prior + words[page * step : (page + 1) * step]).digest()
        digests.append(prior)
    return digests


def tail_digests(keys: Iterable[bytes], prior: bytes) -> list[bytes]:
    """Digests of pages that follow the same page, each as its ids in little-endian int64.

    As `page_digests`, for pages of which every one has a negative id (`tree.tails`).
    """
    return [sha256(prior + b"\xff" + key).digest() for key in keys]


def common_pages(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """The number of leading pages that two sequences share, by the digests of all their pages.

    A digest covers every page before it, so two sequences agree up to one page and never after it. The page
    is found by bisection.
    """
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def pool_fingerprint(
    *,
    model: str,
    weight_version: str,
    identity: str,
    pool: str,
    layout: str,
    page_size: int,
    sharding: str,
    salt: str = "",
) -> bytes:
    """32 bytes, equal only if pages of two pools are interchangeable.

    `layout` is `SlotLayout.signature()`, which names dtypes and shapes.

    Raises:
        ConfigError: an argument has an unpaired surrogate.
    """
    digest = sha256(b"asynchicache-pool-v1")
    for part in (model, weight_version, identity, pool, layout, str(page_size), sharding, salt):
        text = _utf8("model, weight_version or salt", part)
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
