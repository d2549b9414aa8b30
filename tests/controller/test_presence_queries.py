"""Questions to storage: what others are asking already is not asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

import pytest

from asynchicache.controller.presence_queries import PresenceQueries, PresenceQuery
from asynchicache.controller.storage_pools import Presence
from asynchicache.hashing import PlacedPage, placed_pages
from asynchicache.types import MissReason


class Store:
    """Answers when it is told to, and keeps what it was asked."""

    def __init__(self, *there: bytes) -> None:
        self.there = set(there)
        self.reason = MissReason.NONE
        self.gate = asyncio.Event()
        self.asked: list[tuple[int, list[bytes], bool]] = []
        self.everywhere: list[bool] = []

    async def exists(
        self, number: int, pages: Sequence[PlacedPage], *, fresh: bool = False, everywhere: bool = False
    ) -> Presence:
        digests = [page.digest for page in pages]
        self.asked.append((number, digests, fresh))
        self.everywhere.append(everywhere)
        self.placed = list(pages)
        reason = self.reason
        await self.gate.wait()
        return Presence(bytes(digest in self.there for digest in digests), reason)


class Calls:
    """Runs storage calls, in place of an executor."""

    def __init__(self) -> None:
        self.stopped = False
        self.tasks: list[asyncio.Task[None]] = []

    def call(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]


def path(name: str, length: int = 6) -> list[bytes]:
    """Digests of a path; where names agree from the left, paths do."""
    return [(name[: page + 1].ljust(page + 1, name[-1]) + str(page)).encode() for page in range(length)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def ask(questions: PresenceQueries, *args: object, **kwargs: object) -> asyncio.Task[Presence]:
    """Ask, and let the question get as far as storage."""
    task = asyncio.create_task(questions.ask(*args, **kwargs))  # type: ignore[arg-type]
    await turns()
    return task


@pytest.mark.asyncio
async def test_the_pages_that_are_asked_for_are_answered_in_order() -> None:
    digests = path("a")
    store = Store(digests[2], digests[4])
    store.gate.set()

    answer = await PresenceQueries(store, Calls()).ask(1, digests, range(1, 5))

    assert answer == Presence(b"\0\1\0\1", MissReason.NONE)
    assert store.asked == [(1, digests[1:5], False)]


@pytest.mark.asyncio
@pytest.mark.parametrize(("length", "group", "place"), [(1, 0, 1), (64, 0, 64), (65, 64, 1), (70, 64, 6)])
async def test_tails_lie_where_the_next_page_of_their_path_does(length: int, group: int, place: int) -> None:
    digests, ends = path("a", length), path("b", 4)
    store = Store()
    store.gate.set()

    await PresenceQueries(store, Calls()).ask(0, ends, range(1, 3), before=digests)

    assert store.placed == [PlacedPage(end, digests[group], place) for end in ends[1:3]]
    assert store.placed[:1] == placed_pages([*digests, ends[1]], [length])


@pytest.mark.asyncio
async def test_what_was_answered_is_asked_again_later() -> None:
    digests = path("a")
    store = Store()
    store.gate.set()
    questions = PresenceQueries(store, Calls())

    assert (await questions.ask(0, digests, range(2))).flags == b"\0\0"
    store.there.update(digests)
    assert (await questions.ask(0, digests, range(2))).flags == b"\1\1"
    assert len(store.asked) == 2


@pytest.mark.asyncio
async def test_those_that_ask_at_once_share_one_call_and_their_common_pages() -> None:
    first, second = path("aaab"), path("aaac")
    assert first[:3] == second[:3] != first[3:] != second[3:]
    store = Store(first[0], first[2], second[4])
    store.gate.set()
    questions = PresenceQueries(store, Calls())

    answers = await asyncio.gather(
        questions.ask(0, first, range(4)),
        questions.ask(0, second, range(1, 6)),
        questions.ask(0, first, range(4)),
    )

    assert [answer.flags for answer in answers] == [b"\1\0\1\0", b"\0\1\0\1\0", b"\1\0\1\0"]
    assert store.asked == [(0, [*first[:4], *second[3:6]], False)]


@pytest.mark.asyncio
async def test_only_what_nobody_asks_is_asked_around_what_others_do() -> None:
    digests = path("a", 10)
    store = Store(digests[1], digests[2], digests[4], digests[7], digests[9])
    questions = PresenceQueries(store, Calls())
    later = await ask(questions, 0, digests, range(6, 8))
    earlier = await ask(questions, 0, digests, range(2, 4))

    whole = await ask(questions, 0, digests, range(1, 10))
    store.gate.set()

    assert (await whole).flags == b"\1\1\0\1\0\0\1\0\1"
    assert (await earlier).flags == b"\1\0"
    assert (await later).flags == b"\0\1"
    assert [asked for _, asked, _ in store.asked] == [
        digests[6:8],
        digests[2:4],
        [digests[1], *digests[4:6], *digests[8:10]],
    ]


@pytest.mark.asyncio
async def test_who_waits_keeps_what_is_answered_meanwhile_of_its_own_path() -> None:
    first, second = path("aaab"), path("aaac")
    store = Store(first[0], first[2], second[4])
    store.gate.set()
    questions = PresenceQueries(store, Calls())
    await questions.ask(0, first, range(6))
    answered: list[PresenceQuery] = []
    with questions.listen(second, answered):
        assert not answered  # answers of before are too old
        await questions.ask(0, first, range(1, 6))
        await questions.ask(1, first, range(2))
        await questions.ask(0, path("b"), range(4))
        del store.asked[:]

        answer = await questions.ask(0, second, range(6), answered=answered)

    assert answer.flags == b"\1\0\1\0\1\0"
    assert store.asked == [(0, [second[0], *second[3:6]], False)]
    await questions.ask(0, second, range(1))
    assert len(answered) == 4  # what it asked itself, too; nothing once it has stopped listening


@pytest.mark.asyncio
async def test_who_waits_asks_again_for_what_storage_failed_to_answer() -> None:
    digests = path("a")
    store = Store(*digests)
    store.reason = MissReason.STORAGE_FAILED
    store.gate.set()
    questions = PresenceQueries(store, Calls())
    answered: list[PresenceQuery] = []
    with questions.listen(digests, answered):
        await questions.ask(0, digests, range(2))
        assert not answered


@pytest.mark.asyncio
async def test_a_fresh_question_is_answered_by_fresh_ones_alone_and_answers_all() -> None:
    digests = path("a")
    store = Store(digests[1], digests[3])
    questions = PresenceQueries(store, Calls())
    remembered = await ask(questions, 0, digests, range(3))
    fresh = await ask(questions, 0, digests, range(1, 5), fresh=True)
    both = await ask(questions, 0, digests, range(5))
    other = await ask(questions, 0, digests, range(2, 5), fresh=True)
    store.gate.set()

    assert (await remembered).flags == b"\0\1\0"
    assert (await fresh).flags == b"\1\0\1\0"
    assert (await both).flags == b"\0\1\0\1\0"
    assert (await other).flags == b"\0\1\0"
    assert store.asked == [(0, digests[:3], False), (0, digests[1:5], True)]


@pytest.mark.asyncio
async def test_a_question_everywhere_is_shared_with_its_kind_alone() -> None:
    digests = path("a")
    store = Store(digests[1])
    questions = PresenceQueries(store, Calls())
    answered = list[PresenceQuery]()
    with questions.listen(digests, answered):
        everywhere = [await ask(questions, 0, digests, range(3), everywhere=True) for _ in range(2)]
        fresh = await ask(questions, 0, digests, range(3), fresh=True)
        store.gate.set()
        assert [(await one).flags for one in (*everywhere, fresh)] == [b"\0\1\0"] * 3
        assert store.everywhere == [True, False]
        await questions.ask(0, digests, range(3), answered=[one for one in answered if one.everywhere])
    assert store.everywhere == [True, False, False]


@pytest.mark.asyncio
async def test_components_are_asked_for_apart() -> None:
    digests = path("a")
    store = Store(*digests)
    questions = PresenceQueries(store, Calls())
    tasks = [await ask(questions, number, digests, range(2)) for number in (0, 1)]
    store.gate.set()

    assert [(await task).flags for task in tasks] == [b"\1\1", b"\1\1"]
    assert [number for number, _, _ in store.asked] == [0, 1]


@pytest.mark.asyncio
async def test_the_first_trouble_is_what_an_answer_tells() -> None:
    digests = path("a")
    store = Store(*digests)
    questions = PresenceQueries(store, Calls())
    calm = await ask(questions, 0, digests, range(1))
    store.reason = MissReason.DEADLINE
    late = await ask(questions, 0, digests, range(1, 2))
    store.reason = MissReason.STORAGE_FAILED
    whole = await ask(questions, 0, digests, range(3))
    store.gate.set()

    assert (await calm).reason is MissReason.NONE
    assert (await late).reason is MissReason.DEADLINE
    assert await whole == Presence(b"\1\1\1", MissReason.DEADLINE)


@pytest.mark.asyncio
async def test_a_question_goes_on_for_others_when_whoever_asked_it_gives_up() -> None:
    digests = path("a")
    store = Store(digests[1], digests[4])
    questions = PresenceQueries(store, Calls())
    first = await ask(questions, 0, digests, range(4))
    second = await ask(questions, 0, digests, range(1, 6))
    first.cancel()
    await turns()
    store.gate.set()

    assert (await second).flags == b"\1\0\0\1\0"
    assert first.cancelled()
    assert [asked for _, asked, _ in store.asked] == [digests[:4], digests[4:6]]


@pytest.mark.asyncio
async def test_who_asks_for_others_too_may_give_up() -> None:
    """The first of those that ask at once makes the call for all of them."""
    one, other = path("a"), path("b")
    store = Store(*one, *other)
    questions = PresenceQueries(store, Calls())
    tasks = [asyncio.create_task(questions.ask(0, digests, range(2))) for digests in (one, other)]
    await turns()
    tasks[0].cancel()
    await turns()
    store.gate.set()

    assert (await tasks[1]).flags == b"\1\1"
    assert [asked for _, asked, _ in store.asked] == [[*one[:2], *other[:2]]]


@pytest.mark.asyncio
@pytest.mark.parametrize("later", range(8))
async def test_who_gives_up_at_once_leaves_no_question_that_nobody_answers(later: int) -> None:
    """However far its call has come, others that ask the same have an answer."""
    digests = path("a")
    store = Store(digests[0])
    store.gate.set()
    questions = PresenceQueries(store, Calls())
    first = asyncio.create_task(questions.ask(0, digests, range(2)))
    await turns(later)
    first.cancel()

    async with asyncio.timeout(5):
        assert (await questions.ask(0, digests, range(2))).flags == b"\1\0"


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [0, 20])
async def test_a_call_that_the_end_of_the_cache_cancels_answers_that_nothing_is_known(before: int) -> None:
    """Also one that had not begun."""
    calls, digests = Calls(), path("a")
    questions = PresenceQueries(Store(*digests), calls)
    first = asyncio.create_task(questions.ask(0, digests, range(2)))
    await asyncio.sleep(0)
    await turns(before)
    calls.stopped = True
    calls.tasks[0].cancel()

    assert await first == Presence(bytes(2), MissReason.CLOSED)
    assert await questions.ask(0, digests, range(3)) == Presence(bytes(3), MissReason.CLOSED)
    assert len(calls.tasks) == 1


@pytest.mark.asyncio
async def test_a_call_that_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, digests, store = Calls(), path("a"), Store()

    async def fail(*args: object, **kwargs: object) -> Presence:
        raise OSError("no route")

    monkeypatch.setattr(store, "exists", fail)
    answer = await PresenceQueries(store, calls).ask(0, digests, range(2))

    assert answer == Presence(bytes(2), MissReason.STORAGE_FAILED)
    assert isinstance(calls.tasks[0].exception(), OSError)


@pytest.mark.asyncio
async def test_who_waits_for_the_call_of_another_may_give_up() -> None:
    one, other = path("a"), path("b")
    store = Store(*one)
    questions = PresenceQueries(store, Calls())
    tasks = [asyncio.create_task(questions.ask(0, digests, range(2))) for digests in (one, other)]
    await turns()
    tasks[1].cancel()
    await turns()
    again = await ask(questions, 0, other, range(2))
    store.gate.set()

    assert (await tasks[0]).flags == b"\1\1"
    assert (await again).flags == b"\0\0"
    assert len(store.asked) == 1, "its question is still in flight"


@pytest.mark.asyncio
async def test_three_calls_at_once_and_the_rest_together() -> None:
    paths = [path(name) for name in "abcdef"]
    store = Store(*paths[4])
    questions = PresenceQueries(store, Calls())
    tasks = [await ask(questions, 0, digests, range(2)) for digests in paths]
    assert [asked for _, asked, _ in store.asked] == [digests[:2] for digests in paths[:3]]
    apart = await ask(questions, 0, paths[0], range(1), fresh=True)
    assert len(store.asked) == 4, "another kind has calls of its own"
    store.gate.set()

    assert [(await task).flags for task in (*tasks, apart)] == [b"\0\0"] * 4 + [b"\1\1", b"\0\0", b"\0"]
    assert [asked for _, asked, _ in store.asked][4:] == [[d for digests in paths[3:] for d in digests[:2]]]
