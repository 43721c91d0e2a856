"""HYBRIDJOIN, figures 10 and 11: the stream of its benchmark."""

import numpy as np

from dovetail.runtime.generator.bursty import BurstyArrivals
from dovetail_lab.experiment import Axis, Context, Measured, Panel, Series, Verdict
from dovetail_lab.workloads import Zipf
from dovetail_lab.workloads.bursty_files import hurst_exponent


def zipf(context: Context) -> Measured:
    products, tuples = context.pick(10_000, 100_000), context.pick(1_000_000, 10_000_000)
    zipf = Zipf(products, 1.0, order="ranked", seed=context.seed)
    sales = np.zeros(products, dtype=np.int64)
    for _ in context.each(range(10)):
        sales += np.bincount(zipf.sample(tuples // 10) - 1, minlength=products)
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


def judge_zipf(measured: Measured) -> Verdict:
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


def bursts(context: Context) -> Measured:
    steps = context.pick(1 << 14, 1 << 18)
    counts = BurstyArrivals(seed=context.seed).counts(steps)
    even = np.random.default_rng(context.seed).poisson(counts.mean(), steps)
    shown = 3_000
    places = tuple(range(0, shown, 5))
    flow = tuple(
        Series(name, places, tuple(values[:shown:5].tolist()))
        for name, values in (("bursty stream", counts), ("Poisson arrivals", even))
    )
    context.begin(1)
    # Beyond 2^10 steps, the longest time that an object stays on or off, the stream is smooth.
    hurst = {"bursty": hurst_exponent(counts, 1, 256), "poisson": hurst_exponent(even, 1, 256)}
    scales = [1 << power for power in range(9)]
    spread = []
    for name, values in (("bursty stream", counts), ("Poisson arrivals", even)):
        means = [values[: steps // scale * scale].reshape(-1, scale).mean(axis=1) for scale in scales]
        deviations = tuple(float(mean.std() / values.mean()) for mean in means)
        spread.append(Series(name, tuple(scales), deviations))
    context.advance()
    return Measured(
        (
            Panel("the flow of transactions", Axis("Time", "steps"), Axis("Arrivals", "tuples/step"), flow),
            Panel(
                "how averaging smooths it",
                Axis("Averaged over", "steps", "log"),
                Axis("Standard deviation / mean", "", "log"),
                tuple(spread),
            ),
        ),
        {"steps": steps, "hurst_bursty": hurst["bursty"], "hurst_poisson": hurst["poisson"]},
    )


def judge_bursts(measured: Measured) -> Verdict:
    bursty, even = (float(measured.parameters[f"hurst_{name}"]) for name in ("bursty", "poisson"))
    flow = measured.panels[0].of("bursty stream").y
    return Verdict.of(
        shape=bursty >= 0.7 and abs(even - 0.5) <= 0.1,
        numbers=f"Hurst exponent {bursty:.2f} up to 256 steps, {even:.2f} for Poisson arrivals of the same mean (0.5: "
        f"no memory, 1: bursts on every scale); from {min(flow):,.0f} to {max(flow):,.0f} tuples per step",
    )
