"""Slots, generations and leases: the metadata store alone, with a clock of ours."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from asynchicache.backends.hf3fs.metadata.store import MetadataStore, UnknownNamespaceError
from asynchicache.backends.hf3fs.metadata.words import Claim, SlotVersion
from asynchicache.errors import StorageFormatError, UsageError
from storage.hf3fs_names import Clock

LEASE = 10.0


def name(number: int) -> str:
    return sha256(b"%d" % number).hexdigest()


def token(number: int) -> str:
    return f"{number:032x}"


class Shelf:
    """One namespace of a store, in numbers instead of names."""

    def __init__(self, folder: Path, clock: Clock, slots: int = 4) -> None:
        self.store = MetadataStore(folder, lease_seconds=LEASE, now=clock)
        self.number = self.store.number(self.store.open("kv", slots, 4096).handle)
        self.tokens = 0

    def reserve(self, *keys: int) -> list[Claim | None]:
        """What may be written now, one a key."""
        self.tokens += 1
        names = [name(key) for key in keys]
        places = self.store.reserve(self.number, token(self.tokens), names).places
        return [at and Claim(key, at.slot, at.generation) for key, at in zip(names, places, strict=True)]

    def confirm(self, *claims: Claim | None) -> list[str]:
        return list(self.store.confirm(self.number, [claim for claim in claims if claim]))

    def put(self, *keys: int) -> list[str]:
        return self.confirm(*self.reserve(*keys))

    def held(self, *keys: int) -> list[bool]:
        return self.store.exists(self.number, [name(key) for key in keys])

    def locate(self, *keys: int) -> tuple[int, list[SlotVersion | None]]:
        found = self.store.locate(self.number, [name(key) for key in keys])
        return found.lease, found.places


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(tmp_path: Path, clock: Clock) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path, clock)
    yield shelf
    shelf.store.close()


def test_a_page_is_there_once_it_is_confirmed(shelf: Shelf) -> None:
    claims = shelf.reserve(1, 2)
    assert shelf.held(1, 2) == [False, False]

    assert shelf.confirm(claims[0]) == ["stored"]

    assert shelf.held(1, 2) == [True, False]
    assert shelf.locate(1, 2)[1][1] is None


def test_confirming_again_is_answered_alike(shelf: Shelf) -> None:
    claims = shelf.reserve(1)

    assert [shelf.confirm(*claims), shelf.confirm(*claims)] == [["stored"], ["stored"]]


def test_reserving_again_with_one_token_gives_the_same_slots(shelf: Shelf) -> None:
    first = shelf.store.reserve(shelf.number, token(7), [name(1), name(2)])
    again = shelf.store.reserve(shelf.number, token(7), [name(1), name(2)])

    assert again == first
    assert shelf.store.counts(shelf.number)[1] == 2


def test_a_key_twice_in_one_reservation_is_refused(shelf: Shelf) -> None:
    with pytest.raises(UsageError, match="twice"):
        shelf.reserve(1, 1)


def test_of_two_writers_the_later_finds_the_page_there(shelf: Shelf) -> None:
    mine, yours = shelf.reserve(1), shelf.reserve(1)
    assert mine != yours

    assert [shelf.confirm(*mine), shelf.confirm(*yours)] == [["stored"], ["existed"]]
    assert shelf.store.counts(shelf.number)[1] == 0


def test_the_least_recently_used_page_makes_room(shelf: Shelf) -> None:
    shelf.put(1, 2, 3, 4)
    lease, _ = shelf.locate(1)
    shelf.store.end_reads([lease])

    shelf.put(5)

    assert shelf.held(1, 2, 3, 4, 5) == [True, True, True, False, True]  # the end of the path
    assert shelf.store.counts(shelf.number)[2] == 1


def test_a_touch_counts_as_a_use_and_of_nothing_else(shelf: Shelf) -> None:
    shelf.put(1, 2, 3, 4)
    assert shelf.store.touch(shelf.number, [name(4), name(9), name(3)]) == 2

    shelf.put(5)
    shelf.put(6)
    shelf.put(7)

    assert shelf.held(1, 2, 3, 4, 9) == [False, False, True, False, False]


def test_a_put_makes_no_room_with_its_own_pages(shelf: Shelf) -> None:
    shelf.put(4, 1, 2, 3)

    reserved = shelf.store.reserve(shelf.number, "f" * 32, [name(key) for key in (1, 2, 3, 10, 11)])

    assert reserved.existed == [True, True, True, False, False]
    assert [place is not None for place in reserved.places] == [False, False, False, True, False]


def test_an_evicted_slot_has_another_generation(shelf: Shelf) -> None:
    shelf.put(1, 2, 3, 4)
    lease, (old,) = shelf.locate(1)
    shelf.store.end_reads([lease])
    shelf.put(5, 6, 7, 8)
    _, places = shelf.locate(5, 6, 7, 8)
    new = next(at for at in places if at and old and at.slot == old.slot)

    assert old is not None
    assert new.generation > old.generation
    claim = Claim(name(1), old.slot, old.generation)
    assert shelf.store.forget(shelf.number, [claim]) == [False]
    assert shelf.confirm(claim) == ["lost"]
    assert shelf.store.release(shelf.number, [old]) == 0
    assert shelf.held(5, 6, 7, 8) == [True] * 4


def test_a_slot_that_is_read_is_not_given_away(shelf: Shelf) -> None:
    shelf.put(1, 2, 3, 4)
    lease, _ = shelf.locate(1, 2, 3)

    assert [claim is not None for claim in shelf.reserve(5, 6)] == [True, False]
    shelf.store.end_reads([lease])
    assert [claim is not None for claim in shelf.reserve(6)] == [True]


def test_a_deleted_page_that_is_read_keeps_its_slot(shelf: Shelf) -> None:
    shelf.put(1)
    lease, (place,) = shelf.locate(1)
    assert place is not None
    shelf.store.delete(shelf.number, [name(1)])

    claims = shelf.reserve(2, 3, 4, 5)

    assert place.slot not in [claim.slot for claim in claims if claim]
    assert claims[3] is None
    shelf.store.end_reads([lease])
    assert shelf.reserve(5) != [None]


def test_a_dead_readers_lease_ends(shelf: Shelf, clock: Clock) -> None:
    shelf.put(1, 2, 3, 4)
    shelf.locate(1, 2, 3, 4)
    assert shelf.reserve(5) == [None]

    clock.time += LEASE

    assert shelf.reserve(5) != [None]


def test_a_dead_writers_reservation_returns(shelf: Shelf, clock: Clock) -> None:
    dead = shelf.reserve(1, 2, 3, 4)
    clock.time += LEASE - 1
    assert shelf.reserve(5) == [None]

    clock.time += 1

    assert shelf.put(5, 6, 7, 8) == ["stored"] * 4
    assert shelf.confirm(*dead) == ["lost"] * 4
    assert shelf.held(1, 2, 3, 4) == [False] * 4


def test_a_late_writer_whose_slot_nobody_took_may_confirm(shelf: Shelf, clock: Clock) -> None:
    late = shelf.reserve(1)
    clock.time += 2 * LEASE

    assert shelf.confirm(*late) == ["stored"]


def test_only_reserved_slots_are_released(shelf: Shelf) -> None:
    shelf.put(1)
    _, (held,) = shelf.locate(1)
    (reserved,) = shelf.reserve(2)
    assert held is not None
    assert reserved is not None
    places = [held, SlotVersion(reserved.slot, reserved.generation), SlotVersion(3, 99)]

    assert shelf.store.release(shelf.number, places) == 1
    assert shelf.held(1) == [True]


def test_clearing_stays_in_its_namespace(shelf: Shelf) -> None:
    other = shelf.store.number(shelf.store.open("mamba", 4, 4096).handle)
    shelf.put(1, 2)
    places = shelf.store.reserve(other, token(99), [name(1)]).places
    assert places[0] is not None
    shelf.store.confirm(other, [Claim(name(1), places[0].slot, places[0].generation)])

    assert shelf.store.clear(shelf.number) == 2

    assert shelf.held(1, 2) == [False, False]
    assert shelf.store.exists(other, [name(1)]) == [True]


def test_a_namespace_grows_and_never_shrinks(shelf: Shelf) -> None:
    assert shelf.store.open("kv", 6, 4096).slots == 6
    assert shelf.store.open("kv", 2, 4096).slots == 6
    assert shelf.put(*range(6)) == ["stored"] * 6


def test_another_frame_size_is_refused_and_changes_nothing(shelf: Shelf) -> None:
    with pytest.raises(StorageFormatError, match="4096 bytes, 8192 were asked for"):
        shelf.store.open("kv", 100, 8192)

    assert shelf.store.open("kv", 1, 4096).slots == 4


@pytest.mark.parametrize("handle", ["", "kv", "0.1", ".1", "{id}.2", "{id}.-1", "{id}.x", "{id}." + "9" * 30])
def test_a_handle_of_another_store_is_unknown(shelf: Shelf, handle: str) -> None:
    with pytest.raises(UnknownNamespaceError, match="open it first"):
        shelf.store.number(handle.format(id=shelf.store.id))


def test_everything_survives_a_crash_leases_too(tmp_path: Path, clock: Clock) -> None:
    shelf = Shelf(tmp_path, clock)
    shelf.put(1, 2)
    (reserved,) = shelf.reserve(3)
    lease, _ = shelf.locate(1, 2)
    shelf.store._database.close()  # as a kill leaves it

    again = Shelf(tmp_path, clock)
    again.tokens = 100

    assert again.store.id == shelf.store.id
    assert again.held(1, 2, 3) == [True, True, False]
    assert [claim is not None for claim in again.reserve(4, 5)] == [True, False]
    again.store.end_reads([lease])
    assert again.confirm(reserved) == ["stored"]
    again.store.close()


def test_processes_of_a_host_share_leases(tmp_path: Path, clock: Clock) -> None:
    one, other = Shelf(tmp_path, clock), Shelf(tmp_path, clock)
    other.tokens = 100
    one.put(1, 2, 3, 4)
    lease, _ = one.locate(1, 2, 3, 4)
    assert other.reserve(5) == [None]

    other.store.end_reads([lease])

    assert other.put(5) == ["stored"]
    assert one.held(4, 5) == [False, True]
    one.store.close()
    other.store.close()


RESERVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from asynchicache.backends.hf3fs.metadata.store import MetadataStore

store = MetadataStore(Path(sys.argv[1]), lease_seconds=10.0, now=lambda: 1000.0)
kv = store.number(store.open("kv", 4, 4096).handle)
assert None not in store.reserve(kv, "f" * 32, [f"{number:064x}" for number in range(100, 103)]).places
store._database.execute("BEGIN IMMEDIATE")  # in the middle of a change
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_reserved_returns(tmp_path: Path, clock: Clock, shelf: Shelf) -> None:
    shelf.put(1)
    died = subprocess.run([sys.executable, "-c", RESERVE_AND_DIE, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    shelf.store.delete(shelf.number, [name(1)])
    assert [claim is not None for claim in shelf.reserve(2, 3)] == [True, False]

    clock.time += LEASE

    assert shelf.put(4, 5, 6) == ["stored"] * 3


def test_a_host_that_starts_anew_has_no_readers_and_reservations_have_a_full_lease(
    tmp_path: Path, clock: Clock
) -> None:
    shelf = Shelf(tmp_path, clock)
    shelf.put(1)
    shelf.locate(1)
    shelf.reserve(2, 3, 4)
    shelf.store._database.execute("UPDATE store SET boot = 'another'")
    shelf.store.close()
    clock.time = 3.0  # its clock begins anew

    again = Shelf(tmp_path, clock)
    again.tokens = 100

    assert [claim is not None for claim in again.reserve(5, 6)] == [True, False]
    clock.time += LEASE
    assert [claim is not None for claim in again.reserve(6, 7, 8)] == [True] * 3
    again.store.close()


def test_what_was_used_last_is_remembered_when_closed(tmp_path: Path, clock: Clock) -> None:
    shelf = Shelf(tmp_path, clock)
    shelf.put(4, 3, 2, 1)
    shelf.locate(1)
    shelf.store.close()
    again = Shelf(tmp_path, clock)
    again.tokens = 100

    again.put(5)

    assert again.held(1, 2) == [True, False]
    again.store.close()


def test_a_failed_change_leaves_everything_as_it_was(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.put(1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(shelf.store, "_oldest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shelf.reserve(5)

    assert shelf.held(1, 2, 3, 4) == [True] * 4
    assert shelf.store.counts(shelf.number)[1] == 0


class Model:
    """What a namespace must be like, kept in plain dictionaries, checked after every step."""

    def __init__(self, shelf: Shelf, slots: int) -> None:
        self.shelf = shelf
        self.slots = slots
        self.reserved: list[Claim] = []
        self.reading: dict[int, set[int]] = {}
        self.generations: set[int] = set()

    def reserve(self, keys: list[int]) -> None:
        busy = set().union(*self.reading.values()) | {claim.slot for claim in self.reserved}
        claims = [claim for claim in self.shelf.reserve(*keys) if claim]
        taken = [claim.slot for claim in claims]
        assert len(set(taken)) == len(taken)
        assert not busy & set(taken)
        assert all(0 <= slot < self.slots for slot in taken)
        assert not self.generations & {claim.generation for claim in claims}
        self.generations |= {claim.generation for claim in claims}
        self.reserved += claims

    def confirm(self, claim: Claim) -> None:
        self.reserved.remove(claim)
        there = self.shelf.store.exists(self.shelf.number, [claim.key])[0]
        assert self.shelf.confirm(claim) == ["existed" if there else "stored"]
        assert self.shelf.store.exists(self.shelf.number, [claim.key]) == [True]

    def read(self, keys: list[int]) -> None:
        lease, places = self.shelf.locate(*keys)
        slots = {place.slot for place in places if place}
        assert [place is not None for place in places] == self.shelf.held(*keys)
        assert not slots & {claim.slot for claim in self.reserved}
        if slots:
            self.reading[lease] = slots

    def check(self) -> None:
        held, reserved, _ = self.shelf.store.counts(self.shelf.number)
        assert reserved == len(self.reserved)
        assert held + reserved <= self.slots


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_keep_every_rule(tmp_path: Path, clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    shelf = Shelf(tmp_path, clock, slots=12)
    model = Model(shelf, 12)
    for step in range(250):
        keys = chance.sample(range(20), chance.randint(1, 4))
        action = chance.choice(["reserve", "confirm", "confirm", "release", "read", "end", "delete", "crash"])
        if action == "reserve":
            model.reserve(keys)
        elif action == "confirm" and model.reserved:
            model.confirm(chance.choice(model.reserved))
        elif action == "release" and model.reserved:
            claim = model.reserved.pop(chance.randrange(len(model.reserved)))
            assert shelf.store.release(shelf.number, [SlotVersion(claim.slot, claim.generation)]) == 1
        elif action == "read":
            model.read(keys)
        elif action == "end" and model.reading:
            lease = chance.choice(list(model.reading))
            del model.reading[lease]
            shelf.store.end_reads([lease])
        elif action == "delete":
            there = shelf.held(*keys)
            assert shelf.store.delete(shelf.number, [name(key) for key in keys]) == there
        elif action == "crash" and step % 5 == 0:
            shelf.store._database.close()
            shelf.store = MetadataStore(tmp_path, lease_seconds=LEASE, now=clock)
        model.check()
    shelf.store.close()
