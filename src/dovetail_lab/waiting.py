"""Waiting times of tuples, for their match under load and for the disk at low rates, and the pages that are read.

Time is that of the papers' disk: CPU time plus the time that the simulated disk would have taken.
"""

import math
import time
from collections import defaultdict
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import InternalError
from dovetail.core.memory import Budget
from dovetail.joins import OPERATORS, SemiStreamOperator, join_spec
from dovetail.relation.io import SimulatedDisk
from dovetail_lab.measure import WARM_ROUNDS, Rounds, consume, make_operator
from dovetail_lab.subjects import PAPER_BANDWIDTH, DiskUnderTest, Stream, Subject

__all__ = ["PageUse", "arrival_waits", "matching_time_at", "matching_times"]

_WARM_SECONDS = 20.0
_BATCHES_PER_WINDOW = 128
# HYBRIDJOIN's hot blocks release many tuples at once, but rarely: a measurement must cover several of them.
_MEASURED_WINDOWS = 9
_MOST_HORIZONS = 50


class PageUse(SimulatedDisk):
    """A simulated disk that records which parts of which file were read.

    Examples
    --------
    >>> disk = PageUse(60e6, 0.008)
    >>> disk.access("rows", 0, 100)
    >>> disk.access("rows", 300, 100)
    >>> disk.bytes_per_group(4).tolist()
    [100.0, 0.0, 0.0, 100.0]
    """

    def __init__(self, bandwidth_bytes_per_s: float, seek_s: float) -> None:
        super().__init__(bandwidth_bytes_per_s, seek_s, virtual=True)
        self._reads: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def access(self, file: str, offset: int, length: int) -> None:
        """Account for a read, and record it."""
        super().access(file, offset, length)
        self._reads[file].append((offset, length))

    def bytes_per_group(self, groups: int) -> NDArray[np.float64]:
        """Bytes read of each of `groups` equal parts of the file with the most reads."""
        reads = max(self._reads.values(), key=lambda every: sum(length for _, length in every))
        offsets, lengths = (np.array(column, dtype=np.float64) for column in zip(*reads, strict=True))
        edges = np.linspace(0, float((offsets + lengths).max()), groups + 1)
        # Bytes before each edge, summed over all reads; the difference is what is between two edges.
        before = np.array([np.clip(edge - offsets, 0, lengths).sum() for edge in edges])
        return np.diff(before)


def matching_times(subject: Subject, kind: str, budget: Budget, stream: Stream, repeats: int) -> list[float]:
    """Mean seconds from a tuple's entry to its match in a join that is fed as fast as it accepts tuples, per repeat."""
    disk = DiskUnderTest("simulated")
    operator = make_operator(subject, kind, disk, budget, stream)
    batch_rows = max(64, operator.window_capacity // _BATCHES_PER_WINDOW)
    entered: list[float] = []
    rounds, began = Rounds(operator), time.process_time()
    while rounds.count() < WARM_ROUNDS[kind] and time.process_time() - began < _WARM_SECONDS:
        _feed(operator, stream, disk, batch_rows, entered)
    means = []
    for _ in range(repeats):
        total, matched, until = 0.0, 0, len(entered) + int(_MEASURED_WINDOWS * _BATCHES_PER_WINDOW / repeats) + 1
        while len(entered) < until:
            seconds, tuples = _feed(operator, stream, disk, batch_rows, entered)
            total, matched = total + seconds, matched + tuples
        means.append(total / max(1, matched))
    return means


def _feed(
    operator: SemiStreamOperator, stream: Stream, disk: DiskUnderTest, batch_rows: int, entered: list[float]
) -> tuple[float, int]:
    """Offer a batch; return the total waiting time of the tuples that left, and their number."""
    entered.append(disk.now())
    times, total, tuples = np.array(entered), 0.0, 0
    for output in operator.offer(stream.next(batch_rows)):
        numbers = output.column("v").to_numpy() // batch_rows
        total += float((disk.now() - times[numbers]).sum())
        tuples += output.num_rows
    return total, tuples


def matching_time_at(
    subject: Subject, kind: str, budget: Budget, stream: Stream, tuples_per_s: float, cycles: float
) -> float:
    """Mean seconds from arrival to match in a join that is not saturated: it keeps reading and takes what has arrived.

    ``tuples_per_s`` are evenly spaced arrivals, fewer than the join could serve. Counted are the tuples that arrive in
    the middle third of as much time as ``cycles`` scans of the relation take. Arrivals go on until every one of them
    has left, however long it waits: to stop earlier would leave out those that wait longest.
    """
    disk = DiskUnderTest("simulated")
    operator = _compiled(subject, kind, disk, budget, stream)
    horizon = cycles * subject.rows * subject.row_bytes / PAPER_BANDWIDTH
    first, last = horizon / 3, 2 * horizon / 3
    last_tuple = math.floor(last * tuples_per_s)
    now, taken, total, matched = 0.0, 0, 0.0, 0
    while taken <= last_tuple or _waits_for(operator, last_tuple):
        if now > _MOST_HORIZONS * horizon:
            raise InternalError(f"{kind} still holds tuples that arrived {now - last:,.0f} s ago.")
        if not operator.pending:
            now = max(now, (taken + 1) / tuples_per_s)
        come = min(math.floor(now * tuples_per_s + 1e-9) - taken, operator.window_capacity - operator.pending)
        began, base = now, disk.now()
        outputs = [operator.offer(stream.next(come)), operator.step()] if come > 0 else [operator.step()]
        taken += max(0, come)
        for output in chain.from_iterable(outputs):
            now = began + disk.now() - base
            arrivals = (output.column("v").to_numpy() + 1) / tuples_per_s
            counted = (arrivals >= first) & (arrivals < last)
            total += float((now - arrivals[counted]).sum())
            matched += int(counted.sum())
        now = began + disk.now() - base
    return total / max(1, matched)


def _waits_for(operator: SemiStreamOperator, tuple_number: int) -> bool:
    """Whether the tuple, or one that came before it, has not left."""
    oldest = operator.oldest
    return oldest is not None and oldest <= tuple_number


def _compiled(subject: Subject, kind: str, disk: DiskUnderTest, budget: Budget, stream: Stream) -> SemiStreamOperator:
    """A new operator, after another one has triggered the compilation of the code, which is not measured."""

    def make() -> SemiStreamOperator:
        if kind != "index_nested_loop":
            return make_operator(subject, kind, disk, budget, stream)
        return OPERATORS[kind](join_spec(subject.relation, subject.stream_schema, budget=budget, io=disk.io))

    first = make()
    consume(first.offer(subject.stream(1.0, "ranked").next(64)))
    consume(first.step())
    return make()


def arrival_waits(
    subject: Subject, kind: str, budget: Budget, stream: Stream, tuples_per_s: float, iterations: int
) -> float:
    """Mean seconds from a tuple's arrival to its disk access, with evenly spaced arrivals.

    MESHJOIN reads the disk when w tuples have arrived; HYBRIDJOIN keeps reading and takes what has arrived meanwhile;
    index nested loops process one tuple after the other.
    """
    disk = DiskUnderTest("simulated")
    operator = _compiled(subject, kind, disk, budget, stream)
    chunk = operator.spec.chunk_rows or 1
    now, taken, waited = 0.0, 0, 0.0
    # One lookup per iteration would end long before a backlog builds up.
    for _ in range(iterations * (40 if kind == "index_nested_loop" else 1)):
        wanted = chunk if kind == "mesh" else 1
        # The last tuple needed arrives at this time; HYBRIDJOIN needs none while some are still waiting.
        if kind != "hybrid" or not operator.pending:
            now = max(now, (taken + wanted) / tuples_per_s)
        come = math.floor(now * tuples_per_s + 1e-9) - taken
        entering = min(come, wanted) if kind != "hybrid" else min(come, operator.window_capacity - operator.pending)
        started = disk.now()
        if entering > 0:
            arrivals = (taken + 1 + np.arange(entering)) / tuples_per_s
            waited += float((now - arrivals).sum())
            taken += entering
            consume(operator.offer(stream.next(entering)))
        consume(operator.step())
        now += disk.now() - started
    return waited / max(1, taken)
