"""What the driver makes of the trailers of tasks in place, however often Spark ran them."""

from typing import Any

import pytest

from dovetail.core.errors import InternalError
from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.step import StepRecord
from dovetail.spark.flow.trailers import PartitionTrailers


class Texts:
    """What would have been collected: trailers, and how many rows Spark has counted besides them."""

    def __init__(self, trailers: list[dict[str, Any]], rows: int) -> None:
        self._trailers, self._rows = trailers, rows

    def collect(self) -> tuple[list[dict[str, Any]], int]:
        return self._trailers, self._rows + len(self._trailers)


def trailer(partition: int, attempt: int, rows: int) -> dict[str, Any]:
    counters = {"stream_tuples_in": rows + 1, "output_rows": rows, "relation_version": 4}
    return {"partition": partition, "attempt": attempt, "rows": rows, "counters": counters}


def collected(
    trailers: list[dict[str, Any]], rows: int, before: StepRecord | None = None
) -> tuple[OperatorMetrics, int]:
    found = PartitionTrailers("1-enrich", before, version=4)
    found._texts = Texts(trailers, rows)  # type: ignore[assignment]
    record, put_out = found.collect()
    (report,), (state,) = record.reports, record.states
    assert (report["pending"], report["version"], state.files) == (0, 4, ())
    return OperatorMetrics.from_dict(report["metrics"]), put_out


def test_partitions_add_up() -> None:
    totals, rows = collected([trailer(0, 10, 5), trailer(1, 11, 7)], 12)
    assert (totals.stream_tuples_in, totals.output_rows, rows) == (14, 12, 12)


def test_partition_that_was_computed_again_counts_once() -> None:
    totals, rows = collected([trailer(0, 10, 5), trailer(1, 11, 7), trailer(0, 12, 5)], 17)
    assert (totals.stream_tuples_in, totals.output_rows, rows) == (14, 12, 12)


def test_task_that_computed_several_partitions_counts_with_all_of_them() -> None:
    coalesced = [trailer(0, 10, 5), trailer(0, 10, 7)]
    totals, rows = collected(coalesced, 12)
    assert (totals.output_rows, rows) == (12, 12)
    again = [trailer(0, 13, 5), trailer(0, 13, 7)]
    totals, rows = collected([*coalesced, *again], 24)
    assert (totals.output_rows, rows) == (12, 12)


@pytest.mark.parametrize("computed", [6, 4])
def test_rows_that_no_trailer_tells_of_fail_the_micro_batch(computed: int) -> None:
    with pytest.raises(InternalError, match="some task was not computed to its end"):
        collected([trailer(0, 10, 5)], computed)


def test_counters_go_on_from_what_shards_or_tasks_had_counted() -> None:
    reports = tuple({"metrics": OperatorMetrics(stream_tuples_in=n, output_rows=n).as_dict()} for n in (100, 30))
    totals, rows = collected([trailer(0, 10, 5)], 5, StepRecord((), reports))
    assert (totals.stream_tuples_in, totals.output_rows, rows) == (136, 135, 5)
    assert collected([], 0, StepRecord((), reports)) == (OperatorMetrics(stream_tuples_in=130, output_rows=130), 0)
