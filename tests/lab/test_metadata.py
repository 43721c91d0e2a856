"""The judgements of the metadata paper's figures against made-up measurements."""

import pytest

from dovetail_lab import find
from dovetail_lab.experiment import Axis, Measured, Panel, Series
from dovetail_lab.metadata import BATCHED, CHOSEN, IMMEDIATE, OURS, PRIORITY, RANDOM, THEIRS

X, Y = Axis("x"), Axis("y")
RESULTS = (5000, 10_000, 15_000, 20_000)


def panel(title: str, **series: tuple[float, ...]) -> Panel:
    names = {"ours": OURS, "theirs": THEIRS, "priority": PRIORITY, "random": RANDOM}
    names |= {"immediate": IMMEDIATE, "batched": BATCHED, "chosen": CHOSEN}
    return Panel(title, X, Y, tuple(Series(names[name], RESULTS, y) for name, y in series.items()))


@pytest.mark.parametrize(
    ("gains", "ordered", "at_random"),
    [
        (((1.1, 1.2), (1.3, 1.2)), "confirmed", "confirmed"),
        (((0.9, 1.2), (1.3, 1.2)), "not testable here", "confirmed"),
        (((0.9, 0.8), (1.3, 0.8)), "not confirmed", "not testable here"),
    ],
)
def test_figure_8_wants_the_pair_to_win_at_every_quarter_with_every_quota(
    gains: tuple[tuple[float, ...], ...], ordered: str, at_random: str
) -> None:
    priority, other = (1.0, 2.0, 3.0, 4.0), (2.0, 3.0, 4.0, 5.0)
    panels = tuple(panel(f"{order} arrival", priority=priority, random=other) for order in ("ordered", "random"))
    by_quota = tuple(
        Series(f"{order} arrival", (100, 500), least) for order, least in zip(("ordered", "random"), gains, strict=True)
    )
    panels += (Panel("by the priority's quota", X, Y, by_quota),)
    kept = {f"kept_{order}_{name}": 10 for order in ("ordered", "random") for name in ("priority", "random")}
    halves = find("metadata-fig8").judge(Measured(panels, kept)).halves
    assert [(half.claim, half.outcome) for half in halves] == [
        ("ordered arrival", ordered),
        ("random arrival", at_random),
    ]


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ((2.0, 2.5, 3.0, 3.3), "confirmed"),
        ((2.0, 2.5, 3.0, 3.5), "confirmed with a different factor"),
        ((2.0, 4.0, 5.0, 6.0), "not confirmed"),
    ],
)
def test_figure_9_wants_a_crossing_in_every_case(ours: tuple[float, ...], outcome: str) -> None:
    titles = ("ordered arrival", "random arrival", "XJoin overflows")
    panels = tuple(panel(title, ours=ours, theirs=(1.0, 3.0, 4.0, 5.0)) for title in titles)
    assert find("metadata-fig9").judge(Measured(panels)).outcome == outcome


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        ((1.0, 1.0, 1.0, 1.1), "confirmed"),
        ((1.0, 1.0, 1.5, 2.0), "confirmed with a different factor"),
        ((2.0, 4.0, 6.0, 8.0), "not confirmed"),
    ],
)
def test_figure_10_wants_half_of_the_memory_and_no_growth(ours: tuple[float, ...], outcome: str) -> None:
    panels = tuple(
        panel(f"{order} arrival", ours=ours, theirs=(3.0, 5.0, 7.0, 12.0)) for order in ("ordered", "random")
    )
    assert find("metadata-fig10").judge(Measured(panels)).outcome == outcome


@pytest.mark.parametrize(
    ("immediate", "outcome"), [((2.0, 4.0, 6.0, 8.0), "confirmed"), ((0.5, 1.0, 1.5, 1.9), "not confirmed")]
)
def test_figure_11_wants_batches_to_take_less_time(immediate: tuple[float, ...], outcome: str) -> None:
    batched = (1.0, 2.0, 3.0, 4.0)
    panels = tuple(
        panel(f"random arrival: {what}", immediate=immediate, batched=batched, chosen=batched)
        for what in ("time", "memory")
    )
    assert find("metadata-fig11").judge(Measured(panels)).outcome == outcome
