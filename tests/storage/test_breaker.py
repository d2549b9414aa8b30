"""The circuit breaker, state by state."""

from __future__ import annotations

from asynchicache.storage.breaker import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def open_breaker() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    breaker = CircuitBreaker(failures=2, cooldown=10.0, now=clock)
    breaker.failed()
    breaker.failed()
    return breaker, clock


def half_open_breaker() -> tuple[CircuitBreaker, Clock]:
    breaker, clock = open_breaker()
    clock.seconds += 10.0
    assert breaker.allow()
    return breaker, clock


def test_failures_in_a_row_open_it() -> None:
    breaker, _ = open_breaker()

    assert (breaker.state, breaker.opened, breaker.allow()) == (BreakerState.OPEN, 1, False)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = CircuitBreaker(failures=2, cooldown=10.0, now=Clock())
    for _ in range(3):
        breaker.failed()
        breaker.succeeded()

    assert (breaker.state, breaker.allow()) == (BreakerState.CLOSED, True)


def test_a_weak_success_forgets_no_failure() -> None:
    breaker = CircuitBreaker(failures=2, cooldown=10.0, now=Clock())
    breaker.failed()
    breaker.succeeded(weak=True)
    breaker.failed()

    assert breaker.state is BreakerState.OPEN


def test_one_call_may_try_after_the_cooldown() -> None:
    breaker, clock = open_breaker()
    clock.seconds += 9.9
    assert not breaker.allow()
    clock.seconds += 0.1

    assert [breaker.allow(), breaker.allow()] == [True, False]
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_try_that_works_closes_it_for_good() -> None:
    breaker, _ = half_open_breaker()
    breaker.succeeded()
    breaker.failed()

    assert breaker.state is BreakerState.CLOSED


def test_a_weak_try_closes_it_on_probation() -> None:
    breaker, _ = half_open_breaker()
    breaker.succeeded(weak=True)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed()

    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 2)


def test_a_try_that_fails_opens_it_for_another_cooldown() -> None:
    breaker, clock = half_open_breaker()
    breaker.failed()
    assert (breaker.state, breaker.allow()) == (BreakerState.OPEN, False)
    clock.seconds += 10.0

    assert breaker.allow()


def test_a_try_that_never_ends_does_not_block_the_next() -> None:
    breaker, clock = half_open_breaker()
    clock.seconds += 10.0

    assert [breaker.allow(), breaker.allow()] == [True, False]


def test_late_answers_do_not_move_an_open_breaker() -> None:
    breaker, clock = open_breaker()
    clock.seconds += 5.0
    breaker.succeeded()
    breaker.failed()
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 1)
    clock.seconds += 5.0

    assert breaker.allow()
