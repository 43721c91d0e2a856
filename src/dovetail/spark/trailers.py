"""Trailers: the last row of every shard's output, which tells the driver what the task left behind.

The output of a step has one more column, a text that is NULL in every row but the last: there it names the shard's new
state files with their digests, and carries the report. ``DataFrame.observe`` collects these texts in the very job that
stages the output, so that state and output come from the same run of the same tasks.
"""

import time
import uuid

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail import errors
from dovetail.errors import InternalError, StateError
from dovetail.spark.shard_job import TRAILER_COLUMN, unpack_trailer
from dovetail.spark.steps import StepRecord
from dovetail.state import ShardState

__all__ = ["Trailers", "with_trailer"]

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.002


class Trailers:
    """Collects the trailers of one step in one micro-batch.

    Parameters
    ----------
    operator, shards
        The step, and how many trailers it must give.
    is_last
        Whether its output reaches the sink without another shuffle.
    """

    def __init__(self, operator: str, shards: int, is_last: bool) -> None:
        self._operator, self._shards, self._is_last = operator, shards, is_last
        self._observation = Observation(f"dovetail {operator} {uuid.uuid4().hex}")

    def watch(self, mapped: DataFrame) -> DataFrame:
        """What the tasks put out, without the trailers, which are collected as it is computed; their column stays."""
        observed = mapped.observe(self._observation, F.collect_list(TRAILER_COLUMN).alias("trailers"))
        return observed.where(f"{TRAILER_COLUMN} IS NULL")

    def collect(self) -> tuple[StepRecord, int]:
        """What the shards left behind, and how many rows they put out; after the job has run.

        Raises
        ------
        InternalError
            If not every shard has told, or one twice.
        DovetailError
            What a task had to say instead of a result.
        """
        found = [unpack_trailer(text) for text in self._texts()]
        failures = [trailer["error"] for trailer in found if "error" in trailer]
        if failures:
            raise getattr(errors, failures[0]["class"])(failures[0]["message"])
        by_shard = {trailer["shard"]: trailer for trailer in found}
        # A task upstream of a shuffle may have run twice; being pure, both runs gave the same rows.
        has_surplus = len(found) != len(by_shard) and self._is_last
        if has_surplus or sorted(by_shard) != list(range(self._shards)):
            told = sorted(trailer["shard"] for trailer in found)
            raise InternalError(
                f"{self._operator}: {self._shards} shards were to end with a trailer each, but those of {told} came. "
                "The micro-batch was not committed."
            )
        ordered = [by_shard[shard] for shard in range(self._shards)]
        record = StepRecord(
            tuple(ShardState.from_dict(trailer["state"]) for trailer in ordered),
            tuple(trailer["report"] for trailer in ordered),
        )
        return record, sum(trailer["rows"] for trailer in ordered)

    def _texts(self) -> list[str]:
        future = self._observation._jo.future()
        give_up_at = time.monotonic() + _WAIT_SECONDS
        # Observation.get would wait for ever if the job never ran.
        while not future.isCompleted():
            if time.monotonic() > give_up_at:
                raise StateError(
                    f"{self._operator}: its output was staged, but its trailers did not arrive within "
                    f"{_WAIT_SECONDS:.0f} s. The micro-batch was not committed.",
                    hint="Start the flow again with the same checkpoint; a sink's stage must compute all rows.",
                )
            time.sleep(_POLL_SECONDS)
        # One text at a time, for the reason that `pack_trailer` gives: not Observation.get, which gives all at once. By
        # their places, since an iterator of the JVM's ends with an exception, which is dear.
        texts = self._observation._jo.getRow().getList(0)
        return [str(texts.get(place)) for place in range(texts.size())]


def with_trailer(mapped_schema: T.StructType) -> T.StructType:
    """The schema of what `ShardJob` puts out: every column can be NULL, as it is in the trailer."""
    fields = [T.StructField(field.name, field.dataType, True) for field in mapped_schema]
    return T.StructType([*fields, T.StructField(TRAILER_COLUMN, T.StringType(), True)])
