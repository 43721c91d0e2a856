"""What the kernels cost, against the least that the same memory accesses could cost.

Axes
----
- *Probe* of a `MultiMap` that is full with 350,000 codes: with the default load (a third of the slots taken), and with
  the dense one (half of them) that maps in a budget use. Batches of 65,536 codes, and of all 350,000; hit rates 100 %,
  50 % and 0 %. Measured against a compiled loop that makes one hashed random read per code in the same slot array and
  adds up what it reads. The bar is for the default; the dense map is shown beside it, since windows pay its price.
- *Lookup* of 1,000,000 codes in 20,000,000 sorted codes that are mapped from a file, through fences 128 codes apart:
  queries by Zipf's law (exponent 1, hot codes scattered) and uniform. Measured against `numpy.searchsorted` of the
  same queries in the whole array held in memory, which finds one end of each range where the lookup finds both.
- *Upkeep* of the map, per entry: first in first out; removal from the middle with an ancient entry kept; one code that
  has all the entries.
- *Merge* of four sorted runs against numpy's stable sort of the same codes.

Bars
----
- a batch probe costs at most 2.0 times the loop of reads;
- a lookup is at least as fast as `numpy.searchsorted`.

Every ratio is the median over repetitions in which its two sides ran one right after the other. Times are CPU time of
this process, so that other work on the machine counts as little as possible. Exit status 0 whatever the outcome.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from dovetail.kernels._slots import DEFAULT_MAX_LOAD, DENSE_LOAD
from dovetail.kernels._vector import LINE
from dovetail.kernels.hashing import home_slot
from dovetail.kernels.multimap import MultiMap
from dovetail.kernels.sorted_codes import lookup_sorted, make_fences, merge_sorted_runs
from dovetail_lab.workloads import Zipf

Int64Array = npt.NDArray[np.int64]

SEED = 20_260
TABLE_CODES = 350_000
BATCH_CODES = 65_536
SORTED_CODES = 20_000_000
QUERIES = 1_000_000
FENCE_STRIDE = 128
PROBE_BAR = 2.0
LOOKUP_BAR = 1.0


@dataclass(frozen=True)
class Result:
    """One line of the report. `ratio` is ours to the reference's, or for a speed-up the reference's to ours."""

    what: str
    ours_ns: float
    reference_ns: float | None = None
    ratio: float | None = None
    bar: str | None = None
    is_met: bool | None = None


@numba.njit  # type: ignore[untyped-decorator]
def read_once_per_code(slots: Any, codes: Any) -> Any:
    """Make one hashed random read per code in a slot array: the least that a probe could do."""
    line_count = slots.size // LINE
    total = 0
    for i in range(codes.size):
        total += slots[LINE * home_slot(codes[i], line_count)]
    return total


def measure(calls: list[Callable[[], object]], repetitions: int) -> list[npt.NDArray[np.float64]]:
    """Give the CPU seconds of each call in each repetition; the calls take turns. One more run first is not counted."""
    seconds = np.empty((len(calls), repetitions + 1))
    for repetition, (number, call) in itertools.product(range(repetitions + 1), enumerate(calls)):
        start = time.process_time_ns()
        call()
        seconds[number, repetition] = (time.process_time_ns() - start) * 1e-9
    return list(seconds[:, 1:])


def compare(
    what: str, ours: Callable[[], object], reference: Callable[[], object], rows: int, repetitions: int
) -> tuple[Result, float]:
    """Give the result without a bar, and the median of the ratios of ours to the reference's time."""
    our_seconds, reference_seconds = measure([ours, reference], repetitions)
    ratio = float(np.median(our_seconds / reference_seconds))
    our_ns, reference_ns = (float(np.median(s)) / rows * 1e9 for s in (our_seconds, reference_seconds))
    return Result(what, our_ns, reference_ns, ratio), ratio


def in_turns(codes: Int64Array, batch: int, first: int) -> Iterator[Int64Array]:
    """Give batch after batch of the codes, endlessly, beginning with the given one.

    Two sides of a comparison begin with different ones: neither finds in the cache what the other has just read.
    """
    batches = [codes[i : i + batch] for i in range(0, codes.size - batch + 1, batch)]
    return itertools.islice(itertools.cycle(batches), first, None)


def bench_probes(repetitions: int) -> Iterator[Result]:
    rng = np.random.default_rng(SEED)
    codes = rng.permutation(10 * TABLE_CODES)[: 2 * TABLE_CODES].astype(np.int64)
    present, absent = codes[:TABLE_CODES], codes[TABLE_CODES:]
    hits, misses = rng.permutation(present), rng.permutation(absent)
    half = np.where(rng.random(TABLE_CODES) < 0.5, hits, misses)
    rates = (("100 %", hits), ("50 %", half), ("0 %", misses))
    for load, batch in itertools.product((DEFAULT_MAX_LOAD, DENSE_LOAD), (BATCH_CODES, TABLE_CODES)):
        window = MultiMap(TABLE_CODES, load)
        window.insert(present)
        for rate, queries in rates:
            name = f"{batch:,} codes, {rate} hits, load {load:.2f}"
            mine, theirs = in_turns(queries, batch, 0), in_turns(queries, batch, 2)

            def read(batches: Iterator[Int64Array] = theirs, slots: Int64Array = window._slots) -> object:
                return read_once_per_code(slots, next(batches))

            def probe(batches: Iterator[Int64Array] = mine, window: MultiMap = window) -> object:
                return window.probe(next(batches))

            result, ratio = compare(f"MultiMap.probe: {name}", probe, read, batch, repetitions)
            if load == DEFAULT_MAX_LOAD:
                result = replace(result, bar=f"<= {PROBE_BAR}", is_met=ratio <= PROBE_BAR)
            yield result


def bench_lookups(repetitions: int, directory: Path) -> Iterator[Result]:
    rng = np.random.default_rng(SEED)
    codes = np.sort(rng.integers(0, 2**62, SORTED_CODES))
    codes.tofile(directory / "codes.bin")
    mapped = np.memmap(directory / "codes.bin", dtype=np.int64, mode="r")
    fences = make_fences(mapped, FENCE_STRIDE)
    zipf = Zipf(SORTED_CODES, exponent=1.0, order="shuffled", seed=SEED)
    for name, queries in (
        ("Zipf 1", codes[zipf.sample(QUERIES) - 1]),
        ("uniform, all present", codes[rng.integers(0, SORTED_CODES, QUERIES)]),
        ("uniform, none present", rng.integers(0, 2**62, QUERIES)),
    ):
        result, ratio = compare(
            f"lookup_sorted: {name}; fences are {fences.nbytes / codes.nbytes:.2%} of the codes",
            lambda queries=queries: lookup_sorted(fences, FENCE_STRIDE, mapped, queries),  # type: ignore[misc]
            lambda queries=queries: np.searchsorted(codes, queries),  # type: ignore[misc]
            QUERIES,
            repetitions,
        )
        yield Result(result.what, result.ours_ns, result.reference_ns, 1 / ratio, f">= {LOOKUP_BAR}", ratio <= 1)


def bench_upkeep(repetitions: int) -> Iterator[Result]:
    rng = np.random.default_rng(SEED)
    batch = 16_384
    codes = rng.integers(0, 10**9, TABLE_CODES)
    window = MultiMap(TABLE_CODES)
    window.insert(codes)

    def first_in_first_out() -> None:
        window.remove_oldest(batch)
        window.insert(rng.integers(0, 10**9, batch))

    (seconds,) = measure([first_in_first_out], repetitions)
    yield Result("remove_oldest + insert, full map", float(np.median(seconds)) / batch * 1e9)

    middle = MultiMap(TABLE_CODES)
    middle.insert(np.array([-1]))
    middle.insert(rng.integers(0, 10**9, TABLE_CODES - 1))

    def from_the_middle() -> None:
        live = middle.live_seqs()[1:]
        middle.remove_codes(middle.codes_of(rng.choice(live, batch, replace=False)))
        middle.insert(rng.integers(0, 10**9, TABLE_CODES - len(middle)))

    def choosing_them() -> None:
        middle.codes_of(rng.choice(middle.live_seqs()[1:], batch, replace=False))

    removing, choosing = measure([from_the_middle, choosing_them], repetitions)
    yield Result(
        "remove_codes + insert, full map, ancient entry kept", float(np.median(removing - choosing)) / batch * 1e9
    )

    for entries in (100_000, 1_000_000):
        hot = MultiMap(entries)

        def one_code(hot: MultiMap = hot, entries: int = entries) -> None:
            hot.insert(np.full(entries, 7))
            hot.remove_codes(np.array([7]))

        (seconds,) = measure([one_code], repetitions)
        yield Result(f"insert + remove_codes, one code, {entries:,} entries", float(np.median(seconds)) / entries * 1e9)


def bench_merge_and_gather(repetitions: int) -> Iterator[Result]:
    rng = np.random.default_rng(SEED)
    runs = [np.sort(rng.integers(0, 2**62, size)) for size in (2_000_000, 200_000, 200_000, 20_000)]
    rows = sum(run.size for run in runs)

    def merge() -> None:
        cursors = np.zeros(len(runs), dtype=np.int64)
        while merge_sorted_runs(runs, cursors, 65_536)[0].size:
            pass

    joined = np.concatenate(runs)
    yield compare(
        "merge_sorted_runs: 4 runs, 1 large, against a stable argsort",
        merge,
        lambda: np.argsort(joined, kind="stable"),
        rows,
        max(3, repetitions // 5),
    )[0]


def as_table(results: list[Result]) -> Table:
    table = Table(title="Kernels: nanoseconds of CPU time per code, entry or row")
    for heading in ("what", "ours", "reference", "ratio", "bar", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for result in results:
        verdict = "" if result.is_met is None else "met" if result.is_met else "NOT met"
        table.add_row(
            result.what,
            f"{result.ours_ns:.1f}",
            "" if result.reference_ns is None else f"{result.reference_ns:.1f}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            result.bar or "",
            verdict,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--repetitions", type=int, default=31, help="of each pair of calls (default 31)")
    options = parser.parse_args()
    console = Console(width=120)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        for bench in (
            bench_probes(options.repetitions),
            bench_lookups(max(3, options.repetitions // 5), Path(directory)),
            bench_upkeep(options.repetitions),
            bench_merge_and_gather(options.repetitions),
        ):
            results.extend(bench)
    console.print(as_table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
