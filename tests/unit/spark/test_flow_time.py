"""The time of micro-batches under clocks that jump."""

import pytest

from dovetail.spark.flow.flow_time import FlowTime, flow_now_ms

HOUR, YEAR = 3_600_000, 365 * 24 * 3_600_000


def commit(time_ms: int, wall_ms: int) -> dict[str, int]:
    return {"time_ms": time_ms, "wall_ms": wall_ms}


@pytest.mark.parametrize("jump", [YEAR, -YEAR, 0])
def test_jump_within_a_process_is_no_time_that_has_passed(jump: int) -> None:
    clock = FlowTime()
    first = clock.of_batch(2 * YEAR, None)
    second = clock.of_batch(2 * YEAR + jump, commit(first, 2 * YEAR))
    third = clock.of_batch(2 * YEAR, commit(second, 2 * YEAR + jump))
    assert first <= second <= third < first + HOUR


def test_process_that_starts_after_a_jump_back_goes_on_from_the_last_time() -> None:
    last = commit(YEAR, 2 * YEAR)
    clock = FlowTime()
    first = clock.of_batch(YEAR, last)
    assert first == YEAR
    assert YEAR <= clock.of_batch(YEAR + 1, commit(first, YEAR)) < YEAR + HOUR


def test_time_between_two_processes_is_what_the_wall_says() -> None:
    assert FlowTime().of_batch(YEAR + HOUR, commit(7, YEAR)) == 7 + HOUR
    assert flow_now_ms(commit(7, YEAR), YEAR + HOUR) == 7 + HOUR
    assert flow_now_ms(commit(7, YEAR), YEAR - HOUR) == 7


def test_micro_batch_that_another_driver_did_in_between_is_the_one_to_go_on_from() -> None:
    clock = FlowTime()
    clock.of_batch(YEAR, None)
    assert clock.of_batch(YEAR + 5, commit(YEAR + 3, YEAR + 4)) == YEAR + 4
