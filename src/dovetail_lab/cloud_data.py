"""Cloud reports as a relation and as a stream, for the experiments of two papers."""

import numpy as np
import pyarrow as pa

from dovetail_lab.experiment import Context
from dovetail_lab.semi_stream import Bench
from dovetail_lab.subjects import Subject, TableStream, open_or_build
from dovetail_lab.workloads import Zipf
from dovetail_lab.workloads.clouds import LONGITUDES, cloud_reports

__all__ = ["cloud_stream", "clouds"]

_STREAM_ROWS = (50_000, 400_000)


def clouds(
    context: Context, rows: int, *, exponent: float, row_bytes: int, stream_exponent: float | None = None
) -> Subject:
    """Reports of April and August as the relation, keyed by longitude."""
    met = exponent if stream_exponent is None else stream_exponent

    def make() -> Subject:
        path = context.directory / f"clouds-{rows}-{row_bytes}-{exponent:g}-{context.seed}"
        relation = open_or_build(
            path, lambda: cloud_reports(rows, row_bytes, exponent=exponent, seed=context.seed), on="longitude"
        )
        ranks = np.arange(1, LONGITUDES + 1)
        both = Zipf(LONGITUDES, exponent).probabilities(ranks) * Zipf(LONGITUDES, met).probabilities(ranks)
        return Subject(
            relation,
            [name for name in relation.schema.names if name != "longitude"],
            TableStream(cloud_stream(context, met, row_bytes), "longitude"),
            Bench.of(context).factors,
            seed=context.seed,
            row_bytes=row_bytes,
            matches_per_tuple=float(both.sum() * rows),
        )

    return Bench.of(context).subject(f"clouds {rows} {row_bytes} {exponent} {met}", make)


def cloud_stream(context: Context, exponent: float, row_bytes: int) -> pa.Table:
    """Reports of December as the stream, with the text of a report as numbers.

    Columns of varying width have their own pages, which a small window fills badly. That is an artefact of this
    implementation, not part of the papers' comparison.
    """
    key = f"cloud stream {exponent} {row_bytes}"
    if key not in context.shared:
        rows = context.pick(*_STREAM_ROWS)
        batches = cloud_reports(rows, row_bytes, months=(12,), exponent=exponent, seed=context.seed + 1)
        context.shared[key] = _of_fixed_width(pa.Table.from_batches(list(batches)))
    table: pa.Table = context.shared[key]
    return table


def _of_fixed_width(table: pa.Table) -> pa.Table:
    if "report" not in table.schema.names:
        return table
    text = table.column("report").combine_chunks()
    width = len(text[0].as_py())
    characters = np.frombuffer("".join(text.to_pylist()).encode("ascii"), dtype=np.int64).reshape(-1, width // 8)
    fixed = table.drop_columns(["report"])
    for number in range(characters.shape[1]):
        fixed = fixed.append_column(f"report_{number}", pa.array(np.ascontiguousarray(characters[:, number])))
    return fixed
