"""The multi-way join operator on its own, without Spark.

Axes
----
- probing sequence: the paper's section 3.3 query (`dovetail lab run mjoin-table1`): each result is one comparison
  whatever the sequence, so what a sequence can save are those that make temporary results; bar: the sequence by live
  counts saves at least 17 % of what the worst makes
- overflow: the section 3.5 query (`dovetail lab run mjoin-fig15`), results given out while the inputs arrive, with
  coordinated flushing, random flushing and a binary tree of XJoins, in the same memory; bar: in this order
- growth: tuples per second of a 3-way windowed join on unique keys with 1 M and with 10 M tuples of state; bar: 70 %

Times are CPU seconds of this process, so that a busy machine does not change the ratios; wall-clock is printed beside.

    python benchmarks/multiway_operator.py            all of it
    python benchmarks/multiway_operator.py --quick    smaller data, under a minute
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.joins.multiway import MJoin, TimeWindow, mjoin_spec
from dovetail_lab import find
from dovetail_lab.experiment import Context, Measured
from dovetail_lab.multiway.probing import ADAPTIVE, WRONG

SEED = 2003


@dataclass
class Verdict:
    """What one part found, and whether it reaches its bar."""

    name: str
    is_reached: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- the lab's


def probing_sequence(is_quick: bool) -> Verdict:
    """Section 3.3: what a wrong probing sequence costs."""
    measured, verdict = measure("mjoin-table1", is_quick)
    compared, results = measured.panel("comparisons").of("here"), measured.parameters["results"]
    temporary = {name: compared.at(name) - results for name in (ADAPTIVE, WRONG)}
    saved = 1 - temporary[ADAPTIVE] / temporary[WRONG]
    said = f"{verdict.numbers}; by live counts {saved:.1%} fewer temporary results than at worst (bar 17 %)"
    return Verdict(
        "probing sequence",
        saved >= 0.17,
        said,
        {"saved": saved, **dict(zip(map(str, compared.x), compared.y, strict=True))},
    )


def overflow(is_quick: bool) -> Verdict:
    """Section 3.5: results that come while the inputs arrive, in less memory than the stars' state takes."""
    measured, verdict = measure("mjoin-fig15", is_quick)
    early = {series.name: series.y[-1] for series in measured.panels[0].series}
    return Verdict("overflow", verdict.outcome == "confirmed", f"{verdict.numbers} (bar: in this order)", early)


def measure(name: str, is_quick: bool) -> tuple[Measured, Any]:
    """One experiment of the lab, once, and what it says."""
    experiment = find(name)
    with tempfile.TemporaryDirectory() as directory:
        measured = experiment.run(Context(is_quick=is_quick, seed=SEED, repeats=1, directory=Path(directory)))
    return measured, experiment.judge(measured)


# ---------------------------------------------------------------- growth


def steady_rate(state_rows: int, batch_rows: int, measured: int) -> tuple[float, float]:
    """Tuples per CPU second and per second of a 3-way join on unique keys whose window holds so many tuples."""
    names = ("a", "b", "c")
    per_input = state_rows // len(names)
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), f"v{n}": pa.int64()}) for n in names}
    window = TimeWindow(per_input, {n: f"t{n}" for n in names})
    # A chunk and its merge must fit; what is held is printed by the growth part.
    spec = mjoin_spec(schemas, on="k", window=window, budget=max(200_000_000, 400 * state_rows))
    join = MJoin(spec)
    random = np.random.default_rng(SEED)
    warm_up = -(-per_input // batch_rows) + 2
    cpu = wall = 0.0
    tuples = results = 0
    for number in range(warm_up + measured):
        first = number * batch_rows
        keys = np.arange(first, first + batch_rows)
        batches = []
        for name in names:
            order = random.permutation(batch_rows)
            columns = [pa.array(keys[order]), pa.array(keys[order]), pa.array(order)]
            batches.append(spec.with_codes(name, pa.record_batch(columns, schema=schemas[name])))
        started = time.process_time(), time.perf_counter()
        for name, batch in zip(names, batches, strict=True):
            results += sum(out.num_rows for out in join.offer(name, batch))
        sum(out.num_rows for out in join.advance(first))
        if number >= warm_up:
            cpu += time.process_time() - started[0]
            wall += time.perf_counter() - started[1]
            tuples += batch_rows * len(names)
    assert results == (warm_up + measured) * batch_rows, "every key joins once"
    return tuples / cpu, tuples / wall


def growth(small_rows: int, batch_rows: int, measured: int) -> Verdict:
    """Ten times the state, the same throughput but for a few tiers more."""
    steady_rate(small_rows // 4, batch_rows, 2)  # compiles, and warms the allocator
    rates = {rows: steady_rate(rows, batch_rows, measured) for rows in (small_rows, 10 * small_rows)}
    ratio = rates[10 * small_rows][0] / rates[small_rows][0]
    lines = "; ".join(
        f"{rows:,} tuples of state: {cpu:,.0f} tuples per CPU second, {wall:,.0f} per second"
        for rows, (cpu, wall) in rates.items()
    )
    return Verdict("growth", ratio >= 0.7, f"{lines}; ratio {ratio:.2f} (bar 0.70)", {"ratio": ratio, "rates": rates})


def main() -> int:
    """Run the parts, print each verdict, and end with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller data, under a minute")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    arguments = parser.parse_args()
    quick = arguments.quick
    parts: list[Callable[[], Verdict]] = [
        lambda: probing_sequence(quick),
        lambda: overflow(quick),
        lambda: growth(100_000, 10_000, 10) if quick else growth(1_000_000, 100_000, 6),
    ]
    verdicts = []
    for part in parts:
        verdict = part()
        verdicts.append(verdict)
        print(f"{'reached' if verdict.is_reached else 'MISSED':<8} {verdict.name}: {verdict.said}", flush=True)
    if arguments.json:
        print(json.dumps({v.name: {"reached": v.is_reached, **v.figures} for v in verdicts}, default=str))
    return 0 if all(verdict.is_reached for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
