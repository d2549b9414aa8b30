"""What the planner reads from storage: how far, and what is kept meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from asynchicache.hashing import page_digests, placed_pages
from asynchicache.planner.readings import Reading, ReadResult, StorageQuery, StorageRead
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, place_of
from asynchicache.types import MissReason, Outcome, Tier, WritePolicy
from controller.simulation import Simulation

PROMPT = list(range(1, 18))
PAGES = 8
"""Whole pages of the prompt before its last token."""


@pytest.fixture
def simulations() -> Iterator[list[Simulation]]:
    found: list[Simulation] = []
    yield found
    for sim in found:
        for sequence in list(sim.live):
            sim.close(sequence)
        sim.settle()
        sim.verify()


def served(sim: Simulation, length: int) -> None:
    """Serve the beginning of the prompt, and let everything end."""
    sequence = sim.open(PROMPT[:length])
    sim.load(sequence)
    assert sim.compute(sequence, length)
    sim.close(sequence)
    sim.settle()


def asked(sim: Simulation) -> StorageQuery:
    query = sim.planner.prefetches.make_query(sim.open(PROMPT).tokens, b"")
    assert query is not None
    return query


def test_a_reading_is_as_long_as_the_host(simulations: list[Simulation]) -> None:
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 5)})
    simulations.append(sim)
    served(sim, 4)
    query = asked(sim)
    choice = sim.planner.prefetches.choose(query, {0: b"\1" * PAGES})
    sim.carry_out(choice.backups)

    assert choice.reading is not None
    assert (choice.reading.target, choice.reason, choice.reach) == (5, MissReason.HOST_CAPACITY, 8)
    answered(sim, choice.reading, kv=[Outcome.MISS] * 3)  # two pages are there, and stay


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_pages_on_the_device_stay_while_storage_is_asked(
    simulations: list[Simulation], policy: WritePolicy
) -> None:
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 64)}, policy=policy)
    simulations.append(sim)
    served(sim, 4)
    query = asked(sim)
    sim.settle()
    inventory = sim.planner.inventory
    held = inventory.free[FULL_DEVICE].held
    inventory.evict(FULL_DEVICE, 64, dirty=True)
    inventory.evict(FULL_HOST, 64, dirty=True)

    assert inventory.free[FULL_DEVICE].held == held
    assert inventory.free[FULL_HOST].held == 0, "what is on the device needs no copy on the host to be kept"
    sim.planner.prefetches.release(query)


def test_a_state_that_storage_was_not_asked_for_is_not_there(simulations: list[Simulation]) -> None:
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (4, 0)})
    simulations.append(sim)
    query = asked(sim)

    choice = sim.planner.prefetches.choose(query, {0: b"\1" * PAGES})

    assert (choice.reading, choice.reason, choice.backups) == (None, MissReason.STATE, [])
    sim.planner.prefetches.release(query)


# How far, and from where


STATES = 1


def roomy(simulations: list[Simulation], *, mamba: bool = False, swa: int = 0, host: int = 64) -> Simulation:
    slots = {"kv": (64, host)}
    if mamba:
        slots["mamba"] = (8, 8)
    if swa:
        slots["swa"] = (16, 16)
    sim = Simulation(
        random.Random(0), states=mamba, windows={"swa": swa} if swa else {}, slots=slots,
        policy=WritePolicy.WRITE_BACK,
    )  # fmt: skip
    simulations.append(sim)
    return sim


def chosen(sim: Simulation, query: StorageQuery, *present: bytes) -> Reading:
    choice = sim.planner.prefetches.choose(query, dict(enumerate(present)))
    sim.carry_out(choice.backups)
    assert choice.reading is not None
    return choice.reading


def begun(sim: Simulation) -> list[StorageRead]:
    """All reads that can begin."""
    return list(iter(sim.planner.prefetches.next_read, None))


def delivered(sim: Simulation, read: StorageRead, outcomes: list[Outcome] | None = None) -> list[ReadResult]:
    results = sim.planner.prefetches.deliver(read, outcomes or [Outcome.HIT] * len(read.pages))
    for one in results:
        sim.carry_out(one.backups)
    return results


def answered(sim: Simulation, reading: Reading, **outcomes: list[Outcome]) -> list[ReadResult]:
    """What comes of all that can begin, each pool in one read; all arrives, but for pools that are named."""
    names = sim.planner.inventory.names
    results = [
        one for read in begun(sim) for one in delivered(sim, read, outcomes.get(names[read.component_id]))
    ]
    assert reading in [one.reading for one in results]
    return results


def test_what_lacks_is_what_could_be_restored_beyond_what_is_here(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    reader = sim.planner.prefetches
    tokens = sim.open(PROMPT).tokens

    size = sim.planner.inventory.page_size
    assert reader.missing_tokens(tokens, b"") == 8 * size
    served(sim, 6)
    assert reader.missing_tokens(tokens, b"") == 5 * size
    assert reader.missing_tokens(tokens[:6], b"") == 0, "a token is left to compute"
    assert reader.missing_tokens(tokens[:7], b"") == 0
    assert reader.missing_tokens(tokens[:9], b"") == size
    assert reader.make_query(tokens[:7], b"") is None
    assert reader.make_query(tokens[:8], b"") is None
    query = reader.make_query(tokens[:9], b"")
    assert query is not None
    assert (query.pages, query.matched_pages, query.memory_pages) == (4, 3, 3)
    reader.release(query)


def test_a_host_without_slots_asks_for_nothing(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, host=0)
    tokens = sim.open(PROMPT).tokens

    assert not sim.planner.prefetches.can_read(0)
    assert sim.planner.prefetches.missing_tokens(tokens, b"") == 0
    assert sim.planner.prefetches.make_query(tokens, b"") is None


def test_digests_are_computed_once(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    served(sim, 6)
    reader, tokens = sim.planner.prefetches, sim.open(PROMPT).tokens
    chain = page_digests(tokens[:16], 2, b"")

    assert reader.known_digests(tokens, b"") == []
    query = reader.make_query(tokens, b"")
    assert query is not None
    assert query.digests == chain
    assert reader.known_digests(tokens, b"") == chain[:3], "what is in the tree keeps its own"
    assert reader.known_digests(tokens[:5], b"") == chain[:2]
    again = reader.make_query(tokens, b"")
    assert again is not None
    assert again.digests == chain
    for one in (query, again):
        reader.release(one)


@pytest.mark.parametrize(("window", "first"), [(1, 3), (2, 2), (3, 1), (8, 0)])
def test_the_first_page_of_a_window_that_a_longer_prefix_may_need(
    simulations: list[Simulation], window: int, first: int
) -> None:
    sim = roomy(simulations, swa=window)
    served(sim, 6)
    query = asked(sim)

    assert query.matched_pages == 3
    assert sim.planner.prefetches.first_page(query, 1) == first
    sim.planner.prefetches.release(query)


HAS = b"\1" * PAGES


@pytest.mark.parametrize(
    ("kv", "mamba", "target", "pages"),
    [
        (HAS, HAS, 8, {0: [3, 4, 5, 6, 7], 1: [7]}),
        (HAS, b"\0\0\0\0\0\1\0\0", 6, {0: [3, 4, 5], 1: [5]}),
        (b"\0\0\0\1\1\0\1\1", HAS, 5, {0: [3, 4], 1: [4]}),
        (b"\0\0\0\1", HAS, 4, {0: [3], 1: [3]}),
    ],
    ids=["all", "one state", "a gap", "a short answer"],
)
def test_the_longest_prefix_that_memory_and_storage_have_together_is_read(
    simulations: list[Simulation], kv: bytes, mamba: bytes, target: int, pages: dict[int, list[int]]
) -> None:
    sim = roomy(simulations, mamba=True)
    served(sim, 6)
    query = asked(sim)
    assert (query.matched_pages, query.memory_pages, bytes(query.resident[STATES])) == (3, 3, b"\0\0\1")

    read = chosen(sim, query, kv, mamba)

    assert (read.target, read.pages, read.joined) == (target, pages, False)
    reads = begun(sim)
    assert {one.component_id: len(one.slots) for one in reads} == {n: len(p) for n, p in pages.items()}
    assert reads[0].placed == placed_pages(query.digests, pages[0])
    (gained,) = [result for one in reads for result in delivered(sim, one)]
    assert (gained.reading, gained.pages) == (read, target)
    assert gained.reason is MissReason.NONE
    assert sim.open(PROMPT).matched_pages == target


@pytest.mark.parametrize(
    ("kv", "mamba", "reason"),
    [
        (b"", b"", MissReason.COLD),
        (b"\1\1\1\0\1\1\1\1", HAS, MissReason.COLD),
        (HAS, b"\1\1\1\0\0\0\0\0", MissReason.STATE),
        (b"\0\0\0\1\0\0\0\0", b"\0\0\0\0\1", MissReason.STATE),
    ],
)
def test_why_nothing_is_read(
    simulations: list[Simulation], kv: bytes, mamba: bytes, reason: MissReason
) -> None:
    sim = roomy(simulations, mamba=True)
    served(sim, 6)
    query = asked(sim)

    choice = sim.planner.prefetches.choose(query, {0: kv, 1: mamba})
    assert (choice.reading, choice.reason, choice.backups) == (None, reason, [])
    sim.planner.prefetches.release(query)


def test_the_pool_that_reaches_least_is_why(simulations: list[Simulation]) -> None:
    slots = {"kv": (64, 64), "mamba": (8, 8), "swa": (16, 16)}
    sim = Simulation(random.Random(0), windows={"swa": 2}, slots=slots)
    simulations.append(sim)
    query = asked(sim)
    choose = sim.planner.prefetches.choose

    found = [
        choose(query, {0: HAS, 1: mamba, 2: swa}).reason
        for mamba, swa in ((b"\0\0\0\0\1", b"\0" * 8), (b"\0" * 8, b"\0\0\0\1\1"), (b"\0\1", b"\0\0\1\1"))
    ]
    assert found == [MissReason.WINDOW, MissReason.STATE, MissReason.STATE]
    sim.planner.prefetches.release(query)


def test_a_window_is_read_from_its_first_page_that_is_not_here(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, swa=3)
    served(sim, 8)
    sim.planner.inventory.evict(place_of(1, Tier.DEVICE), 1, dirty=True)
    query = asked(sim)
    assert bytes(query.resident[1]) == b"\0\1\1\1"

    read = chosen(sim, query, b"\1" * 5, HAS)
    assert (read.target, read.pages) == (5, {0: [4], 1: [4]})
    (gained,) = answered(sim, read)
    assert gained.pages == 5


@pytest.mark.parametrize(
    ("outcomes", "pages", "reason"),
    [
        ([Outcome.MISS] * 5, 3, MissReason.COLD),
        ([Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT], 5, MissReason.COLD),
        ([Outcome.HIT] * 4 + [Outcome.CORRUPT], 7, MissReason.CORRUPT),
        ([Outcome.TIMEOUT, Outcome.MISS, Outcome.FAILED, Outcome.HIT, Outcome.HIT], 3, MissReason.DEADLINE),
        ([Outcome.HIT, Outcome.MISS, Outcome.FAILED, Outcome.HIT, Outcome.HIT], 4, MissReason.STORAGE_FAILED),
        (
            [Outcome.HIT, Outcome.MISS, Outcome.REJECTED, Outcome.HIT, Outcome.HIT],
            4,
            MissReason.STORAGE_FAILED,
        ),
        ([Outcome.HIT, Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.HIT, Outcome.HIT], 4, MissReason.CORRUPT),
    ],
)
def test_what_comes_of_a_read_that_falls_short(
    simulations: list[Simulation], outcomes: list[Outcome], pages: int, reason: MissReason
) -> None:
    sim = roomy(simulations)
    served(sim, 6)
    chosen(sim, asked(sim), HAS)
    (read,) = begun(sim)
    (gained,) = delivered(sim, read, outcomes)
    sim.planner.prefetches.finish(read)

    assert (gained.pages, gained.reason) == (pages, reason)
    assert sim.open(PROMPT).matched_pages == pages
    host = sim.planner.inventory.free[FULL_HOST]
    assert host.held == sum(len(node.slots_at(FULL_HOST)) for node in sim.planner.inventory.tree.nodes())


def test_slots_of_a_late_page_stay_with_the_read_until_it_is_finished(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    chosen(sim, asked(sim), HAS)
    (read,) = begun(sim)
    host = sim.planner.inventory.free[FULL_HOST]
    outcomes = [Outcome.HIT] * 3 + [Outcome.MISS, Outcome.TIMEOUT] + [Outcome.HIT] * 3

    (gained,) = delivered(sim, read, outcomes)

    assert gained.pages == 3
    assert host.held == 3 + 1
    sim.verify()
    query = asked(sim)
    again = sim.planner.prefetches.choose(query, {0: HAS})  # the late page is read by nobody now
    assert (again.reading.target, again.reason) == (4, MissReason.DEADLINE)
    answered(sim, again.reading)
    sim.planner.prefetches.finish(read)
    assert (host.held, host.quarantined) == (4, 0)


def test_slots_that_an_engine_may_write_to_for_ever_are_never_lent_again(
    simulations: list[Simulation],
) -> None:
    sim = roomy(simulations)
    chosen(sim, asked(sim), HAS)
    (read,) = begun(sim)
    delivered(sim, read, [Outcome.TIMEOUT] * 8)
    sim.planner.prefetches.finish(read, safe=False)

    host = sim.planner.inventory.free[FULL_HOST]
    assert (host.held, host.quarantined) == (0, 8)


def test_what_storage_brought_is_known_to_be_there(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, mamba=True)
    answered(sim, chosen(sim, asked(sim), HAS, HAS))
    assert [(node.pages, node.stored) for node in sim.planner.inventory.tree.nodes()] == [(8, 0b11)]


def test_what_came_while_storage_was_forgotten_is_not(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, mamba=True)
    read = chosen(sim, asked(sim), HAS, HAS)
    sim.planner.backups.forget_stored()

    assert answered(sim, read)[0].pages == 8
    assert [node.stored for node in sim.planner.inventory.tree.nodes()] == [0]


def test_what_others_computed_meanwhile_is_not_put_in_twice(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, mamba=True)
    chosen(sim, asked(sim), HAS, HAS)
    reads = begun(sim)
    served(sim, 10)
    inventory = sim.planner.inventory
    for node in list(inventory.tree.nodes()):
        sim.carry_out(sim.planner.backups.backup(node))
    sim.settle()

    (gained,) = [result for one in reads for result in delivered(sim, one)]

    assert gained.pages == 8
    assert inventory.free[FULL_HOST].held == 8
    assert inventory.free[place_of(STATES, Tier.HOST)].held == 2
    assert sorted(node.end for node in inventory.tree.nodes()) == [5, 8]


@pytest.mark.parametrize("came", [Outcome.HIT, Outcome.MISS])
def test_a_state_is_put_in_where_others_published_the_pages_on_the_device_only(
    simulations: list[Simulation], came: Outcome
) -> None:
    sim = roomy(simulations, mamba=True)
    chosen(sim, asked(sim), HAS[:3], b"\0\0\1")
    full, state = begun(sim)
    served(sim, 7)  # under write-back, and without a state

    assert delivered(sim, full, [Outcome.HIT, came, Outcome.HIT]) == []
    (gained,) = delivered(sim, state)
    sim.settle()

    assert gained.pages == 3
    assert sim.open(PROMPT).matched_pages == 3
    assert sim.planner.inventory.free[FULL_HOST].held == 3


def test_a_path_that_cannot_be_on_the_host_keeps_what_follows_off_it(simulations: list[Simulation]) -> None:
    sim = roomy(simulations, host=5)
    served(sim, 6)
    query = asked(sim)
    inventory = sim.planner.inventory
    taken = inventory.free[FULL_HOST].allocate(3)  # two are left for three pages
    choice = sim.planner.prefetches.choose(query, {0: HAS})

    assert (choice.reading, choice.reason) == (None, MissReason.HOST_CAPACITY)
    inventory.free[FULL_HOST].release(taken)
    sim.planner.prefetches.release(query)


# Side by side


def shorter(sim: Simulation, tokens: list[int] = PROMPT[:11]) -> StorageQuery:
    query = sim.planner.prefetches.make_query(sim.open(tokens).tokens, b"")
    assert query is not None
    return query


def test_pages_are_read_once_and_everyone_waits_for_his_own(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    reader = sim.planner.prefetches
    long, short = chosen(sim, asked(sim), HAS), chosen(sim, shorter(sim), HAS)
    assert (long.pages, short.pages) == ({0: [*range(8)]}, {0: [*range(5)]})

    reads = [reader.next_read({0: 3}) for _ in range(4)]
    assert [one and len(one.pages) for one in reads] == [3, 3, 2, None]
    assert (long.joined, short.joined) == (False, True)
    assert delivered(sim, reads[1]) == []
    assert [(one.reading, one.pages) for one in delivered(sim, reads[0])] == [(short, 5)]
    assert [(one.reading, one.pages) for one in delivered(sim, reads[2])] == [(long, 8)]
    assert sim.planner.inventory.free[FULL_HOST].held == 8


def test_sequences_that_part_share_what_they_have_in_common(simulations: list[Simulation]) -> None:
    """They part after three pages, of which both have two in memory already."""
    sim = roomy(simulations)
    served(sim, 4)
    first = chosen(sim, shorter(sim, [*PROMPT[:6], *range(50, 61)]), HAS)
    second = chosen(sim, asked(sim), HAS)
    assert (first.pages, second.pages) == ({0: [2, 3, 4, 5, 6, 7]}, {0: [2, 3, 4, 5, 6, 7]})
    reads = begun(sim)
    assert [len(one.pages) for one in reads] == [6, 5]
    assert [(one.reading, one.pages) for read in reads for one in delivered(sim, read)] == [
        (first, 8),
        (second, 8),
    ]


def test_what_failed_to_come_failed_for_all_who_waited(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    first, second = chosen(sim, shorter(sim), HAS), chosen(sim, asked(sim), HAS)
    reads = begun(sim)
    outcomes = [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.HIT, Outcome.HIT]
    assert [(one.reading, one.pages, one.reason) for one in delivered(sim, reads[0], outcomes)] == [
        (first, 2, MissReason.COLD)
    ]
    assert [(one.reading, one.pages, one.reason) for one in delivered(sim, reads[1])] == [
        (second, 2, MissReason.COLD)
    ]
    assert sim.planner.inventory.free[FULL_HOST].held == 2


def test_pages_without_a_state_are_put_in_for_those_who_need_none_there(
    simulations: list[Simulation],
) -> None:
    sim = roomy(simulations, mamba=True)
    first, second = chosen(sim, shorter(sim), HAS, HAS), chosen(sim, asked(sim), HAS, HAS)
    gained = answered(sim, second, mamba=[Outcome.MISS])
    assert [(one.reading, one.pages) for one in gained] == [(first, 0), (second, 0)]
    gained = answered(sim, chosen(sim, asked(sim), b"", HAS))
    assert [one.pages for one in gained] == [8], "their pages are there, and only the state is read again"


def test_what_a_reading_stands_on_stays_while_it_waits(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    chosen(sim, shorter(sim), HAS)
    second = chosen(sim, asked(sim), HAS)
    one, other = begun(sim)
    delivered(sim, one)
    sim.planner.inventory.evict(FULL_HOST, 64, dirty=True)

    assert sim.planner.inventory.free[FULL_HOST].held == 5 + 3
    assert [(one.reading, one.pages) for one in delivered(sim, other)] == [(second, 8)]


# Who waits


def test_what_nobody_waits_for_does_not_begin(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    reader = sim.planner.prefetches
    reading = chosen(sim, asked(sim), HAS)
    read = reader.next_read({0: 3})
    assert read is not None

    assert reader.abandon(reading) == []
    assert reader.next_read() is None
    assert [one.pages for one in delivered(sim, read)] == [3], "what had begun is there for others"
    assert (sim.planner.inventory.free[FULL_HOST].held, reader.in_flight) == (3, [])


def test_what_one_gave_up_another_reads(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    reader = sim.planner.prefetches
    first, second = chosen(sim, asked(sim), HAS), chosen(sim, shorter(sim), HAS)
    read = reader.next_read({0: 3})
    assert read is not None
    assert reader.abandon(first) == []

    rest = reader.next_read()
    assert rest is not None
    assert rest.placed == placed_pages(second.query.digests, [3, 4])
    assert [(one.reading, one.pages) for one in delivered(sim, rest)] == []
    assert {one.reading for one in delivered(sim, read)} == {first, second}
    assert sim.open(PROMPT).matched_pages == 5


def test_who_goes_on_has_what_arrived_in_order(simulations: list[Simulation]) -> None:
    sim = roomy(simulations)
    reader = sim.planner.prefetches
    reading = chosen(sim, asked(sim), HAS)
    first, gap, third, last = (reader.next_read({0: 2}) for _ in range(4))
    assert first is not None
    assert gap is not None
    assert third is not None
    assert last is not None
    for read in (first, third):
        assert delivered(sim, read) == []
    sim.carry_out(reader.settle(reading))
    assert sim.open(PROMPT).matched_pages == 2
    delivered(sim, gap)
    sim.carry_out(reader.settle(reading))
    assert sim.open(PROMPT).matched_pages == 6
    assert [one.pages for one in delivered(sim, last)] == [8]


def test_what_is_read_ahead_is_bounded_and_in_order_of_turn(simulations: list[Simulation]) -> None:
    """Sixteen slots, of which fourteen may hold what waits to be used."""
    sim = roomy(simulations, host=16)
    reader = sim.planner.prefetches
    prompts = [[n * 100 + token for token in PROMPT] for n in range(3)]
    requests = [sim.open(prompt) for prompt in prompts]
    for request in requests:
        query = reader.make_query(request.tokens, b"")
        assert query is not None
        assert reader.choose(query, {0: HAS}, request).reading is not None
    reads = begun(sim)
    assert [len(read.pages) for read in reads] == [8, 6]
    for read in reads:
        for result in delivered(sim, read):
            assert result.reading.request is requests[0]
    sim.planner.rematch(requests[0])
    sim.planner.rest(requests[0])
    assert begun(sim) == [], "what the first waits with stays"
    assert reader.in_flight[0].lacks_room

    reader.used(requests[0])
    sim.close(requests[0])
    reads += begun(sim)
    assert [len(read.pages) for read in reads[2:]] == [2, 6]
    for reading in list(reader.in_flight):
        reader.abandon(reading)
    for read in reads[2:]:
        delivered(sim, read)
    assert reader.in_flight == []


def test_pages_that_were_published_during_a_read_get_digests_with_those_that_it_brings(
    simulations: list[Simulation],
) -> None:
    sim = roomy(simulations)
    chosen(sim, asked(sim), b"\1" * PAGES)
    (read,) = begun(sim)
    served(sim, 4)
    delivered(sim, read)
    assert sim.planner.inventory.verify() == []
