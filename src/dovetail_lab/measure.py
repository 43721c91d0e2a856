"""The measurement of a semi-stream join's steady service rate: warm up, then feed it as fast as it takes tuples."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.lab.subjects import OFFERED_TUPLES, DiskName, DiskUnderTest, Stream, Subject
from dovetail.memory import Budget
from dovetail.model.explain import Strategy
from dovetail.operators import OPERATORS, JoinSpec, SemiStreamOperator, join_spec

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

# When a rate is steady. A scan has filled its window after a cycle; with a cache it must also have counted, switched
# and evicted for some rounds. A queue that tuples leave in the middle is steady when it was gone through twice: when
# all that had come by some time has left, and all that had come by then has left again.
WARM_ROUNDS = {"mesh": 1.05, "hybrid": 2.0, "balanced": 16.0, "auto": 12.0}
TURNS = 6
QUEUE_PASSES = 4
_PAGE_ROWS = 128
_BASELINE_TUPLES = 4_096


@dataclass(frozen=True)
class Rate:
    """A measured service rate, and the loop that gave it.

    Attributes
    ----------
    tuples_per_s
        Stream tuples that left, per second.
    loop_s, tuples_per_loop
        Time and tuples of one disk step, on average.
    block_rows, window_tuples
        b, and how many tuples may wait.
    cache_share
        The part of the tuples that the cache answered.
    """

    tuples_per_s: float
    loop_s: float
    tuples_per_loop: float
    block_rows: int
    window_tuples: int
    cache_share: float = 0.0


def make_operator(
    subject: Subject,
    kind: str,
    disk: DiskUnderTest,
    budget: Budget,
    stream: Stream,
    block_rows: int | None = None,
    is_paced: bool = True,
) -> SemiStreamOperator:
    """An operator with the block size that its tuner chooses, or that it chooses itself where blocks are free."""
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
    """Let w tuples enter per step, so that as many leave as enter and the window is full."""
    steps = -(-operator.spec.shard.num_rows // operator.block_rows)
    operator.retune(chunk_rows=max(1, operator.window_capacity // steps))


def tuned_block_rows(subject: Subject, kind: str, disk: DiskUnderTest, budget: Budget, stream: Stream) -> int | None:
    """The block size that the model finds best; None for the strategy that finds it by itself."""
    strategies: dict[str, Strategy] = {"mesh": "mesh", "hybrid": "hybrid", "balanced": "balanced"}
    if kind not in strategies:
        return None
    return subject.plan(strategies[kind], disk, budget, stream).block_rows


class Measurement:
    """One operator that is fed its stream as fast as it takes it: first until its rate is steady, then measured."""

    def __init__(self, operator: SemiStreamOperator, stream: Stream, disk: DiskUnderTest) -> None:
        self.operator = operator
        self._stream = stream
        self._disk = disk
        self._restart()
        # Without a cache, small against the window, so that a turn is not much longer than it is meant to be.
        self._batch_rows = OFFERED_TUPLES
        if operator.kind in ("mesh", "hybrid"):
            self._batch_rows = max(128, min(OFFERED_TUPLES, operator.window_capacity // 32))

    def warm_up(self, max_seconds: float) -> None:
        """Feed until the rate is steady; an operator that finds all in memory reads no more, hence the limit."""
        # The first time on a machine, code is compiled until the first tuples have left: that is not what is limited.
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
        """Feed and measure for so many seconds of the CPU's time."""
        until = time.process_time() + seconds
        while time.process_time() < until:
            self._feed()

    def finish_cycle(self, max_seconds: float) -> None:
        """Go on to the end of a cycle where tuples that entered together leave together: they would count or not.

        A queue that is served from its old end is gone through some times: hot blocks bring many tuples out at once,
        and come seldom.
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
        # A cache that answers most tuples may not have read at all yet.
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
        """What was measured since the operator was warm, or since this was last asked."""
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
    """Measure operators in turns, a little at a time, so that what else the machine does meets all of them.

    Parameters
    ----------
    max_seconds
        CPU seconds that each repeat of each measurement takes, whole cycles aside.
    repeats
        How many rates of each operator are taken, one after the other, without warming it up again.
    warm_share
        How many times `max_seconds` warming up may take.

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
    """The steady rates of fresh operators, measured by turns."""
    measurements = []
    for kind, stream in runs:
        disk = DiskUnderTest(disk_name)
        measurements.append(Measurement(make_operator(subject, kind, disk, budget, stream), stream, disk))
    return measure_by_turns(measurements, max_seconds, warm_share)


class Rounds:
    """Counts cycles over the relation or, where there are none, how often the queue was gone through."""

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
    # Waiting for the real disk counts, what the simulated one would have taken has not passed.
    clock = time.perf_counter if disk.name == "direct" else time.process_time
    began = clock()
    if stream.zipf is not None and disk.name == "simulated":
        # A large pool would take long to fill by chance. Where keys are ranked, the hottest pages come last, and stay.
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
    """Run an operator's work, as a consumer that keeps nothing."""
    for _ in output:
        pass
