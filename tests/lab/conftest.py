"""Experiments that take no time, to run, to break off and to report on."""

from collections.abc import Callable

import pytest

from dovetail_lab import Axis, Context, Experiment, Measured, Panel, Series, Verdict

Make = Callable[..., Experiment]


def make_experiment(name: str, run: Callable[[Context], None] = lambda context: None) -> Experiment:
    """An experiment whose value is the number of parts that it has gone through."""

    def measure(context: Context) -> Measured:
        done = [float(part) for part in context.each(range(3))]
        run(context)
        series = Series.of_repeats("mesh", [1, 10], [[1.0 + len(done), 3.0], [8.0, 9.0]])
        panel = Panel("a disk", Axis("Memory", "% of R", "log"), Axis("Service rate", "tuples/s"), (series,))
        return Measured((panel,), {"rows": 10, "seed": context.seed})

    def judge(measured: Measured) -> Verdict:
        return Verdict.of(shape=measured.panels[0].series[0].y[0] > 1, numbers="<2 & more>", explanation="a|b")

    return Experiment(
        name=name,
        paper="Paper",
        figure="1a",
        title="What",
        claim="A claim.",
        check="A check.",
        run=measure,
        judge=judge,
    )


@pytest.fixture
def experiment() -> Make:
    """Makes experiments: a name, and what to do in the middle of it."""
    return make_experiment
