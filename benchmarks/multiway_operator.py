"""The multi-way join operator on its own, without Spark.

Axes
----
- probing sequence: the paper's section 3.3 query (10,000, 15,000 and 10,000 tuples, 1,000 values; S3 four times as
  fast), comparisons made with the good, the worst and the adaptive sequence. Each result is one comparison whatever the
  sequence, so what a sequence can save are those that make temporary results; bar: at least 17 % of these. The saving
  of all comparisons is printed beside: it cannot reach 17 % on this query in any order (there are 400,000 pairs in
  all, each of which can be a temporary result once, beside 1,500,000 results).
- overflow: the section 3.5 query (six inputs, two stars of three and a link), results given out while the inputs
  arrive, with coordinated flushing, random flushing and a binary tree of XJoins, in the same memory; bar: in this order
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.model.multiway import plan_multiway
from dovetail.operators.mjoin import MJoin, MJoinTree, TimeWindow, mjoin_spec
from dovetail.operators.mjoin.spec import Flushing

SEED = 2003


@dataclass
class Verdict:
    """What one part found, and whether it reaches its bar."""

    name: str
    is_reached: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------- probing sequence


def arrivals(counts: dict[str, int], delays: dict[str, float], slice_ms: float) -> Iterator[tuple[str, int, int]]:
    """Which tuples of which input arrive in each slice of time: (input, first, last), in turns."""
    sent = dict.fromkeys(counts, 0)
    moment = 0.0
    while any(sent[name] < counts[name] for name in counts):
        moment += slice_ms
        for name, count in counts.items():
            due = min(count, int(moment / delays[name]))
            if due > sent[name]:
                yield name, sent[name], due
                sent[name] = due


def probing_sequence(scale: float) -> Verdict:
    """Section 3.3: what a wrong probing sequence costs."""
    counts = {"s1": int(10_000 * scale), "s2": int(15_000 * scale), "s3": int(10_000 * scale)}
    delays = {"s1": 20.0, "s2": 20.0, "s3": 5.0}
    values = max(1, int(1000 * scale))
    random = np.random.default_rng(SEED)
    keys = {name: random.integers(0, values, count) for name, count in counts.items()}
    schemas = {name: pa.schema({"k": pa.int64(), name: pa.int32()}) for name in counts}
    sequences = {
        # S3 arrives first and S1 and S2 equally fast, so S3 has the most matches for nearly all of the run.
        "good": {"s1": ["s2", "s3"], "s2": ["s1", "s3"], "s3": ["s1", "s2"]},
        "worst": {"s1": ["s3", "s2"], "s2": ["s3", "s1"], "s3": ["s2", "s1"]},
        "adaptive": None,
    }
    comparisons, results = {}, set()
    for name, fixed in sequences.items():
        spec = mjoin_spec(schemas, on="k", budget="64MB", sequences=fixed)
        join = MJoin(spec)
        out = 0
        for source, first, last in arrivals(counts, delays, slice_ms=200.0):
            rows = pa.record_batch(
                [pa.array(keys[source][first:last]), pa.array(np.arange(first, last, dtype=np.int32))],
                schema=schemas[source],
            )
            out += sum(batch.num_rows for batch in join.offer(source, spec.with_codes(source, rows)))
        comparisons[name] = join.metrics.comparisons
        results.add(out)
    assert len(results) == 1, "every sequence gives the same results"
    final = results.pop()
    temporary = {name: count - final for name, count in comparisons.items()}
    saved = 1 - temporary["good"] / temporary["worst"]
    adaptive = 1 - temporary["adaptive"] / temporary["worst"]
    overall = 1 - comparisons["good"] / comparisons["worst"]
    said = (
        f"{final:,} results; comparisons: good {comparisons['good']:,}, adaptive {comparisons['adaptive']:,}, worst "
        f"{comparisons['worst']:,} ({overall:.1%} fewer in all); of those for temporary results the good sequence "
        f"saves {saved:.1%}, the adaptive one {adaptive:.1%} (bar 17 %)"
    )
    figures = {**comparisons, "saved": saved, "adaptive_saved": adaptive, "saved_of_all": overall}
    return Verdict("probing sequence", min(saved, adaptive) >= 0.17, said, figures)


# ---------------------------------------------------------------- overflow


def six_way(scale: float) -> tuple[dict[str, dict[str, npt.NDArray[np.int64]]], list[Any]]:
    """Table 2's inputs: every value of a tenk column ten times, every unique column a permutation."""
    random = np.random.default_rng(SEED)
    small, large = int(10_000 * scale), int(100_000 * scale)
    data: dict[str, dict[str, npt.NDArray[np.int64]]] = {}
    for star, (one, two, three) in enumerate((("s1", "s2", "s3"), ("s4", "s5", "s6"))):
        data[one] = {f"u1_{star}": random.permutation(small)}
        data[two] = {f"t2_{star}": random.permutation(large) % small, f"u14_{star}": random.permutation(large)}
        data[three] = {f"t3_{star}": random.permutation(large) % small}
    on = [
        (f"{one}.u1_{star}", f"{other}.{column}_{star}")
        for star, (one, two, three) in enumerate((("s1", "s2", "s3"), ("s4", "s5", "s6")))
        for other, column in ((two, "t2"), (three, "t3"))
    ]
    return data, [*on, ("s2.u14_0", "s5.u14_1")]


def overflow(scale: float) -> Verdict:
    """Section 3.5: results that come while the inputs arrive, in less memory than the stars' state takes."""
    data, on = six_way(scale)
    label = pa.string()
    schemas = {
        name: pa.schema([(column, pa.int64()) for column in columns] + [(f"pad_{name}", label)])
        for name, columns in data.items()
    }
    delays = {name: 1.0 if name in ("s1", "s4") else 0.5 for name in data}
    counts = {name: len(next(iter(columns.values()))) for name, columns in data.items()}
    pad = "x" * 60
    # About a third of what the inputs of a star take, for each of the three joins.
    budget = int(2_700_000 * scale / 0.05)
    figure_14 = [["s1", "s2", "s3"], ["s4", "s5", "s6"]]
    binary = [[["s1", "s2"], "s3"], [["s4", "s5"], "s6"]]
    early: dict[str, int] = {}
    curves: dict[str, list[int]] = {}
    # Each of the linking values meets ten tuples on either side, twice.
    total = 100 * len(data["s2"]["u14_0"])
    plans: list[tuple[str, list[Any], Flushing]] = [
        ("coordinated", figure_14, "coordinated"),
        ("random", figure_14, "random"),
        ("binary XJoin", binary, "random"),
    ]
    for name, plan, flushing in plans:
        with tempfile.TemporaryDirectory() as directory:
            spec = mjoin_spec(schemas, on=on, budget=budget, spill_directory=directory, flushing=flushing, seed=SEED)
            tree = MJoinTree(spec, plan_multiway(spec.graph, force=plan))
            out, sent = 0, 0
            curve: list[int] = []
            for source, first, last in arrivals(counts, delays, slice_ms=100.0):
                columns = [pa.array(column[first:last]) for column in data[source].values()]
                rows = pa.record_batch([*columns, pa.array([pad] * (last - first))], schema=schemas[source])
                out += sum(batch.num_rows for batch in tree.offer(source, rows))
                sent += last - first
                if sent >= (len(curve) + 1) * sum(counts.values()) / 4:
                    curve.append(out)
            early[name], curves[name] = out, curve
    shares = {name: count / total for name, count in early.items()}
    lines = "; ".join(f"{n} {early[n]:,} ({shares[n]:.1%}; at quarters {curves[n]})" for n in early)
    is_reached = early["coordinated"] > early["random"] > early["binary XJoin"]
    said = f"of {total:,} results, before the inputs ended: {lines} (bar: in this order)"
    return Verdict("overflow", is_reached, said, {"early": early, "total": total, "curves": curves})


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
        lambda: probing_sequence(0.4 if quick else 1.0),
        lambda: overflow(0.02 if quick else 0.05),
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
