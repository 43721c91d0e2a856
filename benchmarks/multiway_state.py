"""What the state of a multi-way join costs where it should cost little: commits, catch-ups, a burst, promises.

Axes
----
- commit: bytes that a commit writes per arrived row, after 1 M and after 10 M rows of state; a left join without a
  window, so that its done bits change all over the state; bar: 1.2 times
- growth: bytes that a commit writes per arrived row of an inner join, while the state grows; bar: 1.2 times
- promises: the same with punctuations of single keys in no order
- drain: 300 new rows per input against spilled state: bytes read
- burst: a window's worth of rows beyond the budget, then calm: partitions on disk, micro-batch by micro-batch
- purge: 1,000 keys closed in a state of 100 k and of 1 M rows: rows copied to purge them

    python benchmarks/multiway_state.py [--sections commit drain burst purge promises] [--quick]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.joins.multiway import MJoin, TimeWindow, mjoin_spec
from dovetail.joins.multiway.snapshots import named_tables
from dovetail.joins.promises import Metadata, MetadataJoin

SEED = 18
TEXT = "x" * 20


class Store:
    """The tables of the last commit, as a runtime keeps them; counts what commits write."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.written = 0

    def commit(self, join: MJoin) -> int:
        """Bytes that a commit of the join writes."""
        known = frozenset(self.tables) & (join.table_names() | {n for n in self.tables if n.endswith(".index")})
        snapshot = join.snapshot(have=known)
        new = {name: _stored(table) for name, table in snapshot.tables.items() if table.num_rows}
        held = named_tables(snapshot.values)
        kept = {n: t for n, (t, _) in {**{n: (t, 0) for n, t in self.tables.items()}, **new}.items()}
        self.tables = {n: t for n, t in kept.items() if n.removesuffix(".index") in held}
        join.refer_to_stored(snapshot, self.tables.__getitem__)
        written = sum(size for _, size in new.values())
        self.written += written
        return written


def _stored(table: pa.Table) -> tuple[pa.Table, int]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    return pa.ipc.open_stream(content).read_all(), content.size


def drained(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def rows(names: str, name: str, keys: np.ndarray) -> pa.RecordBatch:
    texts = pa.array([TEXT], pa.string()).take(pa.array(np.zeros(len(keys), np.int64)))
    return pa.record_batch({"k": keys, name: texts})


def commit(is_quick: bool, kind: str = "left") -> None:
    per_batch = 10_000
    for total in (100_000, 1_000_000) if is_quick else (1_000_000, 10_000_000):
        chance, store = np.random.default_rng(SEED), Store()
        schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "ab"}
        spec = mjoin_spec(schemas, on="k", how="left", budget="8GB")
        join = MJoin(spec)
        # The left side is there before; the right one matches it all over.
        keys = chance.permutation(total)
        for start in range(0, total, 100_000):
            part = keys[start : start + 100_000]
            drained(join.offer("a", spec.with_codes("a", rows("ab", "a", part))))
        store.commit(join)
        written, most, batches = 0, 0, 100
        for _ in range(batches):
            some = chance.integers(0, total, per_batch)
            drained(join.offer("b", spec.with_codes("b", rows("ab", "b", some))))
            one = store.commit(join)
            written, most = written + one, max(most, one)
        mean = written / batches
        print(f"commit: {total:>10,} rows of state, {per_batch:,} arrive: {mean / per_batch:,.1f} bytes per row, "
              f"at most {most / 1e3:,.0f} kB in one", flush=True)  # fmt: skip


def growth(is_quick: bool) -> None:
    per_batch, chance, store = 10_000, np.random.default_rng(SEED), Store()
    schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "ab"}
    spec = mjoin_spec(schemas, on="k", budget="8GB")
    join, arrived, most = MJoin(spec), 0, 0
    for total in (100_000, 1_000_000) if is_quick else (1_000_000, 10_000_000):
        written = rows_before = 0
        while arrived < total:
            for name in "ab":
                some = chance.integers(0, 2**40, per_batch)
                drained(join.offer(name, spec.with_codes(name, rows("ab", name, some))))
                arrived += per_batch
            one = store.commit(join)
            if arrived > total // 2:
                written, rows_before, most = written + one, rows_before + 2 * per_batch, max(most, one)
        chunks = sum(map(len, join.state.memory))
        print(f"growth: {total // 2:>9,} to {total:,} rows of state: {written / rows_before:,.1f} bytes per row, at "
              f"most {most / 1e6:,.1f} MB in one of {2 * per_batch:,} rows, {chunks} chunks", flush=True)  # fmt: skip


def promises(is_quick: bool) -> None:
    for total in (100_000, 400_000) if is_quick else (100_000, 1_000_000):
        chance, store = np.random.default_rng(SEED), Store()
        schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "ab"}
        spec = mjoin_spec(schemas, on="k", budget="2GB")
        join = MetadataJoin(spec, Metadata())
        keys = chance.permutation(4 * total)[: total + 100_000] * 1000
        for start in range(0, total, 100_000):
            drained(join.punctuate_rows("a", pa.record_batch({"k": keys[start : start + 100_000]})))
        store.commit(join)
        written = 0
        for number in range(50):
            some = keys[total + 1000 * number : total + 1000 * (number + 1)]
            drained(join.punctuate_rows("a", pa.record_batch({"k": some})))
            written += store.commit(join)
        print(f"promises: {total:>10,} held, 1,000 per commit: {written / 50 / 1e3:,.1f} kB per commit", flush=True)


def drain(is_quick: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "ab"}
        spec = mjoin_spec(schemas, on="k", budget="8MB", spill_directory=directory)
        join, store, chance = MJoin(spec), Store(), np.random.default_rng(SEED)
        total = 200_000 if is_quick else 600_000
        keys = {name: chance.permutation(total) for name in "ab"}
        for start in range(0, total, 10_000):
            for name in "ab":
                drained(join.offer(name, spec.with_codes(name, rows("ab", name, keys[name][start : start + 10_000]))))
        drained(join.drain())
        store.commit(join)
        held = sum(p.bytes for d in join.state.domains for pieces in d.pieces for p in pieces)
        for _ in range(3):
            before, found, begun = join.metrics.bytes_read, 0, time.process_time()
            for name in "ab":
                some = chance.integers(0, total, 300)
                found += drained(join.offer(name, spec.with_codes(name, rows("ab", name, some))))
            found += drained(join.drain())
            took, read = time.process_time() - begun, join.metrics.bytes_read - before
            written = store.commit(join)
            print(f"drain: 2 x 300 rows, {held / 1e6:,.1f} MB spilled: read {read / 1e6:,.2f} MB, {took * 1e3:,.0f} ms "
                  f"CPU, {found} rows; commit {written / 1e6:,.2f} MB", flush=True)  # fmt: skip


def burst(is_quick: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.string()}) for n in "ab"}
        window = TimeWindow(10, {n: f"t{n}" for n in "ab"})
        spec = mjoin_spec(schemas, on="k", budget="4MB", spill_directory=directory, window=window)
        join, chance, now = MJoin(spec), np.random.default_rng(SEED), 0

        def tick(count: int) -> float:
            nonlocal now
            now, begun = now + 1, time.process_time()
            for name in "ab":
                batch = rows("ab", name, chance.integers(0, 10_000, count))
                batch = batch.add_column(1, f"t{name}", pa.array(np.full(count, now)))
                drained(join.offer(name, spec.with_codes(name, batch)))
            drained(join.drain())
            drained(join.advance(now - 1))
            return time.process_time() - begun

        for _ in range(20):
            tick(500)
        for _ in range(10):
            tick(10_000)
        for number in range(60):
            took = tick(500)
            if number in (0, 1, 2, 5, 10, 11, 12, 15, 20, 30, 54):
                held = join.state.held_bytes / join.state.limits.state
                print(f"burst: {number:>3} ticks after it: {int(join.state.spilled.sum())} of 64 partitions on disk, "
                      f"{held:.0%} of the state's memory in use, {took * 1e3:,.0f} ms CPU", flush=True)  # fmt: skip


def purge(is_quick: bool) -> None:
    for total in (20_000, 200_000) if is_quick else (100_000, 1_000_000):
        schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "ab"}
        spec = mjoin_spec(schemas, on="k", budget="2GB")
        join = MetadataJoin(spec, replace(Metadata(), purge_count=1000, purging="batched"))
        chance, store = np.random.default_rng(SEED), Store()
        keys = chance.permutation(total)
        for name in "ab":
            for start in range(0, total, 50_000):
                drained(join.offer(name, spec.with_codes(name, rows("ab", name, keys[start : start + 50_000]))))
        store.commit(join)
        took = written = 0.0
        for number in range(10):
            some = pa.record_batch({"k": np.sort(chance.permutation(keys)[1000 * number : 1000 * number + 1000])})
            begun = time.process_time()
            for name in "ab":
                drained(join.punctuate_rows(name, some))
            took += time.process_time() - begun
            written += store.commit(join)
        print(f"purge: 10 x 1,000 of {total:>9,} keys closed: {took * 100:,.1f} ms CPU each, commit "
              f"{written / 1e7:,.2f} MB each, {join.state_rows()} held", flush=True)  # fmt: skip


SECTIONS = {"commit": commit, "growth": growth, "promises": promises, "drain": drain, "burst": burst, "purge": purge}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a tenth of the state")
    given: Any = parser.parse_args()
    print(f"seed {SEED}, state under {Path(tempfile.gettempdir()).name}")
    for name in given.sections:
        SECTIONS[name](given.quick)


if __name__ == "__main__":
    main()
