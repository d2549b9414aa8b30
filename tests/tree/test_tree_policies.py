"""The eviction queue by itself."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import ConfigError
from asynchicache.tree.components import StateComponent, WindowComponent, make_component
from asynchicache.tree.node import Node
from asynchicache.tree.policies import POLICIES, EvictionQueue, Lru, policy
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
    while (first := queue.pop()) is not None:
        found.append(first.serial)
    return found


def test_an_empty_queue_has_no_first_choice(queue):
    assert queue.pop() is None
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

    assert len(queue.entries()) == 1
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

    assert len(queue.entries()) < 200
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


def test_a_key_may_fall_if_the_queue_is_told(queue):
    nodes = [node(serial, used=serial) for serial in range(1, 4)]
    for one in nodes:
        queue.add(one)

    nodes[2].worth = [0]
    queue.hurry(nodes[2])

    assert drain(queue) == [3, 1, 2]


def test_a_key_may_fall_while_the_node_is_away(queue):
    first, away = node(1, used=1), node(2, used=2)
    queue.add(first)
    queue.add(away)
    queue.discard(away)

    away.worth = [0]
    queue.hurry(away)
    queue.add(away)

    assert drain(queue) == [2, 1]


def test_hurrying_nodes_that_were_never_candidates_leaves_no_entries(queue):
    for serial in range(100):
        queue.hurry(node(serial))

    assert queue.entries() == []


def test_queue_agrees_with_sorting(queue):
    generator = random.Random(7)
    nodes = [node(serial) for serial in range(60)]
    inside: set[Node] = set()
    for clock in range(1, 4000):
        one = generator.choice(nodes)
        step = generator.randrange(5)
        if step == 0:
            queue.add(one)
            inside.add(one)
        elif step == 1:
            queue.discard(one)
            inside.discard(one)
        elif step == 2:
            one.worth = [clock]
        elif step == 3:
            one.worth = [0]
            queue.hurry(one)
        else:
            first = min(inside, key=lambda n: (n.worth[0], n.serial), default=None)
            assert queue.pop() is first
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
