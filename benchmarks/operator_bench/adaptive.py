"""Section ``auto``: the strategy that chooses by itself against each of the others."""

from dovetail_lab.measure import baseline_rate, rates_of
from dovetail_lab.subjects import DiskName, DiskUnderTest
from operator_bench.harness import Data, Report

_EXPONENTS = (0.0, 0.5, 1.0)
_BUDGETS = (1.0, 5.0, 10.0)
_DISKS: tuple[DiskName, ...] = ("simulated", "direct", "memory")
_OTHERS = ("mesh", "hybrid", "balanced")


def auto_against_the_best(data: Data, report: Report) -> None:
    """Every point of exponent x budget x disk."""
    for disk_name in _DISKS:
        report.heading(f"auto / best of {', '.join(_OTHERS)} and index nested loops, {disk_name} (bar: at least 0.9)")
        for percent in data.sizes.of_budgets(_BUDGETS):
            for exponent in data.sizes.of_exponents(_EXPONENTS):
                runs = [(kind, data.stream(exponent, "shuffled")) for kind in ("auto", *_OTHERS)]
                budget, seconds = data.budget(percent), data.sizes.max_seconds
                measured = rates_of(data, disk_name, budget, runs, seconds)
                rates = {kind: rate.tuples_per_s for (kind, _), rate in zip(runs, measured, strict=True)}
                stream = data.stream(exponent, "shuffled")
                inl = baseline_rate(data, DiskUnderTest(disk_name), budget, stream, seconds)
                rates["index_nested_loop"] = inl.tuples_per_s
                best = max((kind for kind in rates if kind != "auto"), key=lambda kind: rates[kind])
                ratio = rates["auto"] / rates[best]
                report.add(
                    "auto",
                    f"{disk_name} {percent:g} % exponent {exponent:g}",
                    ratio,
                    ">= 0.9",
                    ratio >= 0.9,
                    best=best,
                    **rates,
                )
