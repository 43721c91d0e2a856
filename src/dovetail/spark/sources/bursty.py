"""``spark.readStream.format("dovetail.bursty")``: the HYBRIDJOIN paper's bursty stream as a streaming source.

An offset is a step of the stream. Step and options determine the rows, so a micro-batch is the same after a restart.
Steps pass with the clock (``stepMillis``), or as fast as they are requested.

===================  =========  ====================================================================================
option               default    meaning
===================  =========  ====================================================================================
``keys``             1000000    size of the keys' domain
``exponent``         1.0        of their Zipf distribution
``order``            shuffled   or ranked: key 1 is the most frequent
``tuplesPerStep``    1023       mean number of rows in a step
``objects``          10         virtual objects: bursts on scales up to 2^objects steps
``stepMillis``       1          duration of a step, by the clock and in the rows' times; 0: no waiting
``stepsPerBatch``    none       maximum steps per micro-batch; required if ``stepMillis`` is 0
``steps``            endless    length of the stream; required for ``available-now``
``partitions``       2          tasks per micro-batch
``seed``             0          equal options give equal streams
===================  =========  ====================================================================================

Needs Spark 4.2, which passes the start offset to a source before it asks for the latest one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from dovetail.core.errors import PlanError
from dovetail.runtime.generator.bursty import BurstyState, BurstyStream
from dovetail.runtime.generator.zipf import KeyOrder

__all__ = ["BurstyDataSource", "register_bursty"]

_SCHEMA = "k bigint, v bigint, ts timestamp"
# The maximum number of passed steps in one micro-batch; the others wait for the next one.
_MOST_STEPS = 1_000_000


def register_bursty(spark: SparkSession) -> None:
    """Register ``dovetail.bursty`` with a session; repeated calls are harmless."""
    spark.dataSource.register(BurstyDataSource)


@dataclass(frozen=True)
class _Options:
    keys: int = 1_000_000
    exponent: float = 1.0
    order: KeyOrder = "shuffled"
    tuplesPerStep: float | None = None  # noqa: N815 -- options are named as Spark names them
    objects: int = 10
    stepMillis: float = 1.0  # noqa: N815
    stepsPerBatch: int | None = None  # noqa: N815
    steps: int | None = None
    partitions: int = 2
    seed: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "_Options":
        """Parse and check options; Spark compares their names without case."""
        kinds: dict[str, Any] = dict.fromkeys(("keys", "objects", "stepsPerBatch", "steps", "partitions", "seed"), int)
        kinds |= {"exponent": float, "order": str, "tuplesPerStep": float, "stepMillis": float}
        known = {name.lower(): name for name in kinds}
        values: dict[str, Any] = {}
        for name, text in given.items():
            right = known.get(name.lower())
            if right is None:
                raise PlanError(
                    f"dovetail.bursty has no option {name!r}.", hint=f"It has {', '.join(sorted(known.values()))}."
                )
            try:
                values[right] = kinds[right](text)
            except ValueError as error:
                raise PlanError(f"Option {right}={text!r} of dovetail.bursty is not a number.") from error
        options = cls(**values)
        options.check()
        return options

    def check(self) -> None:
        if self.order not in get_args(KeyOrder):
            raise PlanError(f"Option order={self.order!r} of dovetail.bursty is neither ranked nor shuffled.")
        if self.stepMillis < 0 or self.partitions < 1:
            raise PlanError("dovetail.bursty needs stepMillis of 0 or more, and at least one of partitions.")
        for name, value in (("steps", self.steps), ("stepsPerBatch", self.stepsPerBatch)):
            if value is not None and value < 1:
                raise PlanError(f"Option {name}={value} of dovetail.bursty must be 1 or more.")
        if self.stepMillis == 0 and self.stepsPerBatch is None:
            raise PlanError("stepMillis=0 makes steps as fast as they are asked for.", hint="Give stepsPerBatch, too.")

    def stream(self) -> BurstyStream:
        """The stream that the options describe."""
        return BurstyStream(
            self.keys,
            exponent=self.exponent,
            order=self.order,
            tuples_per_step=self.tuplesPerStep,
            objects=self.objects,
            step_us=max(1, round(self.stepMillis * 1000)) if self.stepMillis else 1000,
            seed=self.seed,
        )


class BurstyDataSource(DataSource):  # type: ignore[misc]
    """The source as Spark sees it."""

    @classmethod
    def name(cls) -> str:
        return "dovetail.bursty"

    def schema(self) -> str:
        return _SCHEMA

    def streamReader(self, schema: Any) -> "_BurstyReader":  # noqa: N802 -- Spark's name
        return _BurstyReader(_Options.parse(self.options))


@dataclass
class _Slice(InputPartition):  # type: ignore[misc]
    """Steps of one task, with the state before them, so that no task has to compute it."""

    state: BurstyState
    steps: int


class _BurstyReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: _Options) -> None:
        self._options = options
        self._known: BurstyState | None = None
        # The clock's zero: set when the latest offset is first requested.
        self._begun: tuple[float, int] | None = None
        self._is_available_now = False

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        if self._options.steps is None:
            raise PlanError("An endless stream has no end to read to.", hint="Give steps, or another trigger.")
        self._is_available_now = True

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        return {"step": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 -- Spark's name
        step, options = start["step"], self._options
        most = step + (options.stepsPerBatch or _MOST_STEPS)
        if options.steps is not None:
            most = min(most, options.steps)
        if options.stepMillis == 0 or self._is_available_now:
            return {"step": max(step, most)}
        if self._begun is None:
            self._begun = time.monotonic(), step
        passed = self._begun[1] + int((time.monotonic() - self._begun[0]) * 1000 / options.stepMillis)
        return {"step": max(step, min(passed, most))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[_Slice]:
        arrivals = self._options.stream().arrivals
        state = arrivals.seek(start["step"], self._known)
        self._known = state
        steps = end["step"] - start["step"]
        slices = []
        for number in range(self._options.partitions):
            here = steps * (number + 1) // self._options.partitions - steps * number // self._options.partitions
            if here:
                slices.append(_Slice(state, here))
                state = arrivals.seek(state.step + here, state)
        return slices

    def read(self, partition: _Slice) -> Iterator[pa.RecordBatch]:
        stream, state = self._options.stream(), partition.state
        end = state.step + partition.steps
        # About as many rows per batch as in Spark's own Arrow batches.
        at_a_time = max(1, int(10_000 / stream.arrivals.tuples_per_step))
        while state.step < end:
            batch, state = stream.batch(state, min(at_a_time, end - state.step))
            yield batch
