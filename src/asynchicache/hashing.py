"""Page digests and object keys.

A digest names a page: 8 bytes for its namespace, then 32 for its tokens and all before them. The 32 are byte
for byte those of SGLang HiCache's SHA-256 chain, so tools work with both (`get_hash_str` and
`storage_namespace_seed` in sglang 0.5.23). The 8 let a store list, count, bound and delete the pages of one
namespace; what separates namespaces is the chain, which begins with all of the namespace's seed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple, Self

from asynchicache.errors import ConfigError

HASH_BYTES = 32
NAMESPACE_BYTES = 8
DIGEST_BYTES = NAMESPACE_BYTES + HASH_BYTES
NO_NAMESPACE = bytes(NAMESPACE_BYTES)
GROUP_PAGES = 64
"""Pages of a path that storage can be asked for in one question, see `PlacedPage`."""
_NARROW = 0xFFFFFFFF
_NAMESPACE_TAG = b"sglang-cache-namespace-v1"
_SHARD_TEXT = str.maketrans("/-", "-_")  # shards contain no `_`, so the text is unique


class ObjectKey(NamedTuple):
    """The name of one page of one pool in storage. Backends never build keys.

    Attributes:
        fingerprint: 32 bytes, `pool_fingerprint`: pages are interchangeable only if it is equal.
        digest: 40 bytes, the page digest: the namespace, the tokens of the page and all before it.
        shard: the part of the page, e.g. `0/2` for rank 0 of 2; empty if all ranks share one.
    """

    fingerprint: bytes
    digest: bytes
    pool: str
    shard: str = ""

    @property
    def namespace(self) -> bytes:
        """8 bytes, `namespace_id` of the page's namespace."""
        return self.digest[:NAMESPACE_BYTES]

    @property
    def group(self) -> bytes:
        """40 bytes: the page's group, see `PlacedPage`. Without one, the page is alone in a group."""
        return self.digest

    @property
    def place(self) -> int:
        """The page's place in its group."""
        return 0

    def text(self) -> str:
        """One line of letters, digits, `.`, `_` and `-`, safe as a file name or object name; names of one
        namespace begin alike."""
        return self._family() + self.digest.hex()

    def pattern(self, namespace: bytes = b"") -> str:
        """A glob that matches `text` of exactly the pages of this pool, fingerprint and shard, and of one
        namespace if it is given."""
        return self._family() + namespace.hex().ljust(2 * DIGEST_BYTES, "?")

    def _family(self) -> str:
        shard = f".{shard_text(self.shard)}" if self.shard else ""
        return f"{self.fingerprint.hex()[:32]}.{self.pool}{shard}."


class PlacedKey(ObjectKey):
    """A key that says where on its path the page lies. It equals the key that does not."""

    _page: PlacedPage

    @classmethod
    def of(cls, key: ObjectKey, page: PlacedPage) -> Self:
        placed = cls(*key)
        placed._page = page
        return placed

    @property
    def group(self) -> bytes:
        return self._page.group

    @property
    def place(self) -> int:
        return self._page.place


class PlacedPage(NamedTuple):
    """A page, and where it lies on its path.

    A path is divided into groups: pages 0 to `GROUP_PAGES`, and then `GROUP_PAGES` pages each. A group is
    named by the page before its first page, and the first group by page 0. So pages that could follow the
    same page, such as tails, are in one group.

    Attributes:
        group: digest of the page that names the group.
        place: distance from that page, 0 to `GROUP_PAGES`.
    """

    digest: bytes
    group: bytes
    place: int


def naming_page(page: int) -> int:
    """The number of the page that names the group of page number `page`."""
    return max(page - 1, 0) // GROUP_PAGES * GROUP_PAGES


def placed_pages(digests: Sequence[bytes] | Mapping[int, bytes], pages: Iterable[int]) -> list[PlacedPage]:
    """Some pages of a path.

    Args:
        digests: by number of the page: of these pages, and of those that name their groups.
        pages: their numbers.
    """
    heads = ((page, naming_page(page)) for page in pages)
    return [PlacedPage(digests[page], digests[head], page - head) for page, head in heads]


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


def namespace_id(seed: bytes) -> bytes:
    """The 8 bytes at the beginning of each digest of a namespace; zeros without one.

    Args:
        seed: `namespace_seed` of it.
    """
    return seed[:NAMESPACE_BYTES].ljust(NAMESPACE_BYTES, b"\0")


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
        40 bytes per page: the namespace, and SHA-256 of the prior hash, or seed, and the page's ids as
        little-endian uint32. A page with an id above 2**32 - 1 is hashed as 0xFF followed by the ids as
        uint64.
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
    namespace, prior = _split(prior)
    digests = []
    for page in range(pages):
        run = ids[page * page_size : (page + 1) * page_size] if wide else None
        if run is not None and run.max() > _NARROW:
            prior = sha256(prior + b"\xff" + run.astype("<u8").tobytes()).digest()
        else:
            prior = sha256(prior + words[page * step : (page + 1) * step]).digest()
        digests.append(namespace + prior)
    return digests


def tail_digests(keys: Iterable[bytes], prior: bytes) -> list[bytes]:
    """Digests of pages that follow the same page, each as its ids in little-endian int64.

    As `page_digests`, for pages of which every one has a negative id (`tree.tails`).
    """
    namespace, prior = _split(prior)
    return [namespace + sha256(prior + b"\xff" + key).digest() for key in keys]


def _split(prior: bytes) -> tuple[bytes, bytes]:
    """The namespace of what follows a digest or a seed, and the hash that the chain goes on with."""
    return namespace_id(prior), prior[-HASH_BYTES:]


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
    digest = sha256(b"asynchicache-pool-v2")
    for part in (model, weight_version, identity, pool, layout, str(page_size), sharding, salt):
        text = _utf8("model, weight_version or salt", part)
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
