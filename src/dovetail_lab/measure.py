"""Measurement of a semi-stream join's steady service rate: warm up, then feed it as fast as it accepts tuples."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.memory import Budget
from dovetail.costs.explain import Strategy
from dovetail.joins import OPERATORS, JoinSpec, SemiStreamOperator, join_spec
from dovetail_lab.subjects import OFFERED_TUPLES, DiskName, DiskUnderTest, Stream, Subject

__all__ = [
    "Measurement",
    "Rate",
    "Rounds",
    "baseline_rate",
    "consume",
    "make_operator",
    "measure_by_turns",
    "measure_repeatedly",
    "rates_of",
    "set_chunk",
    "tuned_block_rows",
]

# When a rate is steady. A scan has filled its window after one cycle; with a cache it must also have counted, switched
# and evicted for some rounds. A queue that tuples leave from the middle is steady after two passes: all tuples present
# at some time have left, and then all tuples present at that time have left too.
WARM_ROUNDS = {"mesh": 1.05, "hybrid": 2.0, "balanced": 16.0, "auto": 12.0}
TURNS = 6
QUEUE_PASSES = 4
_PAGE_ROWS = 128
_BASELINE_TUPLES = 4_096


@dataclass(frozen=True)
class Rate:
    """A measured service rate, and the loop behind it."""

    tuples_per_s: float  # stream tuples that left
    loop_s: float  # mean per disk step
    tuples_per_loop: float  # mean per disk step
    block_rows: int
    window_tuples: int  # maximum number of waiting tuples
    cache_share: float = 0.0  # fraction of the tuples answered by the cache


def make_operator(
    subject: Subject,
    kind: str,
    disk: DiskUnderTest,
    budget: Budget,
    stream: Stream,
    block_rows: int | None = None,
    is_paced: bool = True,
) -> SemiStreamOperator:
    """An operator with the block size chosen by its tuner, or by itself if block reads are free."""
    if block_rows is None and not (kind == "mesh" and disk.name == "memory"):
        block_rows = tuned_block_rows(subject, kind, disk, budget, stream)
    spec: JoinSpec = join_spec(
        subject.relation,
        subject.stream_schema,
        budget=budget,
        block_rows=block_rows,
        select=subject.columns,
        io=disk.io,
    )
    operator = OPERATORS[kind](spec)
    if kind == "mesh" and is_paced:
        set_chunk(operator)
    return operator


def set_chunk(operator: SemiStreamOperator) -> None:
    """Let w tuples enter per step, so that as many leave as enter and the window stays full."""
    steps = -(-operator.spec.shard.num_rows // operator.block_rows)
    operator.retune(chunk_rows=max(1, operator.window_capacity // steps))


def tuned_block_rows(subject: Subject, kind: str, disk: DiskUnderTest, budget: Budget, stream: Stream) -> int | None:
    """The best block size by the model; None for the strategy that chooses it by itself."""
    strategies: dict[str, Strategy] = {"mesh": "mesh", "hybrid": "hybrid", "balanced": "balanced"}
    if kind not in strategies:
        return None
    return subject.plan(strategies[kind], disk, budget, stream).block_rows


class Measurement:
    """One operator, fed as fast as it accepts tuples: first until its rate is steady, then measured."""

    def __init__(self, operator: SemiStreamOperator, stream: Stream, disk: DiskUnderTest) -> None:
        self.operator = operator
        self._stream = stream
        self._disk = disk
        self._restart()
        # Without a cache, small relative to the window, so that a turn is not much longer than intended.
        self._batch_rows = OFFERED_TUPLES
        if operator.kind in ("mesh", "hybrid"):
            self._batch_rows = max(128, min(OFFERED_TUPLES, operator.window_capacity // 32))

    def warm_up(self, max_seconds: float) -> None:
        """Feed until the rate is steady. The limit is for operators that find everything in memory and read nothing."""
        # On the first run code is compiled until the first tuples have left; that time is not limited.
        while self.operator.metrics.tuples_left == 0:
            consume(self.operator.offer(self._stream.next(self._batch_rows)))
        rounds, began = Rounds(self.operator, rows_before=0), time.process_time()
        while rounds.count() < WARM_ROUNDS[self.operator.kind] and time.process_time() - began < max_seconds:
            consume(self.operator.offer(self._stream.next(self._batch_rows)))
        self._restart()

    def _restart(self) -> None:
        self._before = self.operator.metrics.copy()
        self._spent_s = 0.0
        self._passes = Rounds(self.operator)

    def run(self, seconds: float) -> None:
        """Feed and measure for `seconds` of CPU time."""
        until = time.process_time() + seconds
        while time.process_time() < until:
            self._feed()

    def finish_cycle(self, max_seconds: float) -> None:
        """Continue to the end of a cycle if tuples that entered together leave together: all or none would be counted.

        A queue served from its old end needs several passes: hot blocks release many tuples at once, but rarely.
        """
        while self.operator.metrics.tuples_left == self._before.tuples_left:
            self._feed()
        until = time.process_time() + max_seconds
        if self.operator.kind == "hybrid":
            while self._passes.count() < QUEUE_PASSES and time.process_time() < until:
                self._feed()
        if self.operator.kind in ("hybrid", "auto") or self.operator.spec.chunk_rows is not None:
            return
        rounds = Rounds(self.operator, self._before.relation_rows_read)
        # With a cache that answers most tuples, there may have been no read yet.
        whole = max(1, math.ceil(rounds.count()))
        while rounds.count() < whole and time.process_time() < until:
            self._feed()

    def _feed(self) -> None:
        batch = self._stream.next(self._batch_rows)
        started = self._disk.now()
        consume(self.operator.offer(batch))
        self._spent_s += self._disk.now() - started
        if self.operator.kind == "hybrid":
            self._passes.count()

    def take_rate(self) -> Rate:
        """Return the rate since the warm-up, or since the last call."""
        done = self.operator.metrics - self._before
        steps = max(1, done.disk_steps)
        rate = Rate(
            tuples_per_s=done.tuples_left / self._spent_s,
            loop_s=self._spent_s / steps,
            tuples_per_loop=done.tuples_left / steps,
            block_rows=self.operator.block_rows,
            window_tuples=self.operator.window_capacity,
            cache_share=(done.cache_hits + done.negative_hits) / max(1, done.stream_tuples_in),
        )
        self._restart()
        return rate


def measure_repeatedly(
    measurements: Sequence[Measurement], max_seconds: float, repeats: int, warm_share: float = 4.0
) -> list[list[Rate]]:
    """Measure operators in turns, a little at a time, so that other load on the machine affects all of them.

    Parameters
    ----------
    max_seconds
        CPU seconds per repeat and measurement, apart from completing cycles.
    repeats
        How many rates are measured per operator, without another warm-up.
    warm_share
        Limit of the warm-up, as a multiple of `max_seconds`.

    Returns
    -------
    list
        Per measurement its rates, one per repeat.
    """
    for measurement in measurements:
        measurement.warm_up(warm_share * max_seconds)
    taken: list[list[Rate]] = [[] for _ in measurements]
    for _ in range(repeats):
        for _ in range(TURNS):
            for measurement in measurements:
                measurement.run(max_seconds / TURNS)
        for measurement, rates in zip(measurements, taken, strict=True):
            measurement.finish_cycle(warm_share * max_seconds)
            rates.append(measurement.take_rate())
    return taken


def measure_by_turns(measurements: Sequence[Measurement], max_seconds: float, warm_share: float = 4.0) -> list[Rate]:
    """The rate of each operator, measured in turns."""
    return [rates[0] for rates in measure_repeatedly(measurements, max_seconds, 1, warm_share)]


def rates_of(
    subject: Subject,
    disk_name: DiskName,
    budget: Budget,
    runs: Sequence[tuple[str, Stream]],
    max_seconds: float,
    warm_share: float = 4.0,
) -> list[Rate]:
    """The steady rates of new operators, measured in turns."""
    measurements = []
    for kind, stream in runs:
        disk = DiskUnderTest(disk_name)
        measurements.append(Measurement(make_operator(subject, kind, disk, budget, stream), stream, disk))
    return measure_by_turns(measurements, max_seconds, warm_share)


class Rounds:
    """Counts cycles over the relation or, if there are none, passes through the queue."""

    def __init__(self, operator: SemiStreamOperator, rows_before: int | None = None) -> None:
        self._operator = operator
        self._rows_before = operator.metrics.relation_rows_read if rows_before is None else rows_before
        self._passed = 0
        self._mark = operator.metrics.stream_tuples_in

    def count(self) -> float:
        operator = self._operator
        if operator.kind != "hybrid":
            return (operator.metrics.relation_rows_read - self._rows_before) / operator.spec.shard.num_rows
        oldest = operator.oldest
        if oldest is not None and oldest >= self._mark:
            self._passed, self._mark = self._passed + 1, operator.metrics.stream_tuples_in
        return self._passed


def baseline_rate(subject: Subject, disk: DiskUnderTest, budget: Budget, stream: Stream, max_seconds: float) -> Rate:
    """Index nested loops: the pool is filled first, then tuples are looked up for a while."""
    spec = join_spec(subject.relation, subject.stream_schema, budget=budget, select=subject.columns, io=disk.io)
    operator = OPERATORS["index_nested_loop"](spec)
    # Waiting for the real disk counts; the time of the simulated disk did not actually pass.
    clock = time.perf_counter if disk.name == "direct" else time.process_time
    began = clock()
    if stream.zipf is not None and disk.name == "simulated":
        # A large pool would take long to fill by chance. If keys are ranked, the hottest pages come last, and stay.
        keys = np.arange(stream.zipf.n, 0, -_PAGE_ROWS, dtype=np.int64)
        for start in range(0, keys.size, 256):
            consume(operator.offer(stream.of_keys(keys[start : start + 256])))
    pages = budget.total_bytes / (_PAGE_ROWS * subject.row_bytes)
    while operator.metrics.blocks_read < 1.5 * pages and clock() - began < 4 * max_seconds:
        consume(operator.offer(stream.next(256)))
    tuples, spent, began = 0, 0.0, clock()
    while tuples < _BASELINE_TUPLES and clock() - began < max_seconds:
        batch = stream.next(256)
        started = disk.now()
        consume(operator.offer(batch))
        spent += disk.now() - started
        tuples += batch.num_rows
    return Rate(tuples / spent, spent / tuples, 1.0, operator.block_rows, 0)


def consume(output: Iterator[pa.RecordBatch]) -> None:
    """Run an operator's work and discard the output."""
    for _ in output:
        pass
