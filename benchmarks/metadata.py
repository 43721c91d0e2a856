"""The metadata-aware join against the joins and strategies that its paper compares it with, and a soak.

Axes
----
- experiment 1, scheduling: priority-driven streams with value-oriented tuples against random streams with sequential
  tuples, for ordered and for random arrival; time to results. Bar: not slower in either.
- experiment 2, XJoin: time and memory against a join without metadata, for ordered and random arrival, in a budget in
  which XJoin overflows, and with 25 times the data in batches of 11,000 tuples with one punctuation each. Bar: less
  than half of the memory at the end, and not slower in the overflow.
- experiment 3, purging: at once against after 100 punctuations, random arrival. Bar: batches take less time.
- Spark: bytes and rows of state of `multi_join` with punctuations against the built-in stream-stream join with the
  narrowest range of event times that keeps every result, on the same files. Bar: at most a tenth of both where one item
  in a hundred is open seven times as long as the others; where all are open equally long, it is told beside.
- soak: 10 million access records over 1 million items, punctuations trailing. Bar: bytes held at the end at most 1.2
  times those at a tenth, while those of a join without metadata (in ample memory) grow with the stream.

Times are CPU seconds of this process, the fastest of several runs. Every run checks the number of its results.

    python benchmarks/metadata.py                 all but the soak; table, JSON and plots under artifacts/metadata
    python benchmarks/metadata.py --section 2     one of 1, 2, 3 and spark, added to what is there of the others
    python benchmarks/metadata.py --quick         smaller data
    python benchmarks/metadata.py --soak          the soak; --records for another size
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from metadata_bench.plots import draw

from dovetail.joins.multiway import MJoin, SymmetricHashJoin, mjoin_spec
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation, Schedule
from dovetail_lab.metadata_runs import SCHEMAS, Arrival, Curve, Scale, against_xjoin, fastest, purging, scheduling
from dovetail_lab.workloads.news import NewsWorkload

ARRIVALS: tuple[Arrival, ...] = ("ordered", "random")


@dataclass
class Verdict:
    """What one experiment found, and whether it reaches its bar."""

    name: str
    is_reached: bool
    said: str
    curves: dict[str, list[Curve]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        curves = {order: [asdict(curve) for curve in found] for order, found in self.curves.items()}
        return {"reached": self.is_reached, "said": self.said, "curves": curves, "figures": self.figures}


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
    large = replace(scale, items=25 * scale.items)
    curves["large"] = against_xjoin(large, "ordered", batch_items=1000, purge_count=None)
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


# ---------------------------------------------------------------- Spark


def on_spark(is_quick: bool) -> Verdict:
    """State against the built-in join, which purges by time only."""
    from metadata_bench.on_spark import Lives, compare

    items, parts = (1000, 8) if is_quick else (4000, 14)
    tail = Lives(f"one item in 100 open for {parts // 2} parts, the others for 1", items, parts, 10, 0.01, parts // 2)
    told, share, figures = compare(tail)
    print(f"  {told}", flush=True)
    alike, _, alike_figures = compare(Lives("all open for 1 part", items, parts // 2))
    said = f"{told}; {alike}"
    return Verdict("Spark", share <= 0.1, said, figures={"tail": figures, "alike": alike_figures})


# ---------------------------------------------------------------- soak


def soak(records: int, items_per_part: int) -> Verdict:
    """Bytes held through a long stream, by the join that is told what is over and by one that is not."""
    per_item = 10
    work = NewsWorkload(max(100, records // per_item), per_item)
    told, is_flat, held = _soaked(work, items_per_part)
    theirs = _grown(work, items_per_part, 0.1)
    early, late = theirs[len(theirs) // 5 - 1], theirs[-1]
    told += f"; without metadata {early:,} bytes are held after a 50th and {late:,} after a tenth"
    seen = [items_per_part * per_item * (number + 1) for number in range(len(held))]
    figures = {
        "MJoin with punctuations": {"records": seen, "held_bytes": held},
        "symmetric hash join, first tenth": {"records": seen[: len(theirs)], "held_bytes": theirs},
    }
    return Verdict("soak", is_flat and late > 3 * early, told, figures=figures)


def _soaked(work: NewsWorkload, items_per_part: int) -> tuple[str, bool, list[int]]:
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
    return told, ratio <= 1.2 and join.punctuations_held <= 2, held


def _grown(work: NewsWorkload, items_per_part: int, part: float) -> list[int]:
    join = SymmetricHashJoin(mjoin_spec(SCHEMAS, on="sno", budget="4GB"))
    stop = int(work.items * part)
    held = []
    for start in range(0, stop, items_per_part):
        last = min(start + items_per_part, stop)
        _offered(join, work.news(start, last), work.accesses(start, last).records)
        held.append(join.size())
    return held


def _offered(join: MJoin, news: pa.RecordBatch, access: pa.RecordBatch) -> int:
    results = 0
    for source, batch in (("news", news), ("access", access)):
        results += sum(out.num_rows for out in join.offer(source, join.spec.with_codes(source, batch)))
    return results


# ---------------------------------------------------------------- output


def main() -> int:
    """Run what was asked for, print each verdict, and end with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller data")
    parser.add_argument("--section", action="append", choices=["1", "2", "3", "spark"], help="only these")
    parser.add_argument("--soak", action="store_true", help="the soak instead of the experiments")
    parser.add_argument("--records", type=int, default=10_000_000, help="access records of the soak")
    parser.add_argument("--output", type=Path, default=Path("artifacts/metadata"), help="where plots and JSON go")
    arguments = parser.parse_args()
    if arguments.soak:
        verdicts = [soak(arguments.records, items_per_part=max(10, arguments.records // 10_000))]
    else:
        scale = Scale(items=600, runs=1) if arguments.quick else Scale()
        scheduling(Scale(items=50), "ordered", Schedule(), "compiles what is compiled once")
        sections: dict[str, Callable[[], Verdict]] = {
            "1": lambda: experiment_1(scale),
            "2": lambda: experiment_2(scale),
            "3": lambda: experiment_3(scale),
            "spark": lambda: on_spark(arguments.quick),
        }
        verdicts = [sections[name]() for name in arguments.section or sections]
    for verdict in verdicts:
        print(f"{'reached' if verdict.is_reached else 'MISSED':<8} {verdict.name}: {verdict.said}", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    target = arguments.output / ("soak.json" if arguments.soak else "experiments.json")
    known = json.loads(target.read_text(encoding="utf-8")) if target.exists() and arguments.section else {}
    known.update({verdict.name: verdict.as_dict() for verdict in verdicts})
    target.write_text(json.dumps(known, indent=1), encoding="utf-8")
    drawn = [draw(name, found, arguments.output) for name, found in known.items()]
    for path in [target, *drawn]:
        if path is not None:
            print(f"wrote {path}")
    return 0 if all(verdict.is_reached for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
