"""Types used by every layer: tiers, residency, outcomes, reasons, tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from operator import index
from typing import NamedTuple, SupportsIndex

from asynchicache.errors import ConfigError, InvalidTokensError, RequestStateError

TOKEN_BYTES = 8
"""Token ids are 64-bit everywhere: a page of the tree's key is `page_size * TOKEN_BYTES` bytes."""


KEY_BYTES = 32
"""Bytes of a page key: an engine's hash of a page and of all pages before it."""

KEY_WORDS = KEY_BYTES // TOKEN_BYTES
"""64-bit words of a page key. They take the place of a page's token ids."""


class Tier(IntEnum):
    """The place of bytes, nearest to the model first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class Residency(IntEnum):
    """State of one component of a node in one tier.

    LOADING: slots are allocated and a copy up (host to device) is in flight; usable after a fence.
    SAVING: slots are allocated and a copy down (device to host) is in flight; not visible yet.
    """

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2
    SAVING = 3


class Direction(Enum):
    """Source and destination tier of a copy."""

    LOAD = "load"  # host to device
    BACKUP = "backup"  # device to host
    FORK = "fork"  # device to device: copies a state, to keep one and continue from the other

    @property
    def source(self) -> Tier:
        return Tier.HOST if self is Direction.LOAD else Tier.DEVICE

    @property
    def destination(self) -> Tier:
        return Tier.HOST if self is Direction.BACKUP else Tier.DEVICE


class Outcome(Enum):
    """The result of one key in one storage call."""

    HIT = "hit"  # get: the page is in its slot and verified
    MISS = "miss"  # get, exists: not in storage
    STORED = "stored"  # put: as durable as the engine's capabilities promise
    EXISTS = "exists"  # put: already in storage, nothing written
    CORRUPT = "corrupt"  # get: the bytes differ from those written; quarantined
    FAILED = "failed"  # the engine failed
    REJECTED = "rejected"  # put: refused (full, read-only, shed)
    TIMEOUT = "timeout"  # no answer by the deadline; the slot may still be written
    CLAIMED = "claimed"  # put: not sent, because another writer is sending it


class MissReason(Enum):
    """Why a request got a shorter hit than possible."""

    NONE = "none"  # nothing was missed
    COLD = "cold"  # this prefix was never computed, or is no longer cached
    STATE = "state"  # attention pages reach further than any recurrent state
    WINDOW = "window"  # attention pages reach further than the sliding window's pages
    HOST_CAPACITY = "host_capacity"  # no host slots for pages in storage
    DEVICE_CAPACITY = "device_capacity"  # no device slots for pages on the host
    DEADLINE = "deadline"  # storage did not deliver in time
    STORAGE_FAILED = "storage_failed"  # storage failed or refused
    CORRUPT = "corrupt"  # storage returned other bytes than were written
    TRANSFER_FAILED = "transfer_failed"  # the device, or a copy between it and the host, failed
    WEIGHTS = "weights"  # the weights changed between match and load
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"  # reading from storage would have taken longer; not a miss
    CLOSED = "closed"  # the cache was closing


class ShedReason(Enum):
    """Why pages were not written to storage."""

    BUDGET = "budget"  # more than `store_bytes` bytes were in flight
    REJECTED = "rejected"  # storage is full, read-only or detached, or its breaker is open
    FAILED = "failed"  # the write failed
    TIMEOUT = "timeout"  # storage did not answer in time; the pages may be there


class WritePolicy(Enum):
    """When computed pages are copied to host memory and storage."""

    WRITE_THROUGH = "write_through"  # at the first publication
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # at the second request that asks for them
    WRITE_BACK = "write_back"  # ahead of their eviction


class PrefetchPolicy(Enum):
    """How long a request waits for storage."""

    BEST_EFFORT = "best_effort"  # not at all: the read continues for later requests
    WAIT_COMPLETE = "wait_complete"  # until every read has an outcome
    TIMEOUT = "timeout"  # until a deadline that grows with the tokens requested


@dataclass(frozen=True, slots=True)
class Coverage:
    """The pages of a pool that a prefix needs: all (None), or the last `pages` before its end."""

    pages: int | None

    def __post_init__(self) -> None:
        if self.pages is not None:
            check_number("coverage: pages", self.pages)
            if self.pages < 0:
                raise ConfigError(f"coverage: pages {self.pages} must be 0 at least, or None for every page")

    @property
    def trailing(self) -> bool:
        return self.pages is not None

    @property
    def kept(self) -> int:
        """Pages of a sliding window to keep where a prefix ends; 0 if every page is kept anyway.

        One more than a prefix needs: a prompt of whole pages that is asked again ends one page earlier,
        because its last token is computed anew.
        """
        return 0 if self.pages is None else self.pages + 1


ALL_PAGES = Coverage(None)


def trailing_pages(pages: int) -> Coverage:
    """The last `pages` pages before the end of the prefix, or all of them if it is shorter."""
    return Coverage(pages)


class PoolTransfer(NamedTuple):
    """A copy of slots in one pool: `sources[i]` to `destinations[i]`, in their tiers."""

    pool: str
    sources: Sequence[int]
    destinations: Sequence[int]


def token_array(tokens: Iterable[int] | array[int]) -> array[int]:
    """Checked token ids as `array('q')`, without a copy if they already are one.

    Accepts any iterable of integers, including numpy arrays and torch tensors.

    Raises:
        InvalidTokensError: no tokens, or an id is negative, not an integer, or above 2**63 - 1.
    """
    import numpy as np  # here: commands that move no pages start without it

    ids = tokens if isinstance(tokens, array) and tokens.typecode == "q" else _convert(tokens)
    if not ids:
        raise InvalidTokensError("tokens are empty; a request needs at least one token id")
    lowest = int(np.frombuffer(ids, np.int64).min())
    if lowest < 0:
        raise InvalidTokensError(f"token id {lowest} is negative; ids are 0 to 2**63 - 1")
    return ids


def key_array(keys: Sequence[bytes]) -> array[int]:
    """The words of page keys, `KEY_WORDS` each, as `array('q')`.

    Raises:
        InvalidTokensError: a key is not `KEY_BYTES` bytes.
    """
    if isinstance(keys, bytes | bytearray | memoryview):  # else each byte would be taken for a key
        raise InvalidTokensError("page keys are one run of bytes; pass a sequence with the key of each page")
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            size = f"{len(key)} bytes" if isinstance(key, bytes | bytearray) else f"{key!r}"
            raise InvalidTokensError(
                f"page key {number} is {size}; a key is {KEY_BYTES} bytes, a hash of 256 bits"
            )
    return array("q", b"".join(keys))


def _convert(tokens: Iterable[int]) -> array[int]:
    if isinstance(tokens, bytes | bytearray):  # `array` would read the bytes as 64-bit numbers
        raise InvalidTokensError("tokens are bytes; pass the token ids that a tokenizer gives")
    if isinstance(tokens, str):
        raise InvalidTokensError("tokens are text; tokenise it first, and pass the token ids")
    if isinstance(tokens, Mapping):  # what a tokenizer of transformers returns
        raise InvalidTokensError(f"tokens are a mapping of {sorted(tokens)}; pass the ids in 'input_ids'")
    if isinstance(tokens, set | frozenset):
        raise InvalidTokensError("tokens are a set, which has no order; pass the list that a tokenizer gives")
    if len(shape := getattr(tokens, "shape", (0,))) != 1:
        cure = ": pass [0], its only row" if len(shape) == 2 and shape[0] == 1 else ", one prompt a request"
        raise InvalidTokensError(f"tokens have {len(shape)} dimensions, {list(shape)}; a prompt has 1{cure}")
    if isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], list | tuple):
        cure = ": pass [0], the only one" if len(tokens) == 1 else ", one prompt a request"
        raise InvalidTokensError(f"tokens are a list of {len(tokens)} prompts{cure}")
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(values, list | tuple) and values and isinstance(values[0], bool):
        raise InvalidTokensError("tokens are truth values, as of a mask; pass the token ids")
    try:
        return array("q", values)
    except OverflowError:
        raise InvalidTokensError("a token id is above 2**63 - 1; ids are 64-bit") from None
    except TypeError as error:
        raise InvalidTokensError(
            f"tokens are not a flat run of integers, one prompt a request: {error}"
        ) from None


def check_number(name: str, value: object) -> None:
    """Check that a value is an integer, and not a bool.

    Raises:
        ConfigError: it is not; names `name` and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} {value!r} must be a whole number")


def as_count(what: str, value: SupportsIndex, name: str = "") -> int:
    """A number of tokens as an `int`; accepts integers of numpy and torch.

    Args:
        what: the operation, for the message.
        name: `argument=`, of one that is given by name.

    Raises:
        RequestStateError: it is not an integer, or a bool.
    """
    with suppress(TypeError):
        if not isinstance(value, bool):
            return index(value)
    raise RequestStateError(f"{what}({name}{value!r}): a whole number of tokens")


@dataclass(frozen=True, slots=True)
class Hit:
    """The prefix that a request need not compute.

    Attributes:
        tokens: length of the restored prefix, at least one token less than the prompt; whole pages, unless
            the option `tails` lets it end inside one.
        by_tier: the same tokens, under the farthest tier that any pool of the prefix came from.
        reason: why the hit is not longer; NONE if it covers the whole prompt but its last page.
        full_tokens: how far attention pages alone would have reached.
        held_back_by: the pool that kept the hit shorter than that, or empty.
        advice: a human-readable hint what would have helped; empty if no pool held the hit back.
        by_stage: with a chain of stores, the tokens of tier `STORAGE`, under the name of the farthest stage
            that a page was read from.
    """

    tokens: int
    by_tier: Mapping[Tier, int] = field(default_factory=dict)
    reason: MissReason = MissReason.NONE
    full_tokens: int = 0
    held_back_by: str = ""
    advice: str = ""
    by_stage: Mapping[str, int] = field(default_factory=dict)
