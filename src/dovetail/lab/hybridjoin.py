"""The experiments of HYBRIDJOIN (Naeem et al., 2011)."""

import numpy as np

from dovetail.lab.experiment import Axis, Context, Experiment, Measured, Panel, Series, Verdict
from dovetail.workloads import Zipf

__all__ = ["EXPERIMENTS"]

PAPER = "HYBRIDJOIN (2011)"


# -------------------------------------------------------------------- figure 10: the distribution of the stream


def _zipf(context: Context) -> Measured:
    products, tuples = context.pick(10_000, 100_000), context.pick(1_000_000, 10_000_000)
    zipf = Zipf(products, 1.0, order="ranked", seed=context.seed)
    sales = np.zeros(products, dtype=np.int64)
    for part in context.each(range(10)):
        sales += np.bincount(zipf.sample(tuples // 10) - 1, minlength=products)
        del part
    ranks = np.unique(np.geomspace(1, products, 60).astype(np.int64))
    drawn = Series("drawn", tuple(ranks.tolist()), tuple(sales[ranks - 1].tolist()))
    law = Series("Zipf's law", drawn.x, tuple((zipf.probabilities(ranks) * tuples).tolist()))
    x, y = Axis("Product, the most sold first"), Axis("Sales", "tuples")
    busy_share = float(sales[: products // 5].sum() / tuples)
    return Measured(
        (
            Panel("plain scale", x, y, (drawn, law)),
            Panel("log scale", Axis(x.label, scale="log"), Axis(y.label, y.unit, "log"), (drawn, law)),
        ),
        {"products": products, "tuples": tuples, "share_of_the_busiest_fifth": busy_share},
    )


def _judge_zipf(measured: Measured) -> Verdict:
    panel = measured.panel("log scale")
    ranks, sales = np.array(panel.of("drawn").x, dtype=float), np.array(panel.of("drawn").y)
    frequent = sales >= 100
    slope = float(np.polyfit(np.log(ranks[frequent]), np.log(sales[frequent]), 1)[0])
    share = float(measured.parameters["share_of_the_busiest_fifth"])
    return Verdict.of(
        shape=abs(slope + 1) <= 0.05,
        factor=0.75 <= share <= 0.9,
        numbers=f"slope {slope:.3f} on log scales (Zipf with exponent 1: -1); the busiest fifth of the products has "
        f"{share:.0%} of the sales",
        explanation="With exponent 1 the share of the busiest fifth grows with the number of products: the 80/20 rule "
        "is what some ten thousand products give.",
    )


EXPERIMENTS = (
    Experiment(
        name="hybridjoin-fig10",
        paper=PAPER,
        figure="10",
        title="Sales per product of a stream by Zipf's law, exponent 1",
        claim="On log scales the sales per product fall on a line; about a fifth of the products has about 80 % of the "
        "sales.",
        check="A line through the frequent products has a slope within 5 % of -1; the busiest fifth has 75 to 90 %.",
        run=_zipf,
        judge=_judge_zipf,
    ),
)
