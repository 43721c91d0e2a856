"""Data, disks, clocks and the measurement of a steady service rate, shared by all sections."""

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
from dovetail.model.explain import Strategy
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
MEASURED_ROUNDS = {"mesh": 0.5, "hybrid": 1.0, "balanced": 3.0, "auto": 2.0}


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


FULL = Sizes(3_500_000, (0.0, 0.25, 0.5, 1.0), (0.5, 1.0, 5.0, 10.0), 4.0)
QUICK = Sizes(400_000, (0.0, 1.0), (1.0, 10.0), 0.6)


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
        self.rates: dict[tuple[str, DiskName, float, str], Rate] = {}

    def stream(self, exponent: float, order: KeyOrder, is_matched: bool = True) -> "Stream":
        zipf = Zipf(self.sizes.rows, exponent, order=order, seed=3)
        return Stream(zipf, is_matched, f"{exponent:g} {order} {'matched' if is_matched else 'unmatched'}")

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
        columns = pa.schema([f for f in self.stream_schema if f.name != "__code"])
        entry_bytes = StreamWindow.bytes_for(columns, 100_000) / 100_000
        return JoinProfile.with_overhead(
            relation_rows=self.sizes.rows,
            relation_row_bytes=self.shard(DiskUnderTest("memory")).disk_row_bytes,
            window_overhead_bytes=entry_bytes - 20,
            hit_curve=zipf.hit_curve(),
            storage_curve=zipf.storage_cumulative() if zipf.exponent else None,
        )


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

    def __init__(self, zipf: Zipf, is_matched: bool, name: str) -> None:
        self.zipf = zipf
        self.name = name
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
    data: Data, kind: str, disk: DiskUnderTest, percent: float, stream: Stream, block_rows: int | None = None
) -> SemiStreamOperator:
    """An operator with the block size that its tuner chooses."""
    budget = data.budget(percent)
    if block_rows is None:
        block_rows = tuned_block_rows(data, kind, disk, percent, stream.zipf)
    spec: JoinSpec = join_spec(data.relation, data.stream_schema, budget=budget, block_rows=block_rows, io=disk.io)
    operator = OPERATORS[kind](spec)
    if kind == "mesh":
        # MESHJOIN takes in w tuples per step, so that as many leave as enter.
        steps = -(-data.sizes.rows // operator.block_rows)
        operator.retune(chunk_rows=max(1, operator.window_capacity // steps))
    return operator


def tuned_block_rows(data: Data, kind: str, disk: DiskUnderTest, percent: float, zipf: Zipf) -> int | None:
    """The block size that the model finds best; None for the strategy that finds it by itself."""
    strategies: dict[str, Strategy] = {"mesh": "mesh", "hybrid": "hybrid", "balanced": "balanced"}
    if kind not in strategies:
        return None
    profile, factors = data.profile(zipf), data.factors_for(disk)
    return tune(strategies[kind], profile=profile, factors=factors, budget=data.budget(percent)).block_rows


def steady_rate(
    operator: SemiStreamOperator, stream: Stream, disk: DiskUnderTest, max_seconds: float, warm_share: float = 2.0
) -> Rate:
    """Offer the stream as fast as it is taken, until the rate is steady, and measure it then."""
    warm, rounds = _Rounds(operator), WARM_ROUNDS[operator.kind]
    # A limit on the CPU's time, too: an operator that has found everything in memory reads no more rows.
    began = time.process_time()
    while warm.count() < rounds and time.process_time() - began < warm_share * max_seconds:
        consume(operator.offer(stream.next()))
    before, spent, began = operator.metrics.copy(), 0.0, time.process_time()
    measured, rounds, is_over = _Rounds(operator), MEASURED_ROUNDS[operator.kind], False
    while not is_over and measured.count() < rounds:
        batch = stream.next()
        started = disk.now()
        consume(operator.offer(batch))
        spent += disk.now() - started
        is_over = time.process_time() - began > max_seconds
    left = operator.metrics.tuples_left - before.tuples_left
    steps = max(1, operator.metrics.disk_steps - before.disk_steps)
    return Rate(
        tuples_per_s=left / spent,
        loop_s=spent / steps,
        tuples_per_loop=left / steps,
        block_rows=operator.block_rows,
        window_tuples=operator.window_capacity,
    )


class _Rounds:
    """Counts cycles over the relation or, where there are none, how often the queue was gone through."""

    def __init__(self, operator: SemiStreamOperator) -> None:
        self._operator = operator
        self._rows_before = operator.metrics.relation_rows_read
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
    while operator.metrics.blocks_read < 1.5 * pages and time.perf_counter() - began < 2 * max_seconds:
        consume(operator.offer(stream.next(256)))
    tuples, spent, began = 0, 0.0, time.perf_counter()
    while tuples < 4_096 and time.perf_counter() - began < max_seconds:
        batch = stream.next(256)
        started = disk.now()
        consume(operator.offer(batch))
        spent += disk.now() - started
        tuples += batch.num_rows
    return Rate(tuples / spent, spent / tuples, 1.0, operator.block_rows, 0)


def rate_of(data: Data, kind: str, disk_name: DiskName, percent: float, stream: Stream) -> Rate:
    """The steady rate of a fresh operator; sections that ask for the same share one measurement."""
    key = (kind, disk_name, percent, stream.name)
    if key not in data.rates:
        disk = DiskUnderTest(disk_name)
        operator = make_operator(data, kind, disk, percent, stream)
        data.rates[key] = steady_rate(operator, stream, disk, data.sizes.max_seconds)
    return data.rates[key]


def consume(output: Iterator[pa.RecordBatch]) -> None:
    """Run an operator's work, as a consumer that keeps nothing."""
    for _ in output:
        pass
