"""A task in place: its rows, then one trailer that tells what it did, whatever became of it."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, DovetailError, RelationNotFound, SchemaError
from dovetail.core.metrics import OperatorMetrics
from dovetail.runtime.in_place import InPlaceJob
from dovetail.runtime.metrics_row import metrics_row, without_metrics
from dovetail.runtime.shard_job import TRAILER_COLUMN, unpack_trailer

SCHEMA = pa.schema([("n", pa.int64())])


class Doubling:
    """Doubles numbers; gives up at one below zero."""

    def __init__(self, error: DovetailError | None = None) -> None:
        self.error = error

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        metrics, last = OperatorMetrics(), None
        for last in batches:
            if self.error is not None and last.column(0)[0].as_py() < 0:
                raise self.error
            doubled = pa.record_batch({"n": [2 * n for n in last.column(0).to_pylist()]})
            metrics.stream_tuples_in += last.num_rows
            metrics.output_rows += doubled.num_rows
            yield without_metrics(doubled)
        if last is not None:
            yield metrics_row(last.slice(0, 1), metrics, version=7)


def ran(batches: list[list[int]], error: DovetailError | None = None) -> tuple[list[int], list[dict[str, Any]], int]:
    """What came out, the trailers, and how many batches were left unread."""
    given = iter([pa.record_batch({"n": numbers}) for numbers in batches])
    rows, trailers = [], []
    for batch in InPlaceJob(Doubling(error), SCHEMA, lambda: (3, 41))(given):
        assert batch.schema.names == ["n", TRAILER_COLUMN]
        for number, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if text is None:
                rows.append(number)
            else:
                assert number is None
                trailers.append(unpack_trailer(text))
    return rows, trailers, len(list(given))


def test_task_ends_with_what_it_counted_and_which_run_it_was() -> None:
    rows, trailers, _ = ran([[1, 2], [3]])
    assert rows == [2, 4, 6]
    (trailer,) = trailers
    assert (trailer["partition"], trailer["attempt"], trailer["rows"]) == (3, 41, 3)
    assert (trailer["counters"]["stream_tuples_in"], trailer["counters"]["relation_version"]) == (3, 7)


def test_task_without_rows_has_nothing_to_tell() -> None:
    assert ran([]) == ([], [], 0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SchemaError("It does not fit.", hint="Cast it."), "It does not fit. Cast it."),
        (
            RelationNotFound("It is gone."),
            "It is gone. Nothing was lost: put the relation back, and start the flow again.",
        ),
        (BudgetError("It is too wide.", minimum_bytes=80), "It is too wide."),
    ],
)
def test_error_is_told_in_a_trailer_and_the_rest_is_read(error: DovetailError, told: str) -> None:
    rows, trailers, unread = ran([[1], [-1], [5]], error)
    assert rows == [2]
    assert unread == 0
    (raised,) = (DovetailError.from_dict(trailer["error"]) for trailer in trailers)
    assert (type(raised), str(raised)) == (type(error), told)
    assert getattr(raised, "minimum_bytes", None) == getattr(error, "minimum_bytes", None)
