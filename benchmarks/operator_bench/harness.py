"""Data, disks, clocks and the measurement of a steady service rate, shared by all sections."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dovetail import Relation
from dovetail.memory import Budget
from dovetail.model import CostFactors, JoinProfile, tune
from dovetail.model.calibrate import measure as measure_factors
from dovetail.model.explain import Plan, Strategy
from dovetail.operators import OPERATORS, JoinSpec, SemiStreamOperator, join_spec
from dovetail.operators.window import StreamWindow
from dovetail.relation.io import SimulatedDisk
from dovetail.relation.shard_reader import ShardReader
from dovetail.workloads import Zipf, make_stream_batch, relation_batches

ROW_BYTES = 120
OFFERED_TUPLES = 8_192
PAPER_BANDWIDTH, PAPER_SEEK_S = 60e6, 0.008
DiskName = Literal["simulated", "direct", "memory"]
KeyOrder = Literal["shuffled", "ranked"]
# When a rate is steady. A scan has filled its window after a cycle; with a cache it must also have counted, switched
# and evicted for some rounds. A queue that tuples leave in the middle is steady when it was gone through twice: when
# all that had come by some time has left, and all that had come by then has left again.
WARM_ROUNDS = {"mesh": 1.05, "hybrid": 2.0, "balanced": 16.0, "auto": 12.0}
TURNS = 6


@dataclass(frozen=True)
class Bar:
    """One line of the result: what was measured, what was asked for, and whether it was met (None: no bar)."""

    section: str
    point: str
    value: float
    bar: str
    is_met: bool | None
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        verdict = {True: "met", False: "NOT met", None: ""}[self.is_met]
        notes = ", ".join(f"{name} {_short(value)}" for name, value in self.details.items())
        return f"  {self.point:<44} {_short(self.value):>9}   {self.bar:<34} {verdict:<8} {notes}".rstrip()


def _short(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else str(value)
    )


class Report:
    """Collects bars and prints them as they come."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []

    def heading(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def add(
        self, section: str, point: str, value: float, bar: str = "", is_met: bool | None = None, **details: Any
    ) -> None:
        self.bars.append(Bar(section, point, float(value), bar, is_met, details))
        print(self.bars[-1].line(), flush=True)


@dataclass(frozen=True)
class Sizes:
    """How much is measured: the default, and what ``--quick`` makes of it."""

    rows: int
    exponents: tuple[float, ...]
    budgets: tuple[float, ...]
    max_seconds: float

    def of_budgets(self, wanted: tuple[float, ...]) -> list[float]:
        """Those of a section's own budgets that are measured at this size."""
        return [percent for percent in wanted if percent in self.budgets]

    def of_exponents(self, wanted: tuple[float, ...]) -> list[float]:
        """Those of a section's own exponents that are measured at this size."""
        return [exponent for exponent in wanted if exponent in self.exponents]


FULL = Sizes(3_500_000, (0.0, 0.25, 0.5, 1.0), (0.5, 1.0, 5.0, 10.0), 1.2)
QUICK = Sizes(400_000, (0.0, 1.0), (1.0, 10.0), 0.12)


class Data:
    """The relation, on disk, and streams that meet it.

    Keys are even, so that odd ones are unmatched although they lie between matched ones.
    """

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.directory = directory
        path = directory / f"r-{sizes.rows}"
        self.relation = Relation.open(path) if path.exists() else _build(path, sizes.rows)
        self.stream_schema = self.stream(0.0, "ranked").next().schema
        self._profiles: dict[str, JoinProfile] = {}
        self._plans: dict[tuple[str, DiskName, float, str], Plan] = {}

    def stream(self, exponent: float, order: KeyOrder, is_matched: bool = True) -> "Stream":
        return Stream(Zipf(self.sizes.rows, exponent, order=order, seed=3), is_matched)

    def shard(self, disk: "DiskUnderTest") -> ShardReader:
        return self.relation.shard(0, columns=["sk", "pay"], io=disk.io)

    def budget(self, percent: float) -> Budget:
        return Budget(int(self.sizes.rows * ROW_BYTES * percent / 100))

    @cached_property
    def factors(self) -> dict[str, CostFactors]:
        """Cost factors of this machine, measured in this run: "direct" and "cached"."""
        return {str(name): factors for name, factors in measure_factors(self.directory).items()}

    def factors_for(self, disk: "DiskUnderTest") -> CostFactors:
        if disk.name == "memory":
            return self.factors["cached"]
        if disk.name == "direct":
            return self.factors["direct"]
        return self.factors["cached"].with_disk(seek_s=PAPER_SEEK_S, bandwidth_bytes_per_s=PAPER_BANDWIDTH)

    def profile(self, zipf: Zipf) -> JoinProfile:
        """What the models need to know, with the bytes per tuple that the window really takes."""
        if repr(zipf) not in self._profiles:
            columns = pa.schema([f for f in self.stream_schema if f.name != "__code"])
            entry_bytes = StreamWindow.bytes_for(columns, 100_000) / 100_000
            self._profiles[repr(zipf)] = JoinProfile.with_overhead(
                relation_rows=self.sizes.rows,
                relation_row_bytes=self.shard(DiskUnderTest("memory")).disk_row_bytes,
                window_overhead_bytes=entry_bytes - 20,
                hit_curve=zipf.hit_curve(),
                storage_curve=zipf.storage_cumulative() if zipf.exponent else None,
            )
        return self._profiles[repr(zipf)]

    def plan(self, strategy: Strategy, disk: "DiskUnderTest", percent: float, zipf: Zipf) -> Plan:
        """What the model finds best and predicts; it knows of no index, so what that takes is not its to divide."""
        key = (strategy, disk.name, percent, repr(zipf))
        if key not in self._plans:
            index_bytes = self.shard(disk).index_bytes if strategy == "hybrid" else 0
            budget = Budget(self.budget(percent).total_bytes - index_bytes)
            self._plans[key] = tune(strategy, profile=self.profile(zipf), factors=self.factors_for(disk), budget=budget)
        return self._plans[key]


def _build(path: Path, rows: int) -> Relation:
    batches = (
        batch.set_column(0, "k", pc.multiply(batch.column("k"), 2))
        for batch in relation_batches(rows, ROW_BYTES, seed=1)
    )
    first = next(batches)
    reader = pa.RecordBatchReader.from_batches(first.schema, _chain(first, batches))
    return Relation.build(reader, path, on="k", shards=1)


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


class Stream:
    """An endless stream in batches."""

    def __init__(self, zipf: Zipf, is_matched: bool = True) -> None:
        self.zipf = zipf
        self._is_matched = is_matched
        self._tuples = 0

    def next(self, rows: int = OFFERED_TUPLES) -> pa.RecordBatch:
        codes = self.zipf.sample(rows) * 2 + (0 if self._is_matched else 1)
        batch = make_stream_batch(codes, first_sequence=self._tuples)
        self._tuples += rows
        return batch.add_column(0, "__code", batch.column("k"))


class DiskUnderTest:
    """A disk and the clock that tells what work on it takes.

    ``simulated``: the papers' disk; CPU time plus the time that the disk would have taken. ``direct``: the real disk,
    past the page cache; wall-clock time without the time that other processes had the CPU. ``memory``: mapped pages
    that are in memory; CPU time.
    """

    def __init__(self, name: DiskName) -> None:
        self.name = name
        self._simulated = SimulatedDisk(PAPER_BANDWIDTH, PAPER_SEEK_S, virtual=True) if name == "simulated" else None
        self.io: Any = {"direct": "direct", "memory": "map"}.get(name, self._simulated)

    def now(self) -> float:
        """Seconds so far; only differences count."""
        if self.name == "direct":
            return time.perf_counter() - _queued_s()
        return time.process_time() + (0.0 if self._simulated is None else self._simulated.elapsed_s)


def _queued_s() -> float:
    """How long this process has been ready to run while others ran; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@dataclass(frozen=True)
class Rate:
    """A measured service rate, and the loop that gave it."""

    tuples_per_s: float
    loop_s: float
    tuples_per_loop: float
    block_rows: int
    window_tuples: int


def make_operator(
    data: Data,
    kind: str,
    disk: DiskUnderTest,
    percent: float,
    stream: Stream,
    block_rows: int | None = None,
    is_paced: bool = True,
) -> SemiStreamOperator:
    """An operator with the block size that its tuner chooses, or that it chooses itself where blocks are free."""
    budget = data.budget(percent)
    if block_rows is None and not (kind == "mesh" and disk.name == "memory"):
        block_rows = tuned_block_rows(data, kind, disk, percent, stream.zipf)
    spec: JoinSpec = join_spec(data.relation, data.stream_schema, budget=budget, block_rows=block_rows, io=disk.io)
    operator = OPERATORS[kind](spec)
    if kind == "mesh" and is_paced:
        set_chunk(operator)
    return operator


def set_chunk(operator: SemiStreamOperator) -> None:
    """Let w tuples enter per step, so that as many leave as enter and the window is full."""
    steps = -(-operator.spec.shard.num_rows // operator.block_rows)
    operator.retune(chunk_rows=max(1, operator.window_capacity // steps))


def tuned_block_rows(data: Data, kind: str, disk: DiskUnderTest, percent: float, zipf: Zipf) -> int | None:
    """The block size that the model finds best; None for the strategy that finds it by itself."""
    strategies: dict[str, Strategy] = {"mesh": "mesh", "hybrid": "hybrid", "balanced": "balanced"}
    if kind not in strategies:
        return None
    return data.plan(strategies[kind], disk, percent, zipf).block_rows


class Measurement:
    """One operator that is fed its stream as fast as it takes it: first until its rate is steady, then measured."""

    def __init__(self, operator: SemiStreamOperator, stream: Stream, disk: DiskUnderTest) -> None:
        self.operator = operator
        self._stream = stream
        self._disk = disk
        self._before = operator.metrics.copy()
        self._spent_s = 0.0
        # Without a cache, small against the window, so that a turn is not much longer than it is meant to be.
        self._batch_rows = OFFERED_TUPLES
        if operator.kind in ("mesh", "hybrid"):
            self._batch_rows = max(128, min(OFFERED_TUPLES, operator.window_capacity // 32))

    def warm_up(self, max_seconds: float) -> None:
        """Feed until the rate is steady; an operator that finds all in memory reads no more, hence the limit."""
        rounds, began = _Rounds(self.operator), time.process_time()
        while rounds.count() < WARM_ROUNDS[self.operator.kind] and time.process_time() - began < max_seconds:
            consume(self.operator.offer(self._stream.next(self._batch_rows)))
        self._before = self.operator.metrics.copy()

    def run(self, seconds: float) -> None:
        """Feed and measure for so many seconds of the CPU's time."""
        until = time.process_time() + seconds
        while time.process_time() < until:
            self._feed()

    def finish_cycle(self, max_seconds: float) -> None:
        """Go on to the end of a cycle where tuples that entered together leave together: they would count or not."""
        if self.operator.kind in ("hybrid", "auto") or self.operator.spec.chunk_rows is not None:
            return
        rounds, until = _Rounds(self.operator, self._before.relation_rows_read), time.process_time() + max_seconds
        whole = math.ceil(rounds.count())
        while rounds.count() < whole and time.process_time() < until:
            self._feed()

    def _feed(self) -> None:
        batch = self._stream.next(self._batch_rows)
        started = self._disk.now()
        consume(self.operator.offer(batch))
        self._spent_s += self._disk.now() - started

    def rate(self) -> Rate:
        """What was measured since the operator was warm."""
        metrics = self.operator.metrics
        left = metrics.tuples_left - self._before.tuples_left
        steps = max(1, metrics.disk_steps - self._before.disk_steps)
        return Rate(
            tuples_per_s=left / self._spent_s,
            loop_s=self._spent_s / steps,
            tuples_per_loop=left / steps,
            block_rows=self.operator.block_rows,
            window_tuples=self.operator.window_capacity,
        )


def measure_by_turns(measurements: list[Measurement], sizes: Sizes, warm_share: float = 4.0) -> list[Rate]:
    """Measure operators in turns, a little at a time, so that what else the machine does meets all of them."""
    for measurement in measurements:
        measurement.warm_up(warm_share * sizes.max_seconds)
    for _ in range(TURNS):
        for measurement in measurements:
            measurement.run(sizes.max_seconds / TURNS)
    for measurement in measurements:
        measurement.finish_cycle(warm_share * sizes.max_seconds)
    return [measurement.rate() for measurement in measurements]


def rates_of(
    data: Data, disk_name: DiskName, percent: float, runs: list[tuple[str, Stream]], warm_share: float = 4.0
) -> list[Rate]:
    """The steady rates of fresh operators, measured by turns."""
    measurements = []
    for kind, stream in runs:
        disk = DiskUnderTest(disk_name)
        measurements.append(Measurement(make_operator(data, kind, disk, percent, stream), stream, disk))
    return measure_by_turns(measurements, data.sizes, warm_share)


class _Rounds:
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


def baseline_rate(data: Data, disk: DiskUnderTest, percent: float, exponent: float, max_seconds: float) -> Rate:
    """Index nested loops: the pool is filled first, then tuples are looked up for a while."""
    stream = data.stream(exponent, "shuffled")
    spec = join_spec(data.relation, data.stream_schema, budget=data.budget(percent), io=disk.io)
    operator = OPERATORS["index_nested_loop"](spec)
    began = time.perf_counter()
    pages = data.budget(percent).total_bytes / (128 * ROW_BYTES)
    while operator.metrics.blocks_read < 1.5 * pages and time.perf_counter() - began < 4 * max_seconds:
        consume(operator.offer(stream.next(256)))
    tuples, spent, began = 0, 0.0, time.perf_counter()
    while tuples < 4_096 and time.perf_counter() - began < max_seconds:
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
