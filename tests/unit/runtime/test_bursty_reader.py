"""The reader of the bursty source without Spark: options that are refused by name, offsets that can be replayed."""

import pickle
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from dovetail.core.errors import PlanError
from dovetail.runtime.generator.bursty import BURSTY_SCHEMA
from dovetail.spark.sources.bursty import BurstyDataSource, _Options
from dovetail_lab.workloads import BurstyStream


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key": "5"}, "no option 'key'"),
        ({"keys": "many"}, "keys='many'"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"stepMillis": "0"}, "stepsPerBatch"),
        ({"stepMillis": "-1"}, "stepMillis"),
        ({"partitions": "0"}, "partitions"),
        ({"steps": "0"}, "steps=0"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        _Options.parse(options)


def test_names_are_read_without_case() -> None:
    options = _Options.parse({"stepsperbatch": "5", "STEPMILLIS": "0", "Seed": "3"})
    assert (options.stepsPerBatch, options.stepMillis, options.seed) == (5, 0.0, 3)


def read_all(reader: object, start: dict[str, int], end: dict[str, int]) -> pa.Table:
    parts = reader.partitions(start, end)  # type: ignore[attr-defined]
    # As on its way to a task.
    carried = [pickle.loads(pickle.dumps(part)) for part in parts]  # noqa: S301 -- what Spark does with it
    return pa.Table.from_batches([batch for part in carried for batch in reader.read(part)], schema=BURSTY_SCHEMA)  # type: ignore[attr-defined]


def test_reader_that_starts_anew_makes_a_micro_batch_again_as_it_was() -> None:
    options = {"keys": "50", "tuplesPerStep": "2.5", "seed": "4", "partitions": "3", "steps": "700"}
    options |= {"stepMillis": "0", "stepsPerBatch": "300"}
    stream = BurstyStream(50, tuples_per_step=2.5, seed=4)
    whole = pa.Table.from_batches([stream.batch(stream.arrivals.start(), 700)[0]])
    first = BurstyDataSource(options).streamReader(None)
    offsets = [first.initialOffset()]
    while (latest := first.latestOffset(offsets[-1], ReadAllAvailable())) != offsets[-1]:
        offsets.append(latest)
    assert [offset["step"] for offset in offsets] == [0, 300, 600, 700]
    made = [read_all(first, start, end) for start, end in pairwise(offsets)]
    assert pa.concat_tables(made).combine_chunks().equals(whole.combine_chunks())
    again = read_all(BurstyDataSource(options).streamReader(None), offsets[1], offsets[2])
    assert again.combine_chunks().equals(made[1].combine_chunks())


def test_clock_begins_at_the_offset_that_a_restart_begins_with() -> None:
    reader = BurstyDataSource({"stepMillis": "3600000"}).streamReader(None)
    assert reader.latestOffset({"step": 41}, ReadAllAvailable()) == {"step": 41}
    fast = BurstyDataSource({"stepMillis": "0.000001", "stepsPerBatch": "10"}).streamReader(None)
    fast.latestOffset({"step": 41}, ReadAllAvailable())
    assert fast.latestOffset({"step": 41}, ReadAllAvailable()) == {"step": 51}
