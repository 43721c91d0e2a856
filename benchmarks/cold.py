"""Lookups in a table several times larger than memory, by Dovetail and by its peers, each in the same memory cgroup.

Axes: the stream's keys (Zipf's law with exponent 1, uniform), the contender. Each contender runs alone in a process of
its own, in a cgroup whose limit counts the page cache; the table's pages are dropped first. DuckDB scans Parquet with a
memory limit; LMDB and RocksDB look every distinct key up once, by `getmulti` and `multi_get` on two threads, and only
those calls are timed. `lookup` and `auto` are Dovetail's operators in process: they find the distinct keys, look them
up and make the output, on one thread. `enrich` is `dovetail.enrich` on Spark with its default, JVM and workers in the
limit. `--spark` adds Spark's own join of one batch.

    make bench-cold                                     # 60 M rows in 4 GB: 36 GB of disk, about an hour
    make bench-cold ARGS="--rows 6000000 --limit 400"   # a minute or two after the data is made

Where no memory cgroup can be made (it takes root), it says so and stops with code 2; with too little disk, too.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from cold_bench.contenders import DATA_OF, Figure, Work, device_reads_per_s, run
from cold_bench.data import BYTES_PER_ROW, make
from cold_bench.limits import NoMemoryLimitError, drop_pages, memory_limit
from cold_bench.report import plot, table

_NO_LIMIT = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000_000)
    parser.add_argument("--limit", type=int, default=4_096, help="MiB for one contender, page cache included")
    parser.add_argument("--tuples", type=int, default=100_000, help="per micro-batch")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--contenders", default=",".join(name for name in DATA_OF if name != "spark"))
    parser.add_argument("--spark", action="store_true", help="Spark's own join of one batch, too")
    parser.add_argument("--directory", type=Path, default=Path("artifacts/cold"))
    parser.add_argument("--json", type=Path, help="where to write the figures; a plot goes beside them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        work = json.loads(options.child)
        run(Work(**{**work, "exponents": tuple(work["exponents"])}))
        return 0
    names = options.contenders.split(",") + (["spark"] if options.spark else [])
    unknown = [name for name in names if name not in DATA_OF]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a contender: use {', '.join(DATA_OF)}")
    options.directory.mkdir(parents=True, exist_ok=True)
    needed, free = options.rows * BYTES_PER_ROW, shutil.disk_usage(options.directory).free
    has_data = all((options.directory / f"{DATA_OF[name]}-{options.rows}").exists() for name in names)
    if free < needed and not has_data:
        print(f"{options.directory} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed: use fewer --rows.")
        return _NO_LIMIT
    try:
        with memory_limit(options.limit << 20):
            pass
    except NoMemoryLimitError as error:
        print(f"{error} Without a limit the table is in the page cache, and there is nothing to measure.")
        return _NO_LIMIT
    paths = make(options.directory, options.rows, ["parquet", *(DATA_OF[name] for name in names)])
    began_load = os.getloadavg()[0]
    device = device_reads_per_s(paths[DATA_OF[names[0]]])
    figures = [figure for name in names for figure in _figures_of(name, paths[DATA_OF[name]], options)]
    _require_agreement(figures)
    print(
        f"{options.rows:,} rows of 120 bytes, limit {options.limit} MiB, {options.tuples:,} tuples per micro-batch; "
        f"load {began_load:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    print("reads of 4 KiB per second by depth: " + ", ".join(f"{depth}: {rate:,.0f}" for depth, rate in device.items()))
    print(table(figures, max(device.values())))
    if options.json is not None:
        document = {
            "rows": options.rows,
            "limit_mib": options.limit,
            "tuples": options.tuples,
            "load": [began_load, os.getloadavg()[0]],
            "device_reads_per_s": device,
            "figures": [{**asdict(figure), "median_s": figure.median_s} for figure in figures],
        }
        options.json.write_text(json.dumps(document, indent=1))
        plot(figures, options.json.with_suffix(".png"))
    return 0


def _figures_of(name: str, path: Path, options: argparse.Namespace) -> list[Figure]:
    work = Work(
        contender=name,
        path=str(path.absolute()),
        rows=options.rows,
        tuples=options.tuples,
        batches=1 if name == "spark" else options.batches,
        limit_bytes=options.limit << 20,
        exponents=(1.0, 0.0),
    )
    figures = []
    for exponent in work.exponents:
        # A process of its own for each distribution: neither warms the other's pages.
        drop_pages(path)
        one = {**asdict(work), "exponents": [exponent]}
        with memory_limit(work.limit_bytes) as limit:
            printed = limit.run([sys.executable, str(Path(__file__).absolute()), "--child", json.dumps(one)])
        figures += [Figure(**figure) for figure in json.loads(printed)]
        print(f"{name}, exponent {exponent:g}: {figures[-1].median_s * 1000:,.0f} ms", file=sys.stderr, flush=True)
    return figures


def _require_agreement(figures: list[Figure]) -> None:
    """All contenders that have looked up the same batches must have found the same rows."""
    for exponent in {figure.exponent for figure in figures}:
        found = {(len(figure.seconds), figure.checksum) for figure in figures if figure.exponent == exponent}
        by_length: dict[int, set[int]] = {}
        for batches, checksum in found:
            by_length.setdefault(batches, set()).add(checksum)
        assert all(len(sums) == 1 for sums in by_length.values()), (
            f"contenders disagree at exponent {exponent}: {found}"
        )


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    sys.exit(main())
