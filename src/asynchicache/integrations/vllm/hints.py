"""Per-request hints for the tier, from `kv_transfer_params` and from vLLM's `kv_hints` envelope.

Hints are advice: an unknown or malformed hint is counted and ignored, and never fails a request.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.planner.hints import NO_HINT, CacheHint

logger = logging.getLogger(__name__)

PARAMETER = "asynchicache"
"""The key of this tier's hints in a request's `kv_transfer_params`."""

GROUP_BYTES = 4
"""Size of the group number, big-endian, that follows the block hash in a chunk's key."""

_FLAGS = ("no_store", "no_load")


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request.

    Attributes:
        no_store: do not store its chunks.
        no_load: do not read chunks for it; every lookup is a miss.
        prefetch: keys of chunks that this or a later request will look up.
        cache: what the client knows about the future of the blocks; the connector orders eviction by it.
        ignored: number of hints that were not understood.
    """

    no_store: bool = False
    no_load: bool = False
    prefetch: tuple[bytes, ...] = ()
    cache: CacheHint = NO_HINT
    ignored: int = 0


def read_hints(parameters: Any, envelope: Any, groups: Collection[int]) -> RequestHints:
    """
    Args:
        parameters: the request's `kv_transfer_params`, or None.
        envelope: its `kv_hints`: an object with `actions`, each with `action_type` and `payload`; or None.
        groups: numbers of the existing KV cache groups.
    """
    asked = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    found = [_from_options(asked, groups)] if asked is not None else []
    actions = getattr(envelope, "actions", None)
    for action in actions if isinstance(actions, list | tuple) else ():
        kind, payload = getattr(action, "action_type", None), getattr(action, "payload", None)
        found.append(_from_action(kind, payload, groups))
    return RequestHints(
        no_store=any(hint.no_store for hint in found),
        no_load=any(hint.no_load for hint in found),
        prefetch=tuple(dict.fromkeys(key for hint in found for key in hint.prefetch)),
        cache=next((hint.cache for hint in found if hint.cache is not NO_HINT), NO_HINT),
        ignored=sum(hint.ignored for hint in found),
    )


def _from_options(asked: Any, groups: Collection[int]) -> RequestHints:
    if not isinstance(asked, Mapping):
        return _ignored(f"{PARAMETER} {asked!r} must be an object")
    known = {name: value for name, value in asked.items() if name in _FLAGS and isinstance(value, bool)}
    prefetch = asked.get("prefetch")
    keys = _keys(prefetch, groups) if prefetch is not None else ()
    cache = _cache_hint(asked["cache_hint"]) if "cache_hint" in asked else None
    unknown = len(asked) - len(known) - (bool(keys) if prefetch is not None else 0) - (cache is not None)
    if unknown:
        logger.debug("hints %r: %d of them mean nothing here", asked, unknown)
    return RequestHints(**known, prefetch=keys, cache=cache or NO_HINT, ignored=unknown)


def _cache_hint(fields: Any) -> CacheHint | None:
    """Read the fields of a `CacheHint`; None if they are not understood."""
    try:
        return msgspec.convert(fields, CacheHint)
    except (msgspec.ValidationError, ConfigError):
        return None


def _from_action(kind: Any, payload: Any, groups: Collection[int]) -> RequestHints:
    if kind in _FLAGS:
        return RequestHints(no_store=kind == "no_store", no_load=kind == "no_load")
    keys = _keys(payload, groups) if kind == "prefetch" else ()
    return RequestHints(prefetch=keys) if keys else _ignored(f"action {kind!r} with payload {payload!r}")


def _keys(payload: Any, groups: Collection[int]) -> tuple[bytes, ...]:
    """Read keys from `{"block_hashes": [hex, ...], "groups": [0, ...]}`; empty if malformed.

    `groups` defaults to all groups.
    """
    if not isinstance(payload, Mapping):
        return ()
    hashes, wanted = payload.get("block_hashes"), payload.get("groups", sorted(groups))
    if not isinstance(hashes, list) or not isinstance(wanted, list):
        return ()
    if not all(isinstance(group, int) and group in groups for group in wanted):
        return ()
    try:
        digests = [bytes.fromhex(text) for text in hashes]
    except (TypeError, ValueError):
        return ()
    each = sorted(set(wanted))  # a client could repeat groups, and multiply the keys of all hashes
    return tuple(
        digest + group.to_bytes(GROUP_BYTES, "big") for digest in digests for group in each if digest
    )


def _ignored(what: str) -> RequestHints:
    logger.debug("a hint means nothing here: %s", what)
    return RequestHints(ignored=1)
