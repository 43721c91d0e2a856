"""Benchmark of the semi-stream joins: every figure is a ratio of two things measured in this run, in one process.

Axes
----
relation    3.5 M rows of 120 bytes in one shard, unique even keys
stream      tuples of 20 bytes, keys by Zipf's law; "shuffled": hot keys lie anywhere, "ranked": hottest first
exponent    0, 0.25, 0.5, 1
budget      0.5, 1, 5, 10 % of the relation's bytes, everything that an operator holds included
disk        simulated: 60 MB/s, 8 ms per seek, CPU time + the time that disk would have taken;
            direct: the real disk past the page cache, wall-clock time less what other processes took of the CPU;
            memory: mapped pages in memory, CPU time

Bars (by section; ``--section`` chooses)
----
cpu         mesh per relation row within 2 times a DuckDB hash join (1 thread) that builds on the window and probes the
            relation in memory; per stream tuple (add, expire, emit) within 2 times a take of the output's columns
inl         mesh serves at least 10 times as much as index nested loops, budgets 0.5 to 10 %, both disks
hybrid      hybrid serves more than mesh from 5 % and exponent 0.25 on, at least 85 % of the model's ratio to mesh
            elsewhere, never less than half of mesh; both disks, shuffled and ranked
balanced    balanced / mesh reaches 90 % of the best that the memory model allows, (1 - a) / (1 - h(a)), at 1, 5, 10 %;
            a required rate takes at most 1.1 times the model's least memory; components add up to size() and size() to
            what the process grows by, within 10 %
auto        within 10 % of the best other strategy at exponents 0, 0.5, 1, budgets 1, 5, 10 %, on all three disks
model       predicted loop costs within 15 % of measured over the papers' validation grids
nomatch     streams without a match at least as fast as matched ones, once the cache knows that there is none

A rate is taken when it is steady: after the window was filled and turned over, the cache counted and switched. What is
compared is measured by turns, a little at a time. Stream tuples are made outside the measured time.
The data is made below ``--dir`` and removed at the end; with ``--data`` it is kept there for the next run. Always ends
with exit code 0; lines whose bar was missed say so.
"""

import argparse
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from operator_bench import adaptive, cached, cpu, disk, prediction
from operator_bench.harness import FULL, QUICK, Data, Report

from dovetail.core.errors import DovetailError

SECTIONS: dict[str, Callable[[Data, Report], None]] = {
    "cpu": cpu.against_duckdb_and_take,
    "inl": disk.against_index_nested_loops,
    "hybrid": disk.hybrid_against_mesh,
    "balanced": cached.balanced_against_mesh,
    "auto": adaptive.auto_against_the_best,
    "model": prediction.predicted_against_measured,
    "nomatch": cached.unmatched_against_matched,
}


def run_section(name: str, data: Data, report: Report) -> None:
    """Run a section; an operator that fails at a point ends the section, visibly, and not the run."""
    try:
        SECTIONS[name](data, report)
    except DovetailError:
        traceback.print_exc()
        report.add(name, "the rest of this section", float("nan"), "no error", is_met=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a smaller relation and fewer points: below 2 minutes")
    parser.add_argument("--dir", default=None, help="where to put the data (default: a temporary directory)")
    parser.add_argument("--data", default=None, metavar="DIR", help="keep the data there, or use what is there")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the figures as JSON as well")
    arguments = parser.parse_args()
    base = Path(arguments.data or tempfile.mkdtemp(prefix="dovetail-bench-", dir=arguments.dir))
    base.mkdir(parents=True, exist_ok=True)
    report = Report()
    if arguments.quick:
        print("A reduced relation: the bars are meant for the full one, where windows and blocks are larger.")
    try:
        data = Data(base, QUICK if arguments.quick else FULL)
        for name in arguments.section or SECTIONS:
            run_section(name, data, report)
    finally:
        if arguments.data is None:
            shutil.rmtree(base)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps([asdict(bar) for bar in report.bars], indent=1))
    judged = [bar for bar in report.bars if bar.is_met is not None]
    print(f"\n{sum(bool(bar.is_met) for bar in judged)} of {len(judged)} bars met")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
