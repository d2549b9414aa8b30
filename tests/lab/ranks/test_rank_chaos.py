"""The seeded search over groups of ranks is clean, and each rule that is switched off is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import pytest

from asynchicache import parts
from asynchicache.pools.sizing import plan_slots
from asynchicache.ranks import worker
from asynchicache.ranks.follower import RankFollower
from asynchicache.ranks.group_work import GroupStorage, GroupTransfers
from asynchicache.ranks.handshake import Members
from asynchicache.ranks.leader import Answers, RankAnswer, RankLeader
from asynchicache.ranks.messages import (
    EndAnswer,
    EpochEntry,
    Hello,
    LogEntry,
    OutcomesAnswer,
    PoolPages,
    pack_outcomes,
    unpack_outcomes,
)
from asynchicache.ranks.sharing import HostShare
from asynchicache.transfer.plan import Direction
from asynchicache.types import Outcome
from asynchicache_lab.ranks.chaos import draw_rank_script, run_rank_script, search_ranks
from lab.chaos.known_seeds import KNOWN, known_first

Plant = Callable[[pytest.MonkeyPatch], None]

MAX_SEEDS = 500
"""Seeds in which each planted bug must be found."""
FEW_SEEDS = 40


def test_the_search_is_clean() -> None:
    found = search_ranks(range(1000, 1030), jobs=1)
    assert found.violations == {}
    assert found.requests > 200
    assert found.lost > 0, "groups are lost on purpose too"
    assert all(count > 0 for count in found.tiers.values()), "hits come from every tier"


def test_the_same_seed_gives_the_same_run() -> None:
    reports = [run_rank_script(draw_rank_script(11)) for _ in range(2)]
    assert reports[0] == reports[1]


def the_leader_alone_ends_a_copy(patch: pytest.MonkeyPatch) -> None:
    """R3 is off."""

    def submit(self: GroupTransfers, operation, *, after=(), reads=(), done, on_wait=None):  # type: ignore[no-untyped-def]
        if not operation.empty and self._leader.failure is None:
            self._leader.copy(operation, self._seconds, lambda error: None)
        return self._here.submit(operation, after=after, reads=reads, done=done, on_wait=on_wait)

    patch.setattr(GroupTransfers, "submit", submit)


def copies_do_not_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    """R2 is off."""
    patch.setattr(RankFollower, "_computed", lambda self: ())


def a_copy_is_answered_before_it_has_landed(patch: pytest.MonkeyPatch) -> None:
    copy = RankFollower._copy

    def early(self: RankFollower, entry, after) -> None:  # type: ignore[no-untyped-def]
        self._copied(entry.operation, None)
        with patch.context() as quiet:
            quiet.setattr(RankFollower, "_copied", lambda self, operation, error: None)
            copy(self, entry, after)

    patch.setattr(RankFollower, "_copy", early)


def the_leaders_outcomes_count(patch: pytest.MonkeyPatch) -> None:
    """R4 is off."""
    patch.setattr(GroupStorage, "_merged", lambda self, here, index, answers: here)


def change_answers(patch: pytest.MonkeyPatch, call: str, change: Callable[[Outcome], Outcome]) -> None:
    """Let the leader take other outcomes for those of its followers."""
    ask = getattr(RankLeader, call)

    def changed(one: RankAnswer) -> RankAnswer:
        answer = one.answer
        if isinstance(answer, OutcomesAnswer):
            outcomes = [pack_outcomes(map(change, unpack_outcomes(some))) for some in answer.outcomes]
            answer = msgspec.structs.replace(answer, outcomes=outcomes)
        return RankAnswer(answer, one.late)

    async def asked(self: RankLeader, pages: Sequence[PoolPages], seconds: float) -> Answers:
        answers: Answers = await ask(self, pages, seconds)
        return {rank: changed(one) for rank, one in answers.items()}

    patch.setattr(RankLeader, call, asked)


def the_leaders_reads_count(patch: pytest.MonkeyPatch) -> None:
    """R4 is off for reads: a page has arrived once the leader has its part."""
    change_answers(patch, "read", lambda one: Outcome.HIT)


def late_reads_of_followers_have_arrived(patch: pytest.MonkeyPatch) -> None:
    change_answers(patch, "read", lambda one: Outcome.HIT if one is Outcome.TIMEOUT else one)


def late_slots_of_followers_are_free(patch: pytest.MonkeyPatch) -> None:
    """Slots that a late storage call of a follower still uses are given to others."""
    ask = RankLeader._ask

    async def asked(self: RankLeader, entry: Callable[[int], LogEntry], seconds: float) -> Answers:
        answers = await ask(self, entry, seconds)
        return {rank: RankAnswer(one.answer) for rank, one in answers.items()}

    patch.setattr(RankLeader, "_ask", asked)


def stored_is_what_the_leader_has_stored(patch: pytest.MonkeyPatch) -> None:
    """R4 is off for writes."""
    change_answers(patch, "write", lambda one: Outcome.STORED)


def a_page_is_written_before_its_backup_has_ended(patch: pytest.MonkeyPatch) -> None:
    """R3 is off for backups: a follower may store a page that its copy has not brought yet."""
    submit = GroupTransfers.submit

    def early(self: GroupTransfers, operation, *, done, **others):  # type: ignore[no-untyped-def]
        if operation.empty or self._leader.failure is not None or operation.direction is not Direction.BACKUP:
            return submit(self, operation, done=done, **others)
        self._leader.copy(operation, self._seconds, lambda error: None)
        return self._here.submit(self._share.own_part(operation), done=done, **others)

    patch.setattr(GroupTransfers, "submit", early)


def a_rank_with_another_build_is_accepted(patch: pytest.MonkeyPatch) -> None:
    join = Members.join

    def accept(self: Members, hello: Hello) -> None:
        join(self, msgspec.structs.replace(hello, build=dict(self._build)))

    patch.setattr(Members, "join", accept)


def a_rank_has_memory_of_its_own_size(patch: pytest.MonkeyPatch) -> None:
    """A follower allocates what it has proposed, not what was agreed."""
    open_worker = worker._open

    async def own_size(
        stack, kept, spec, config, hand, port, device, storage, engine, limits, rank, welcome, *, owned
    ):  # type: ignore[no-untyped-def]
        if engine is None:
            slots = plan_slots(spec, config, parts.free_memory(device))
            welcome = msgspec.structs.replace(welcome, slots=slots)
        return await open_worker(
            stack, kept, spec, config, hand, port, device, storage, engine, limits, rank, welcome, owned=owned
        )

    patch.setattr(worker, "_open", own_size)


def the_host_size_is_not_the_least(patch: pytest.MonkeyPatch) -> None:
    agreed = Members.agreed

    def leaders(self: Members) -> dict[str, tuple[int, int]]:
        return {name: (device, self._slots[name][1]) for name, (device, _) in agreed(self).items()}

    patch.setattr(Members, "agreed", leaders)


def pages_of_engines_are_used_again_when_the_leader_has_copied(patch: pytest.MonkeyPatch) -> None:
    """Tickets for pages of engines are about the leader alone."""
    submit = GroupTransfers.submit

    def early(self: GroupTransfers, operation, **others):  # type: ignore[no-untyped-def]
        layers, self._engine_layers = self._engine_layers, 0
        try:
            return submit(self, operation, **others)
        finally:
            self._engine_layers = layers

    patch.setattr(GroupTransfers, "submit", early)


def backups_of_engine_pages_end_with_the_leaders(patch: pytest.MonkeyPatch) -> None:
    submit = GroupTransfers.submit

    def early(self: GroupTransfers, operation, **others):  # type: ignore[no-untyped-def]
        layers = self._engine_layers
        if operation.direction is Direction.BACKUP:
            self._engine_layers = 0
        try:
            return submit(self, operation, **others)
        finally:
            self._engine_layers = layers

    patch.setattr(GroupTransfers, "submit", early)


def messages_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    """R1 is off: entries of one frame in another order."""
    from asynchicache.ranks.frames import FrameWriter

    take = FrameWriter.take

    def shuffled(self: FrameWriter) -> bytes:  # type: ignore[type-arg]
        self._messages.reverse()
        return take(self)

    patch.setattr(FrameWriter, "take", shuffled)


def a_lost_rank_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """R7 is off."""
    patch.setattr(RankLeader, "check", lambda self, silence: None)
    patch.setattr(RankLeader, "lost", lambda self, rank, why: None)


def one_rank_keeps_the_old_weights(patch: pytest.MonkeyPatch) -> None:
    """A follower answers an epoch, and goes on with the pages of the weights before."""

    async def begin_epoch(self: RankFollower, entry: EpochEntry) -> None:
        self._answer(EndAnswer(entry.operation))

    patch.setattr(RankFollower, "_begin_epoch", begin_epoch)


def one_rank_leaves_its_part_of_shared_memory(patch: pytest.MonkeyPatch) -> None:
    fills = HostShare.fills
    patch.setattr(HostShare, "fills", lambda self, slot: self.place != 1 and fills(self, slot))


def two_ranks_fill_other_slots_than_the_log_says(patch: pytest.MonkeyPatch) -> None:
    """Ranks choose by what differs between them, so some slots are filled by nobody."""
    patch.setattr(HostShare, "fills", lambda self, slot: slot % (self.size + self.place) == self.place)


def a_replicated_key_names_the_rank(patch: pytest.MonkeyPatch) -> None:
    identity = parts._identity

    def named(spec, name, config):  # type: ignore[no-untyped-def]
        fingerprint, shard = identity(spec, name, config)
        return fingerprint, shard or f"{config.rank}/{config.ranks}"

    patch.setattr(parts, "_identity", named)


PLANTS: list[Plant] = [
    the_leader_alone_ends_a_copy,
    copies_do_not_wait_for_compute,
    a_copy_is_answered_before_it_has_landed,
    the_leaders_outcomes_count,
    the_leaders_reads_count,
    late_reads_of_followers_have_arrived,
    late_slots_of_followers_are_free,
    stored_is_what_the_leader_has_stored,
    a_page_is_written_before_its_backup_has_ended,
    a_rank_with_another_build_is_accepted,
    a_rank_has_memory_of_its_own_size,
    the_host_size_is_not_the_least,
    pages_of_engines_are_used_again_when_the_leader_has_copied,
    backups_of_engine_pages_end_with_the_leaders,
    messages_overtake_each_other,
    a_lost_rank_is_not_noticed,
    one_rank_keeps_the_old_weights,
    one_rank_leaves_its_part_of_shared_memory,
    two_ranks_fill_other_slots_than_the_log_says,
    a_replicated_key_names_the_rank,
]


def found_at(plant: Plant, seeds: Iterable[int], patch: pytest.MonkeyPatch) -> int | None:
    """The first seed that finds a bug."""
    plant(patch)
    return next((seed for seed in seeds if run_rank_script(draw_rank_script(seed)).violations), None)


@pytest.mark.filterwarnings("ignore")  # a run that does not end leaves its tasks
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    known = plant.__name__ in KNOWN["ranks"]
    seeds = known_first("ranks", plant.__name__, range(FEW_SEEDS if known else 0))
    if found_at(plant, seeds, monkeypatch) is None:
        assert not known, f"not found in {FEW_SEEDS} seeds"
        pytest.skip("no seed is known: `make soak` searches, scripts/planted_seeds.py writes it down")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_some_seed_finds_a_planted_bug(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_at(plant, known_first("ranks", plant.__name__, range(MAX_SEEDS)), monkeypatch) is not None
