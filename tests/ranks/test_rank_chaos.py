"""The seeded search over groups of ranks is clean, and each rule that is switched off is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchicache import parts
from asynchicache.ranks.follower import RankFollower
from asynchicache.ranks.group import GroupStorage, GroupTransfers
from asynchicache.ranks.leader import RankLeader
from asynchicache.ranks.messages import EndAnswer, EpochEntry
from asynchicache.ranks.sharing import HostShare
from asynchicache.testing.rank_chaos import draw_rank_script, run_rank_script, search_ranks

Plant = Callable[[pytest.MonkeyPatch], None]

WITHIN = 100
"""Seeds in which each planted bug must be found."""


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


PLANTS: dict[Plant, int] = {
    the_leader_alone_ends_a_copy: 1,
    copies_do_not_wait_for_compute: 1,
    a_copy_is_answered_before_it_has_landed: 1,
    the_leaders_outcomes_count: 26,
    messages_overtake_each_other: 7,
    a_lost_rank_is_not_noticed: 1,
    one_rank_keeps_the_old_weights: 77,
    one_rank_leaves_its_part_of_shared_memory: 11,
    two_ranks_fill_other_slots_than_the_log_says: 11,
    a_replicated_key_names_the_rank: 11,
}
"""Planted bugs, and the seed to begin at, so that the search ends soon."""


@pytest.mark.filterwarnings("ignore")  # a run that does not end leaves its tasks
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    seeds = range(PLANTS[plant], PLANTS[plant] + WITHIN)
    found = next((seed for seed in seeds if run_rank_script(draw_rank_script(seed)).violations), None)
    assert found is not None, f"not found in {WITHIN} seeds"
