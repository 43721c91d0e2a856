"""Budgets are read strictly; ledgers never account for more than their budget."""

import random

import numpy as np
import pytest

from dovetail.core.errors import BudgetError, InternalError
from dovetail.core.memory import Budget, Ledger, format_bytes


@pytest.mark.parametrize(
    ("written", "total_bytes"),
    [
        ("256MB", 256_000_000),
        ("1.5GiB", 3 * 2**29),
        ("64 MiB", 64 * 2**20),
        ("  64mib ", 64 * 2**20),
        ("0.1GB", 100_000_000),
        (".5kB", 500),
        ("1KB", 1000),
        ("1.0015 kB", 1001),
        ("7B", 7),
        ("4096", 4096),
        ("2TB", 2 * 10**12),
        ("1PiB", 2**50),
        ("1EB", 10**18),
        (64 * 2**20, 64 * 2**20),
        (1.5 * 2**30, 3 * 2**29),
        (np.int64(12), 12),
        (Budget(5), 5),
    ],
)
def test_budget_parse_reads(written: str | int | Budget, total_bytes: int) -> None:
    budget = Budget.parse(written)
    assert budget.total_bytes == total_bytes
    assert type(budget.total_bytes) is int


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (True, "boolean"),
        (0, "more than zero"),
        (-1, "more than zero"),
        (0.5, "finite and whole"),
        (float("nan"), "not a number"),
        (float("inf"), "finite and whole"),
        (None, "NoneType is not an amount"),
        ([], "list is not an amount"),
        (np.True_, "is not an amount"),
        ("", "empty"),
        ("   ", "empty"),
        ("-5MB", "more than zero"),
        ("0", "more than zero"),
        ("0.0MB", "more than zero"),
        ("0.1B", "less than one byte"),
        ("nan", "finite amount"),
        ("unlimited", "finite amount"),
        ("10%", "percentage is not an amount"),
        ("10 % of R", "percentage is not an amount"),
        ("5 parsecs", "'parsecs' is not a unit"),
        ("5MBit", "'MBit' is not a unit"),
        ("512m", "could mean MB .* or MiB"),
        ("1K", "could mean kB .* or KiB"),
        ("1,5GB", "decimal point"),
        ("1.2", "whole"),
        ("1.2.3MB", "not a number followed by a unit"),
        ("MB", "not a number followed by a unit"),
        ("5MB and more", "not a number followed by a unit"),
        ("1e3MB", "not a number followed by a unit"),
        ("٣MB", "not a number followed by a unit"),
        (2**63, "more than any machine"),
        ("99EB", "more than any machine"),
    ],
)
def test_budget_parse_refuses_with_reason_and_examples(written: object, reason: str) -> None:
    with pytest.raises(BudgetError, match=reason) as refused:
        Budget.parse(written)  # type: ignore[arg-type]
    assert repr(written) in str(refused.value)
    assert '"256MB"' in str(refused.value)


@pytest.mark.parametrize("total_bytes", [0, -3, True, 1.5, "5MB"])
def test_budget_made_directly_is_checked_too(total_bytes: int) -> None:
    with pytest.raises(BudgetError):
        Budget(total_bytes)


def test_budget_percent_of_is_exact_and_at_least_a_byte() -> None:
    assert Budget.percent_of(420_000_000, 0.1).total_bytes == 420_000
    assert Budget.percent_of(10, 100).total_bytes == 10
    assert Budget.percent_of(10, 0.1).total_bytes == 1


@pytest.mark.parametrize(("whole_bytes", "percent"), [(0, 1.0), (-5, 1.0), (5, 0), (5, -1), (5, float("nan"))])
def test_budget_percent_of_refuses_what_is_not_positive(whole_bytes: int, percent: float) -> None:
    with pytest.raises(BudgetError, match="more than zero"):
        Budget.percent_of(whole_bytes, percent)


def test_budget_split_stays_within_the_whole() -> None:
    assert Budget(1000).split(8).total_bytes * 8 <= 1000
    for parts in (0, -1, 1001):
        with pytest.raises(BudgetError, match="cannot be split"):
            Budget(1000).split(parts)


def test_budget_require_names_the_minimum() -> None:
    Budget(10).require(10, "this")
    with pytest.raises(BudgetError, match="this needs at least 11 bytes") as refused:
        Budget(10).require(11, "this")
    assert refused.value.minimum_bytes == 11


@pytest.mark.parametrize(
    ("size_bytes", "written"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (12_345, "12.3 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (256_000_000, "256 MB"),
        (2**63 - 1, "9.22 EB"),
        (5 * 10**21, "5000 EB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_format_bytes(size_bytes: int, written: str) -> None:
    assert format_bytes(size_bytes) == written


def test_ledger_grants_up_to_the_last_byte_and_not_beyond() -> None:
    ledger = Ledger(Budget(100))
    window = ledger.reserve("window", 60)
    cache = ledger.reserve("cache")
    cache.resize(40)
    with pytest.raises(BudgetError, match="'cache' asks for 41 bytes") as refused:
        cache.grow(1)
    assert refused.value.minimum_bytes == 101
    assert ledger.by_component() == {"window": 60, "cache": 40}
    assert (ledger.held_bytes, ledger.free_bytes, ledger.peak_bytes) == (100, 0, 100)
    window.shrink(1)
    cache.grow(1)
    assert ledger.by_component() == {"window": 59, "cache": 41}


def test_ledger_refused_reservation_leaves_no_trace() -> None:
    ledger = Ledger(Budget(100))
    with pytest.raises(BudgetError):
        ledger.reserve("window", 101)
    assert ledger.by_component() == {}
    assert ledger.held_bytes == 0
    ledger.reserve("window", 100)


def test_ledger_release_gives_everything_back_once() -> None:
    ledger = Ledger(Budget(100))
    block = ledger.reserve("block", 80)
    block.release()
    block.release()
    assert ledger.held_bytes == 0
    assert ledger.by_component() == {}
    assert ledger.peak_bytes == 80
    with pytest.raises(InternalError, match="released"):
        block.resize(1)
    ledger.reserve("block", 100)


def test_ledger_reservation_as_context_releases_after_an_error() -> None:
    ledger = Ledger(Budget(100))
    with pytest.raises(ZeroDivisionError), ledger.reserve("block", 80):
        1 / 0  # noqa: B018 -- the error is the point
    assert ledger.held_bytes == 0


def test_ledger_resize_refuses_to_go_below_what_is_held() -> None:
    ledger = Ledger(Budget(100))
    ledger.reserve("window", 70)
    with pytest.raises(BudgetError, match="window 70 B") as refused:
        ledger.resize(Budget(69))
    assert refused.value.minimum_bytes == 70
    assert ledger.budget == Budget(100)
    ledger.resize(Budget(70))
    assert ledger.free_bytes == 0
    ledger.resize(Budget(1000))
    assert ledger.has_room_for(930)
    assert not ledger.has_room_for(931)


def test_ledger_misuse_is_an_internal_error() -> None:
    ledger = Ledger(Budget(100))
    window = ledger.reserve("window", 10)
    with pytest.raises(InternalError, match="already has"):
        ledger.reserve("window")
    with pytest.raises(InternalError, match="cannot hold -1"):
        window.shrink(11)
    assert ledger.held_bytes == 10


@pytest.mark.parametrize("seed", range(20))
def test_ledger_sum_is_held_and_within_budget_whatever_happens(seed: int) -> None:
    print(f"seed={seed}")
    chance = random.Random(seed)
    ledger = Ledger(Budget(1000))
    reservations = [ledger.reserve(name) for name in "abcd"]
    peak = 0
    for _ in range(300):
        reservation = chance.choice(reservations)
        wanted = chance.randrange(600)
        others = ledger.held_bytes - reservation.held_bytes
        if others + wanted > 1000:
            before = reservation.held_bytes
            with pytest.raises(BudgetError):
                reservation.resize(wanted)
            assert reservation.held_bytes == before
        else:
            reservation.resize(wanted)
            assert reservation.held_bytes == wanted
        peak = max(peak, ledger.held_bytes)
        assert ledger.held_bytes == sum(ledger.by_component().values()) <= 1000
    assert ledger.peak_bytes == peak
