"""Section ``cpu``: what MESHJOIN costs per relation row and per stream tuple, against DuckDB and a bare take."""

import statistics
import time
from collections.abc import Callable

import duckdb
import numpy as np
import pyarrow as pa

from dovetail.joins import MeshJoin, join_spec
from dovetail.joins.window.stream_window import StreamWindow
from dovetail_lab.subjects import DiskUnderTest
from operator_bench.harness import Data, Report

_REPETITIONS = 5


def against_duckdb_and_take(data: Data, report: Report) -> None:
    """Per row: one cycle over the window. Per tuple: enter, be put out, leave."""
    report.heading("CPU cost of mesh, pages in memory (bars: at most 2)")
    relation = pa.Table.from_batches(
        [block.rows for block in data.relation.shard(0, columns=["k", "sk", "pay"]).blocks(65_536)]
    )
    for percent in data.sizes.budgets:
        _measure(data, report, percent, relation)


def _measure(data: Data, report: Report, percent: float, relation: pa.Table) -> None:
    rows = data.sizes.rows
    operator = _operator(data, percent)
    window_tuples = operator.window_capacity
    matched = data.stream(1.0, "shuffled").next(window_tuples)
    unmatched = data.stream(1.0, "shuffled", is_matched=False).next(window_tuples)
    duck = duckdb.connect(config={"threads": 1})
    duck.register("relation_arrow", relation)
    duck.execute("create table r as select * from relation_arrow")
    duck.register("window_arrow", pa.Table.from_batches([matched]))
    duck.execute("create table s as select * from window_arrow")

    def adding() -> None:
        for start in range(0, window_tuples, 8_192):
            list(operator.offer(matched.slice(start, 8_192)))

    def cycle() -> None:
        for batch in operator.drain():
            del batch  # let go at once, as the bare take's is

    add_s, emit_s, scan_s, duck_s = [], [], [], []
    for _ in range(_REPETITIONS):
        add_s.append(_timed(adding))
        with_output_s = _timed(cycle)
        list(operator.offer(unmatched))
        without_output_s = _timed(cycle)
        scan_s.append(without_output_s)
        emit_s.append(with_output_s - without_output_s)
        duck_s.append(_timed(lambda: duck.execute("select count(*) from r join s using (k)").fetchall()))
    expire_s = _expire_seconds(data, matched)
    # The cycle over unmatched tuples lets them leave, too; that is a tuple's cost, not a row's.
    per_row = (statistics.median(scan_s) - expire_s) / rows
    duck_row = statistics.median(duck_s) / rows
    report.add(
        "cpu",
        f"per relation row, window {percent:g} %",
        per_row / duck_row,
        "<= 2",
        per_row <= 2 * duck_row,
        mesh_ns=per_row * 1e9,
        duckdb_ns=duck_row * 1e9,
        window=window_tuples,
    )
    parts = {"add": statistics.median(add_s), "expire": expire_s, "emit": statistics.median(emit_s)}
    per_tuple = sum(parts.values()) / window_tuples
    take = _take_seconds(data, matched, operator.block_rows, operator.results.max_rows) / window_tuples
    report.add(
        "cpu",
        f"per stream tuple, window {percent:g} %",
        per_tuple / take,
        "<= 2",
        per_tuple <= 2 * take,
        mesh_ns=per_tuple * 1e9,
        take_ns=take * 1e9,
        **{f"{name}_ns": seconds / window_tuples * 1e9 for name, seconds in parts.items()},
    )


def _operator(data: Data, percent: float) -> MeshJoin:
    spec = join_spec(data.relation, data.stream_schema, budget=data.budget(percent), io=DiskUnderTest("memory").io)
    return MeshJoin(spec)


def _expire_seconds(data: Data, batch: pa.RecordBatch) -> float:
    """Taking a window's tuples out, oldest first."""
    columns = batch.drop_columns(["__code"])
    codes = batch.column("__code").to_numpy()

    def once() -> float:
        window = StreamWindow(columns.schema, batch.num_rows)
        window.insert(codes, columns, 0, 0)

        def leave() -> None:
            while len(window):
                window.forget(window.take_oldest(8_192))

        return _timed(leave)

    return statistics.median([once() for _ in range(_REPETITIONS)])


def _take_seconds(data: Data, batch: pa.RecordBatch, block_rows: int, batch_rows: int) -> float:
    """Taking the output's columns alone: the stream's from anywhere in the window, the relation's from a block."""
    shard = data.shard(DiskUnderTest("memory"))
    columns = batch.drop_columns(["__code"])
    codes = np.sort(batch.column("__code").to_numpy())
    order = np.argsort(batch.column("__code").to_numpy(), kind="stable")
    relation_rows = codes // 2 - 1
    cuts = np.searchsorted(relation_rows, np.arange(0, data.sizes.rows + block_rows, block_rows))

    def once() -> float:
        spent = 0.0
        for number, (low, high) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            if low == high:
                continue
            block = shard.read_block(number * block_rows, block_rows).rows
            for start in range(low, high, batch_rows):
                stop = min(start + batch_rows, high)
                of_stream = pa.array(order[start:stop])
                of_relation = pa.array(relation_rows[start:stop] - number * block_rows)

                def take(rows: pa.RecordBatch = block, s: pa.Array = of_stream, r: pa.Array = of_relation) -> None:
                    columns.take(s)
                    rows.take(r)

                spent += _timed(take)
        return spent

    return statistics.median([once() for _ in range(3)])


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
