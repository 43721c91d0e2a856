"""The metadata-aware join against the joins and strategies that its paper compares it with, and a soak.

Axes
----
- experiment 1, scheduling: priority-driven streams with value-oriented tuples against random streams with sequential
  tuples, for ordered and for random arrival; time to results. Bar: not slower in either.
- experiment 2, XJoin: time and memory against a join without metadata, for ordered and random arrival, and in a
  budget in which XJoin overflows. Bar: less than half of the memory at the end, and not slower in the overflow.
- experiment 3, purging: at once against after 100 punctuations, random arrival. Bar: batches take less time.
- soak: 10 million access records over 1 million items, punctuations trailing. Bar: bytes held at the end at most 1.2
  times those at a tenth, while those of a join without metadata (in ample memory) grow with the stream.

Times are CPU seconds of this process, the fastest of several runs. Every run checks the number of its results.

    python benchmarks/metadata.py            the three experiments; table, JSON and plots under artifacts/metadata
    python benchmarks/metadata.py --quick    smaller data, under a minute
    python benchmarks/metadata.py --soak     the soak; --records for another size
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail.lab.metadata_runs import SCHEMAS, Arrival, Curve, Scale, against_xjoin, fastest, purging, scheduling
from dovetail.operators.metadata import Metadata, MetadataJoin, Punctuation, Schedule
from dovetail.operators.mjoin import MJoin, SymmetricHashJoin, mjoin_spec
from dovetail.workloads.news import NewsWorkload

ARRIVALS: tuple[Arrival, ...] = ("ordered", "random")


@dataclass
class Verdict:
    """What one experiment found, and whether it reaches its bar."""

    name: str
    is_reached: bool
    said: str
    curves: dict[str, list[Curve]] = field(default_factory=dict)


# ---------------------------------------------------------------- the paper's experiments


def experiment_1(scale: Scale) -> Verdict:
    """Figure 8: two combinations of stream and tuple scheduling."""
    pairs = {
        "priority, value-oriented": Schedule("priority", "value", quota=500, slice_rows=100),
        "random, sequential": Schedule("random", "sequential", slice_rows=100),
    }
    curves: dict[str, list[Curve]] = {}
    for order in ARRIVALS:
        curves[order] = []
        for name, schedule in pairs.items():

            def run(schedule: Schedule = schedule, name: str = name, order: Arrival = order) -> Curve:
                return scheduling(scale, order, schedule, name)

            curves[order].append(fastest(run, scale.runs))
    ratios = {order: found[1].total_seconds / found[0].total_seconds for order, found in curves.items()}
    told = "; ".join(
        f"{order}: {found[0].total_seconds:.2f} s against {found[1].total_seconds:.2f} s ({ratios[order]:.2f} times), "
        f"tuples kept {found[0].counters['inserts']:,} against {found[1].counters['inserts']:,}"
        for order, found in curves.items()
    )
    return Verdict("1 scheduling", min(ratios.values()) >= 1, told, curves)


def experiment_2(scale: Scale) -> Verdict:
    """Figures 9 and 10: against XJoin, in ample memory and where XJoin overflows."""
    curves: dict[str, list[Curve]] = {order: against_xjoin(scale, order) for order in ARRIVALS}
    # About a third of what XJoin would hold.
    small = max(60_000, scale.items * scale.accesses_per_item * 25)
    curves["overflow"] = against_xjoin(scale, "ordered", small)
    told, is_reached = [], True
    for name, (ours, theirs) in curves.items():
        time_ratio = theirs.total_seconds / ours.total_seconds
        memory_ratio = ours.held_bytes[-2] / max(1, theirs.held_bytes[-2])
        told.append(
            f"{name}: {ours.total_seconds:.2f} s against {theirs.total_seconds:.2f} s ({time_ratio:.2f} times), held "
            f"{ours.held_bytes[-2]:,} against {theirs.held_bytes[-2]:,} bytes ({memory_ratio:.1%})"
            f"{_crossing(ours, theirs)}"
        )
        is_reached &= time_ratio >= 1 if name == "overflow" else memory_ratio < 0.5
    return Verdict("2 XJoin", is_reached, "; ".join(told), curves)


def _crossing(ours: Curve, theirs: Curve) -> str:
    """From how many results on ours is the faster one for good."""
    at = None
    for results, mine, other in zip(ours.results[1:], ours.seconds[1:], theirs.seconds[1:], strict=False):
        at = (at or results) if mine <= other else None
    return "" if at is None else f", faster from {at:,} results on"


def experiment_3(scale: Scale) -> Verdict:
    """Figure 11: immediate against batch purging."""
    found = purging(scale, "random")
    told = ", ".join(
        f"{curve.name} {curve.total_seconds:.2f} s (most held {max(curve.held_bytes):,} bytes)" for curve in found
    )
    return Verdict("3 purging", found[1].total_seconds < found[0].total_seconds, told, {"random": found})


# ---------------------------------------------------------------- soak


def soak(records: int, items_per_part: int) -> Verdict:
    """Bytes held through a long stream, by the join that is told what is over and by one that is not."""
    per_item = 10
    work = NewsWorkload(max(100, records // per_item), per_item)
    told, is_flat = _soaked(work, items_per_part)
    theirs = [_grown(work, items_per_part, part) for part in (0.02, 0.1)]
    told += f"; without metadata {theirs[0]:,} bytes are held after a 50th and {theirs[1]:,} after a tenth"
    return Verdict("soak", is_flat and theirs[1] > 3 * theirs[0], told)


def _soaked(work: NewsWorkload, items_per_part: int) -> tuple[str, bool]:
    spec = mjoin_spec(SCHEMAS, on="sno", budget="256MB")
    join = MetadataJoin(spec, Metadata(keys=["news"]))
    started, results, passed_on = time.perf_counter(), 0, 0
    held: list[int] = []
    for number, (news, accesses) in enumerate(work.parts(items_per_part)):
        results += _offered(join, news, accesses.records)
        held.append(join.size())
        results += sum(
            b.num_rows for b in join.punctuate("access", Punctuation.one_of("sno", pa.array(accesses.closed)))
        )
        passed_on += sum(1 for _ in join.take_punctuations())
        if number % 100 == 99:
            print(f"  {results:>12,} results, {held[-1]:>10,} bytes, {join.punctuations_held} ranges", flush=True)
    seconds = time.perf_counter() - started
    assert results == work.items * work.accesses_per_item, "every access record meets its item"
    tenth = len(held) // 10
    # The most that was held around that point: what is held rises between two purges.
    early, late = max(held[tenth // 2 : tenth + 1]), max(held[-max(1, tenth // 2) :])
    ratio = late / early
    metrics = join.metrics
    told = (
        f"{results:,} results in {seconds:,.0f} s ({results / seconds:,.0f} a second), {early:,} bytes held at a "
        f"tenth, {late:,} at the end ({ratio:.2f} times, bar 1.2), most ever {join.peak_bytes:,}; "
        f"{metrics.dropped_on_arrival:,} dropped on arrival, {metrics.closed_rows:,} purged, {join.punctuations_held} "
        f"ranges held, {passed_on:,} punctuations passed on"
    )
    return told, ratio <= 1.2 and join.punctuations_held <= 2


def _grown(work: NewsWorkload, items_per_part: int, part: float) -> int:
    join = SymmetricHashJoin(mjoin_spec(SCHEMAS, on="sno", budget="4GB"))
    stop = int(work.items * part)
    for start in range(0, stop, items_per_part):
        last = min(start + items_per_part, stop)
        _offered(join, work.news(start, last), work.accesses(start, last).records)
    return join.size()


def _offered(join: MJoin, news: pa.RecordBatch, access: pa.RecordBatch) -> int:
    results = 0
    for source, batch in (("news", news), ("access", access)):
        results += sum(out.num_rows for out in join.offer(source, join.spec.with_codes(source, batch)))
    return results


# ---------------------------------------------------------------- plots and output


def plot(verdicts: list[Verdict], directory: Path) -> list[Path]:
    """One picture per experiment and arrival: time, and memory where it is compared."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for verdict in verdicts:
        for order, curves in verdict.curves.items():
            has_memory = verdict.name.startswith(("2", "3"))
            figure, axes = plt.subplots(1, 1 + has_memory, figsize=(6 * (1 + has_memory), 4), squeeze=False)
            for curve in curves:
                axes[0][0].plot(curve.results, curve.seconds, label=curve.name)
                if has_memory:
                    axes[0][1].plot(curve.results, [size / 1e6 for size in curve.held_bytes], label=curve.name)
            for axis, label in zip(axes[0], ("CPU seconds", "MB held"), strict=False):
                axis.set_xlabel("results")
                axis.set_ylabel(label)
                axis.legend()
            figure.suptitle(f"Experiment {verdict.name}, {order}")
            figure.tight_layout()
            path = directory / f"experiment-{verdict.name.split()[0]}-{order}.png"
            figure.savefig(path, dpi=110)
            plt.close(figure)
            written.append(path)
    return written


def main() -> int:
    """Run what was asked for, print each verdict, and end with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller data, under a minute")
    parser.add_argument("--soak", action="store_true", help="the soak instead of the experiments")
    parser.add_argument("--records", type=int, default=10_000_000, help="access records of the soak")
    parser.add_argument("--output", type=Path, default=Path("artifacts/metadata"), help="where plots and JSON go")
    arguments = parser.parse_args()
    if arguments.soak:
        verdicts = [soak(arguments.records, items_per_part=max(10, arguments.records // 10_000))]
    else:
        scale = Scale(items=600, runs=1) if arguments.quick else Scale()
        scheduling(Scale(items=50), "ordered", Schedule(), "compiles what is compiled once")
        verdicts = [experiment_1(scale), experiment_2(scale), experiment_3(scale)]
    for verdict in verdicts:
        print(f"{'reached' if verdict.is_reached else 'MISSED':<8} {verdict.name}: {verdict.said}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {
        v.name: {
            "reached": v.is_reached,
            "said": v.said,
            "curves": {o: [asdict(c) for c in f] for o, f in v.curves.items()},
        }
        for v in verdicts
    }
    target = arguments.output / ("soak.json" if arguments.soak else "experiments.json")
    target.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    for path in [target, *plot(verdicts, arguments.output)]:
        print(f"wrote {path}")
    return 0 if all(verdict.is_reached for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
