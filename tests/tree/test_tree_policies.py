"""The eviction queue by itself."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import ConfigError
from asynchicache.tree.components import StateComponent, WindowComponent, make_component
from asynchicache.tree.node import Node
from asynchicache.tree.policies import POLICIES, EvictionQueue, Lru, ValueQueue, policy
from asynchicache.types import ALL_PAGES, trailing_pages


def node(serial: int, used: int = 0) -> Node:
    made = Node(None, b"", b"", 1, 1)
    made.serial = serial
    made.worth = [used]
    return made


@pytest.fixture
def queue() -> EvictionQueue:
    return EvictionQueue(0, 0)


def drain(queue: EvictionQueue) -> list[int]:
    found = []
    while (first := queue.pop(0, 1)) is not None:
        found.append(first.serial)
    return found


def test_an_empty_queue_has_no_first_choice(queue):
    assert queue.pop(0, 1) is None
    assert len(queue) == 0


def test_use_after_entry_is_found_out(queue):
    nodes = [node(serial, used=serial) for serial in range(4)]
    for one in nodes:
        queue.add(one)

    nodes[0].worth = [9]

    assert drain(queue) == [1, 2, 3, 0]


def test_equal_keys_go_by_number(queue):
    for serial in (2, 0, 1):
        queue.add(node(serial))

    assert drain(queue) == [0, 1, 2]


def test_coming_and_going_leaves_one_entry(queue):
    one = node(1)
    for _ in range(5):
        queue.add(one)
        queue.discard(one)
    queue.add(one)

    assert queue.entries() == 1
    assert drain(queue) == [1]


def test_what_left_does_not_come_up(queue):
    stays, goes = node(1), node(2)
    queue.add(stays)
    queue.add(goes)
    queue.discard(goes)

    assert drain(queue) == [1]


def test_entries_of_nodes_that_left_do_not_pile_up(queue):
    stays = [node(serial, used=serial) for serial in range(10)]
    for one in stays:
        queue.add(one)
    for serial in range(10, 5000):
        goes = node(serial, used=serial)
        queue.add(goes)
        queue.discard(goes)

    assert queue.entries() < 200
    assert drain(queue) == list(range(10))


def test_a_node_that_was_swept_out_can_come_back(queue):
    back = node(0)
    queue.add(back)
    queue.discard(back)
    for serial in range(1, 200):
        goes = node(serial)
        queue.add(goes)
        queue.discard(goes)

    queue.add(back)

    assert drain(queue) == [0]


def test_the_head_of_the_queue_has_a_score(queue):
    assert queue.score(10, 1) is None
    queue.add(node(1, used=6))
    queue.add(node(2, used=2))
    assert queue.score(10, 2) == 1 / (8 + 2)


def by_value(densities: dict[int, float]) -> ValueQueue:
    """A queue of nodes whose densities are looked up by their serial number."""
    return ValueQueue(0, 0, lambda one: densities[one.serial])


def test_what_loses_little_for_its_bytes_goes_first():
    queue = by_value({1: 1.0, 2: 0.1, 3: 1.0})
    for serial, used in ((1, 90), (2, 90), (3, 1)):
        queue.add(node(serial, used=used))

    assert queue.score(100, 1) == pytest.approx(0.1 / 11)
    assert [queue.pop(100, 1).serial for _ in range(3)] == [2, 3, 1]


def test_what_serves_nobody_goes_before_all_else():
    queue = by_value({1: 0.001, 2: 0.0})
    queue.add(node(1, used=1))
    queue.add(node(2, used=99))

    assert drain(queue) == [2, 1]


def test_a_density_may_change_while_a_node_waits():
    densities = dict.fromkeys(range(3), 1.0)
    queue = by_value(densities)
    nodes = [node(serial, used=1) for serial in range(3)]
    for one in nodes:
        queue.add(one)
    assert queue.score(1, 1) == 1.0
    densities |= {2: 0.01, 0: 3.0}
    queue.add(nodes[2])
    queue.add(nodes[0])
    assert queue.problems() == []
    assert drain(queue) == [2, 1, 0]


def test_densities_are_computed_when_something_is_evicted():
    asked = []
    queue = ValueQueue(0, 0, lambda one: asked.append(one.serial) or 1.0)
    one, other = node(1), node(2)
    for _ in range(5):
        queue.add(one)
    queue.add(other)
    queue.discard(other)
    assert asked == []
    assert drain(queue) == [1]
    assert asked == [1]


@pytest.mark.parametrize("seed", range(4))
def test_a_queue_by_value_agrees_with_a_search(seed: int):
    """Heads alone are compared, so the choice may be up to twice as dense as the best."""
    chance, densities = random.Random(seed), {}
    queue = by_value(densities)
    nodes = [node(serial) for serial in range(60)]
    inside: set[Node] = set()
    for clock in range(1, 3000):
        one = chance.choice(nodes)
        match chance.randrange(5):
            case 0 | 1:
                densities[one.serial] = chance.choice([0.0, 0.01, 0.3, 0.5, 1.0])
                inside.add(one)
                queue.add(one)
            case 2:
                queue.discard(one)
                inside.discard(one)
            case 3:
                one.worth = [clock]
            case 4:
                found = queue.pop(clock, 1)
                scores = {n: densities[n.serial] / (clock - n.worth[0] + 1) for n in inside}
                assert (found is None) == (not inside)
                if found is not None:
                    assert scores[found] <= 2 * min(scores.values())
                    inside.discard(found)
        assert queue.members == inside
        assert queue.problems() == []
        assert queue.entries() < 400


def test_a_worth_may_fall_if_the_queue_is_told(queue):
    nodes = [node(serial, used=serial) for serial in range(1, 4)]
    for one in nodes:
        queue.add(one)

    nodes[2].worth = [0]
    queue.requeue(nodes[2])

    assert drain(queue) == [3, 1, 2]


def test_a_worth_may_fall_while_the_node_is_away(queue):
    first, away = node(1, used=1), node(2, used=2)
    queue.add(first)
    queue.add(away)
    queue.discard(away)

    away.worth = [0]
    queue.requeue(away)
    queue.add(away)

    assert drain(queue) == [2, 1]


def test_queue_agrees_with_sorting(queue):
    generator = random.Random(7)
    nodes = [node(serial) for serial in range(60)]
    inside: set[Node] = set()
    for clock in range(1, 4000):
        one = generator.choice(nodes)
        step = generator.randrange(4)
        if step == 0:
            queue.add(one)
            inside.add(one)
        elif step == 1:
            queue.discard(one)
            inside.discard(one)
        elif step == 2:
            one.worth = [clock]
        else:
            first = min(inside, key=lambda n: (n.worth[0], n.serial), default=None)
            assert queue.pop(0, 1) is first
            inside.discard(first)
        assert queue.members == inside


def test_policies_are_known_by_name():
    assert policy("lru") is Lru
    with pytest.raises(ConfigError, match=r"'mru' is none of \['fifo', 'lru', 'size'\]"):
        policy("mru")
    assert set(POLICIES) == {"size", "lru", "fifo"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.at_all:Mine", "cannot be imported"),
        ("asynchicache.tree.policies:Mine", "cannot be imported"),
        ("asynchicache.tree.policies:policy", "must be a subclass of Policy"),
    ],
)
def test_a_policy_of_ones_own_must_be_a_class(name: str, why: str):
    with pytest.raises(ConfigError, match=why):
        policy(name)


def test_a_policy_of_ones_own_is_named_by_its_module():
    assert policy("asynchicache.tree.policies:Lru") is Lru


def test_components_are_known_by_coverage():
    assert isinstance(make_component(trailing_pages(1), 3, paged=False), StateComponent)
    assert isinstance(make_component(trailing_pages(1), 3, paged=True), WindowComponent)
    assert isinstance(make_component(trailing_pages(4), 3, paged=True), WindowComponent)
    with pytest.raises(ConfigError, match="component 1: no component covers None trailing pages"):
        make_component(ALL_PAGES, 1, paged=True)
    with pytest.raises(ConfigError, match="component 2: no component covers 4 trailing pages with states"):
        make_component(trailing_pages(4), 2, paged=False)
