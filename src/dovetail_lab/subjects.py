"""The setup of semi-stream measurements: a relation on disk, streams, a disk and its clock."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dovetail.core.memory import Budget
from dovetail.costs import CostFactors, JoinProfile, tune
from dovetail.costs.explain import Plan, Strategy
from dovetail.joins.calibration.calibrate import calibrate
from dovetail.joins.calibration.calibrate import measure as measure_factors
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.relation import Relation
from dovetail.relation.io import SimulatedDisk
from dovetail.relation.shard_reader import ShardReader
from dovetail_lab.workloads import Zipf, make_stream_batch, relation_batches

__all__ = [
    "OFFERED_TUPLES",
    "PAPER_BANDWIDTH",
    "PAPER_SEEK_S",
    "ROW_BYTES",
    "DiskName",
    "DiskUnderTest",
    "KeyOrder",
    "Keys",
    "Stream",
    "Subject",
    "TableStream",
    "kept_factors",
    "measured_factors",
    "open_or_build",
    "synthetic",
]

ROW_BYTES = 120
OFFERED_TUPLES = 8_192
PAPER_BANDWIDTH, PAPER_SEEK_S = 60e6, 0.008
DiskName = Literal["simulated", "direct", "memory"]
KeyOrder = Literal["shuffled", "ranked"]


class Keys(Protocol):
    """A source of stream keys: `Zipf`, or anything else with `sample`."""

    def sample(self, size: int) -> NDArray[np.int64]:
        """Draw the next keys."""


class Stream:
    """An endless stream of 20-byte tuples in batches.

    Keys are doubled and, if they should have no match, made odd: relations have even keys, so that unmatched keys are
    between them.
    """

    def __init__(self, keys: Keys, is_matched: bool = True, *, is_doubled: bool = True) -> None:
        self.keys = keys
        self._factor = 2 if is_doubled else 1
        self._offset = 0 if is_matched else 1
        self._tuples = 0

    @property
    def zipf(self) -> Zipf | None:
        """The Zipf distribution of the keys, if they have one."""
        return self.keys if isinstance(self.keys, Zipf) else None

    def next(self, rows: int = OFFERED_TUPLES) -> pa.RecordBatch:
        """The next tuples, with their join codes."""
        return self.of_keys(self.keys.sample(rows))

    def of_keys(self, keys: NDArray[np.int64]) -> pa.RecordBatch:
        """The stream's next tuples, with these keys instead of drawn ones."""
        batch = make_stream_batch(keys * self._factor + self._offset, first_sequence=self._tuples)
        self._tuples += batch.num_rows
        return batch.add_column(0, "__code", batch.column("k"))


class TableStream(Stream):
    """An endless stream that repeats the rows of a table.

    ``key`` is the join column. The other columns get the prefix ``s_``, so that none has the name of a relation's
    column.
    """

    def __init__(self, table: pa.Table, key: str) -> None:
        names = [name if name == key else f"s_{name}" for name in table.schema.names]
        codes = table.column(key).cast(pa.int64())
        self._batch = table.rename_columns(names).add_column(0, "__code", codes).combine_chunks().to_batches()[0]
        self._position = 0

    @property
    def zipf(self) -> Zipf | None:
        """The distribution is unknown."""
        return None

    def next(self, rows: int = OFFERED_TUPLES) -> pa.RecordBatch:
        """The next tuples, at most up to the end of the table."""
        if self._position >= self._batch.num_rows:
            self._position = 0
        part = self._batch.slice(self._position, rows)
        self._position += part.num_rows
        return part


class DiskUnderTest:
    """A disk, and the clock for work on it.

    ``simulated``: the papers' disk; CPU time plus the time that the disk would have taken. ``direct``: the real disk,
    bypassing the page cache; wall-clock time without the time that other processes had the CPU. ``memory``: mapped
    pages in memory; CPU time.
    """

    def __init__(self, name: DiskName) -> None:
        self.name = name
        self.simulated = SimulatedDisk(PAPER_BANDWIDTH, PAPER_SEEK_S, virtual=True) if name == "simulated" else None
        self.io: Any = {"direct": "direct", "memory": "map"}.get(name, self.simulated)

    def now(self) -> float:
        """Elapsed seconds; only differences are meaningful."""
        if self.name == "direct":
            return time.perf_counter() - _queued_s()
        return time.process_time() + (0.0 if self.simulated is None else self.simulated.elapsed_s)


def _queued_s() -> float:
    """How long this process was ready to run while others ran; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


class Subject:
    """A relation in one shard, and everything that models and operators need to join a stream with it.

    Parameters
    ----------
    relation
        The relation.
    columns
        The columns that the join emits.
    stream
        Any stream joined with it, for its schema.
    factors
        A function that returns this machine's cost factors per I/O mode, ``"direct"`` and ``"cached"``.
    seed
        The seed of the streams.
    row_bytes
        Bytes per row, of which budgets are a percentage.
    matches_per_tuple
        Mean number of results per stream tuple.
    """

    def __init__(
        self,
        relation: Relation,
        columns: list[str],
        stream: Stream,
        factors: Callable[[], dict[str, CostFactors]],
        *,
        seed: int = 3,
        row_bytes: float = ROW_BYTES,
        matches_per_tuple: float = 1.0,
    ) -> None:
        self.relation = relation
        self.columns = columns
        self.rows = relation.stats.rows
        self.row_bytes = row_bytes
        self.matches_per_tuple = matches_per_tuple
        self.seed = seed
        self.stream_schema = stream.next(1).schema
        self._measure_factors = factors
        self._factors: dict[str, CostFactors] | None = None
        self._profiles: dict[str, JoinProfile] = {}
        self._plans: dict[tuple[str, DiskName, int, str], Plan] = {}

    def stream(self, exponent: float, order: KeyOrder, is_matched: bool = True) -> Stream:
        """A stream with a Zipf distribution over the relation's keys."""
        return Stream(Zipf(self.rows, exponent, order=order, seed=self.seed), is_matched)

    def shard(self, disk: DiskUnderTest) -> ShardReader:
        """The relation as read by the joins."""
        return self.relation.shard(0, columns=self.columns, io=disk.io)

    def budget(self, percent: float) -> Budget:
        """Memory as a percentage of the relation's bytes."""
        return Budget(int(self.rows * self.row_bytes * percent / 100))

    @property
    def factors(self) -> dict[str, CostFactors]:
        """Cost factors of this machine: "direct" and "cached"."""
        if self._factors is None:
            self._factors = self._measure_factors()
        return self._factors

    def factors_for(self, disk: DiskUnderTest) -> CostFactors:
        """Cost factors for that disk."""
        if disk.name == "memory":
            return self.factors["cached"]
        if disk.name == "direct":
            return self.factors["direct"]
        return self.factors["cached"].with_disk(seek_s=PAPER_SEEK_S, bandwidth_bytes_per_s=PAPER_BANDWIDTH)

    def profile(self, stream: Stream) -> JoinProfile:
        """The profile for the models, with the actual bytes per tuple of the window."""
        zipf = stream.zipf
        key = repr(zipf)
        if key not in self._profiles:
            own = pa.schema([f for f in self.stream_schema if f.name != "__code"])
            entry_bytes = StreamWindow.bytes_for(own, 100_000) / 100_000
            self._profiles[key] = JoinProfile.with_overhead(
                relation_rows=self.rows,
                relation_row_bytes=self.shard(DiskUnderTest("memory")).disk_row_bytes,
                window_overhead_bytes=entry_bytes - 20,
                matches_per_tuple=self.matches_per_tuple,
                hit_curve=None if zipf is None else zipf.hit_curve(),
                storage_curve=zipf.storage_cumulative() if zipf is not None and zipf.exponent else None,
            )
        return self._profiles[key]

    def plan(self, strategy: Strategy, disk: DiskUnderTest, budget: Budget, stream: Stream) -> Plan:
        """The best plan by the model. The model does not know the index, so its memory is subtracted first."""
        key = (strategy, disk.name, budget.total_bytes, repr(stream.zipf))
        if key not in self._plans:
            index_bytes = self.shard(disk).index_bytes if strategy == "hybrid" else 0
            divided = Budget(budget.total_bytes - index_bytes)
            factors = self.factors_for(disk)
            self._plans[key] = tune(strategy, profile=self.profile(stream), factors=factors, budget=divided)
        return self._plans[key]


def synthetic(
    directory: Path,
    rows: int,
    factors: Callable[[], dict[str, CostFactors]] | None = None,
    *,
    seed: int = 3,
    row_bytes: int = ROW_BYTES,
) -> Subject:
    """The papers' synthetic relation: unique even keys, rows of 120 bytes; built once and kept in the directory."""
    path = directory / f"r-{rows}-{row_bytes}"
    relation = open_or_build(path, lambda: _even_rows(rows, row_bytes))
    source = Stream(Zipf(rows, 0.0, seed=seed))
    return Subject(
        relation,
        ["sk", "pay"],
        source,
        factors or (lambda: measured_factors(directory)),
        seed=seed,
        row_bytes=row_bytes,
    )


def measured_factors(directory: Path) -> dict[str, CostFactors]:
    """This machine's cost factors, measured now, with scratch files in the directory."""
    return {str(name): factors for name, factors in measure_factors(directory).items()}


def kept_factors(directory: Path) -> dict[str, CostFactors]:
    """This machine's cost factors, measured at most once a day and kept in the directory."""
    path = directory / "calibration.json"
    return {
        "direct": calibrate(path, disk="direct", directory=directory, max_age_days=1),
        "cached": calibrate(path, disk="cached", directory=directory, max_age_days=1),
    }


def open_or_build(path: Path, batches: Callable[[], Iterator[pa.RecordBatch]], on: str = "k") -> Relation:
    """Open the relation at the path, or build it there, in one shard."""
    if path.exists():
        return Relation.open(path)
    rows = batches()
    first = next(rows)
    # Built in another directory and renamed: an interrupted run leaves no partial relation.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    Relation.build(pa.RecordBatchReader.from_batches(first.schema, chain([first], rows)), draft, on=on, shards=1)
    if path.exists():
        # Another run was faster.
        shutil.rmtree(draft)
    else:
        draft.rename(path)
    return Relation.open(path)


def _even_rows(rows: int, row_bytes: int) -> Iterator[pa.RecordBatch]:
    for batch in relation_batches(rows, row_bytes, seed=1):
        yield batch.set_column(0, "k", pc.multiply(batch.column("k"), 2))
