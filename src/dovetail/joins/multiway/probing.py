"""The probing sequence: tuples probe one input after another, and stop at the first without a match.

Tuples are probed in batches. A *partial result* is a set of row references, one per input bound so far; probing the
next input extends it. Every extension is cut into pieces of bounded size, and each piece is completed before the next
is made, so memory does not depend on the number of matches of a key.

With a window, a partial result has bounds on the time of the next input's tuple, which follow from the times bound so
far. A chunk with a time index is expanded only within them; in others the candidates are compared with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.output import RowRefs
from dovetail.joins.multiway.residuals import Residuals
from dovetail.joins.multiway.spec import MJoinSpec
from dovetail.kernels.bucket_index import expand_piece
from dovetail.relation.keys import keys_equal

__all__ = ["Partial", "Prober", "SequenceChooser"]

_SAMPLE_TUPLES = 256
_SMOOTHING = 0.3


@dataclass(frozen=True)
class Partial:
    """Combinations of one row from each of several inputs."""

    refs: Mapping[int, RowRefs]  # per bound input
    low: Int64Array | None  # earliest event time per combination, if there is a window
    high: Int64Array | None  # latest event time per combination
    latest: Int64Array | None  # further rows must have arrived before this; None for no bound

    @property
    def count(self) -> int:
        return len(next(iter(self.refs.values())).rows)

    def take(self, picked: npt.NDArray[np.signedinteger] | BoolArray | slice) -> "Partial":
        return Partial(
            {i: refs.take(picked) for i, refs in self.refs.items()},
            None if self.low is None else self.low[picked],
            None if self.high is None else self.high[picked],
            None if self.latest is None else self.latest[picked],
        )


def _of_rows(i: int, chunk: Chunk, rows: Int32Array, latest: Int64Array | None = None) -> Partial:
    low = None if chunk.low is None else chunk.low[rows]
    high = low if chunk.high is chunk.low else None if chunk.high is None else chunk.high[rows]
    return Partial({i: RowRefs([chunk], None, rows)}, low, high, latest)


class Prober:
    """Extends partial results input by input."""

    def __init__(self, spec: MJoinSpec, metrics: MJoinMetrics) -> None:
        self._spec = spec
        self._metrics = metrics
        self._residuals = Residuals(spec)
        self._columns = {
            (i, k): [spec.schemas[name].get_field_index(c) for c in spec.attributes[k].columns[name]]
            for i, name in enumerate(spec.names)
            for k in spec.input_attributes[i]
        }

    def start(self, i: int, chunk: Chunk, rows: Int32Array, only_earlier: bool) -> Partial:
        """Rows of one input as partial results. With `only_earlier` they match only tuples that arrived before them."""
        return _of_rows(i, chunk, rows, chunk.arrivals[rows] if only_earlier else None)

    def results(
        self, partial: Partial, order: Sequence[int], sources: Mapping[int, Sequence[Chunk]], limit: int
    ) -> Iterator[Partial]:
        """Complete results, in pieces of at most `limit`."""
        if not order:
            yield partial
            return
        for extended in self._extended(partial, order[0], sources[order[0]], limit):
            yield from self.results(extended, order[1:], sources, limit)

    def _extended(self, partial: Partial, j: int, chunks: Sequence[Chunk], limit: int) -> Iterator[Partial]:
        """Probe each chunk of one input with all partial results."""
        shared = [
            (k, next(i for i in partial.refs if k in self._spec.input_attributes[i]))
            for k in self._spec.input_attributes[j]
            if any(k in self._spec.input_attributes[i] for i in partial.refs)
        ]
        codes = [self._codes_of(partial, k, i) for k, i in shared]
        place = self._spec.input_attributes[j].index(shared[0][0])
        bounds = _time_bounds(self._spec, partial, j)
        self._metrics.probes += partial.count
        held: list[tuple[Int32Array, int, Int32Array]] = []
        total = 0
        for number, chunk in enumerate(chunks):
            if len(chunk) == 0 or not (bounds is None or bounds.may_meet(chunk)):
                continue
            first, count, found = _found(chunk, place, codes[0], bounds)
            state = (0, 0, found)
            while state[2]:
                queries, places, state = expand_piece(first, count, state, limit - total)
                self._metrics.comparisons += len(queries)
                rows = chunk.rows_at(place, places)
                is_exact = chunk.has_time_index(place) and chunk.high is chunk.low
                keep = self._matches(partial, queries, j, chunk, rows, shared, codes, None if is_exact else bounds)
                if keep is not None:
                    queries, rows = queries[keep], rows[keep]
                if len(queries):
                    held.append((queries, number, rows))
                    total += len(queries)
                if total >= limit:
                    yield self._joined(partial, j, chunks, held)
                    held, total = [], 0
        if held:
            yield self._joined(partial, j, chunks, held)

    def _codes_of(self, partial: Partial, k: int, i: int) -> Int64Array:
        refs, place = partial.refs[i], self._spec.input_attributes[i].index(k)
        return refs.values([chunk.codes[place] for chunk in refs.chunks])

    def _matches(
        self,
        partial: Partial,
        queries: Int32Array,
        j: int,
        chunk: Chunk,
        rows: Int32Array,
        shared: Sequence[tuple[int, int]],
        codes: Sequence[Int64Array],
        bounds: "_TimeBounds | None",
    ) -> BoolArray | None:
        """The candidates that match in everything besides the code they were found by; None if all do."""
        checks: list[BoolArray] = []
        if chunk.gone is not None:
            checks.append(~chunk.is_gone(rows))
        if partial.latest is not None:
            checks.append(chunk.arrivals[rows] < partial.latest[queries])
        if bounds is not None:
            assert chunk.low is not None
            assert chunk.high is not None
            checks += [chunk.low[rows] >= bounds.earliest[queries], chunk.high[rows] <= bounds.latest[queries]]
        places = self._spec.input_attributes[j]
        for (k, _), queried in zip(shared[1:], codes[1:], strict=True):
            checks.append(chunk.codes[places.index(k)][rows] == queried[queries])
        keep = None
        for check in checks:
            keep = check if keep is None else keep & check
        for k, i in shared:
            if self._spec.hashed[k]:
                # Keys are fetched only for the remaining candidates.
                live = np.arange(len(rows)) if keep is None else np.flatnonzero(keep)
                theirs = partial.refs[i].take(queries[live]).gather(self._columns[i, k])
                ours = RowRefs([chunk], None, rows[live]).gather(self._columns[j, k])
                verdict = np.zeros(len(rows), np.bool_)
                verdict[live] = keys_equal(theirs, ours) if live.size else False
                keep = verdict
        return self._residuals.checked(partial.refs, queries, j, chunk, rows, keep)

    def _joined(
        self, partial: Partial, j: int, chunks: Sequence[Chunk], held: Sequence[tuple[Int32Array, int, Int32Array]]
    ) -> Partial:
        queries = np.concatenate([part[0] for part in held]) if len(held) > 1 else held[0][0]
        rows = np.concatenate([part[2] for part in held]) if len(held) > 1 else held[0][2]
        if len({part[1] for part in held}) == 1:
            refs = RowRefs([chunks[held[0][1]]], None, rows)
        else:
            source = np.concatenate([np.full(len(part[0]), part[1], np.int32) for part in held])
            refs = RowRefs(chunks, source, rows)
        before = partial.take(queries)
        low, high = before.low, before.high
        if low is not None and high is not None:
            low = np.minimum(low, refs.values([c.low for c in refs.chunks if c.low is not None]))
            high = np.maximum(high, refs.values([c.high for c in refs.chunks if c.high is not None]))
        return Partial({**before.refs, j: refs}, low, high, before.latest)


class _TimeBounds(NamedTuple):
    """Per partial result, between which times a tuple of the next input must lie, both included."""

    earliest: Int64Array
    latest: Int64Array

    def may_meet(self, chunk: Chunk) -> bool:
        """Whether any row of the chunk can lie within the bounds of any partial result."""
        return chunk.max_low >= int(self.earliest.min()) and chunk.min_low <= int(self.latest.max())


def _time_bounds(spec: MJoinSpec, partial: Partial, j: int) -> _TimeBounds | None:
    """The bounds that the inputs bound so far imply for input j; None without a window."""
    furthest = spec.furthest
    if furthest is None or partial.low is None or partial.high is None:
        return None
    if spec.has_one_width:
        width = furthest[j][next(iter(partial.refs))]
        assert width is not None
        return _TimeBounds(partial.high - width, partial.low + width)
    earliest = np.full(partial.count, -(2**63), np.int64)
    latest = np.full(partial.count, 2**63 - 1, np.int64)
    for i, refs in partial.refs.items():
        before, after = furthest[j][i], furthest[i][j]
        if before is not None:
            times = refs.values([c.high for c in refs.chunks if c.high is not None])
            np.maximum(earliest, times - before, out=earliest)
        if after is not None:
            times = refs.values([c.low for c in refs.chunks if c.low is not None])
            np.minimum(latest, times + after, out=latest)
    return _TimeBounds(earliest, latest)


def _found(
    chunk: Chunk, place: int, codes: Int64Array, bounds: _TimeBounds | None
) -> tuple[Int32Array, Int32Array, int]:
    if bounds is None:
        return chunk.find(place, codes)
    return chunk.find_within(place, codes, bounds.earliest, bounds.latest)


class SequenceChooser:
    """The order in which each input probes the others: fewest recently observed matches first.

    A sample of every batch is counted against all other inputs, so that rarely reached inputs are measured too. The
    sample is the same in every run: a replay makes the same decisions.
    """

    def __init__(self, spec: MJoinSpec) -> None:
        self._spec = spec
        count = len(spec.names)
        self.fanout: npt.NDArray[np.float64] = np.full((count, count), np.nan)
        self._orders: list[tuple[int, ...]] = []
        for i, name in enumerate(spec.names):
            fixed = spec.sequences.get(name)
            self._orders.append(tuple(spec.names.index(n) for n in fixed) if fixed is not None else self._sorted(i))

    def order(self, i: int) -> tuple[int, ...]:
        """The inputs to probe for an arrival of input i, in order."""
        return self._orders[i]

    def observe(
        self, i: int, chunk: Chunk, rows: Int32Array, tables: Mapping[int, Sequence[Chunk]]
    ) -> tuple[int, bool]:
        """Count matches of a sample of arrivals; returns the number of lookups, and whether the order changed."""
        if self._spec.names[i] in self._spec.sequences or len(rows) == 0 or len(self._spec.names) < 3:
            return 0, False
        sample = rows[:: max(1, len(rows) // _SAMPLE_TUPLES)]
        probes = 0
        for j, chunks in tables.items():
            common = [k for k in self._spec.input_attributes[i] if k in self._spec.input_attributes[j]]
            if j == i or not common:
                continue
            queries = chunk.codes[self._spec.input_attributes[i].index(common[0])][sample]
            place = self._spec.input_attributes[j].index(common[0])
            bounds = _time_bounds(self._spec, _of_rows(i, chunk, sample), j)
            found = sum(_found(other, place, queries, bounds)[2] for other in chunks if len(other))
            probes += len(queries)
            seen, now = self.fanout[i, j], found / len(sample)
            self.fanout[i, j] = now if np.isnan(seen) else (1 - _SMOOTHING) * seen + _SMOOTHING * now
        before = self._orders[i]
        self._orders[i] = self._sorted(i)
        return probes, self._orders[i] != before

    def _sorted(self, i: int) -> tuple[int, ...]:
        """Greedily take the linked input with the fewest matches; inputs without observations come first."""
        order: list[int] = []
        left = [j for j in range(len(self._spec.names)) if j != i]
        while left:
            bound = [self._spec.names[b] for b in (i, *order)]
            linked = [j for j in left if self._spec.graph.shared(bound, [self._spec.names[j]])]
            known = {j: self._expected(i, order, j) for j in linked}
            best = min(linked, key=lambda j: (known[j], j))
            order.append(best)
            left.remove(best)
        return tuple(order)

    def _expected(self, i: int, order: Sequence[int], j: int) -> float:
        """Matches per tuple of the input that leads to j most directly."""
        for b in (i, *order):
            if self._spec.graph.shared([self._spec.names[b]], [self._spec.names[j]]):
                return float(np.nan_to_num(self.fanout[b, j], nan=0.0))
        return 0.0

    def state(self) -> dict[str, list[list[float | None]]]:
        """The observations as JSON-able data."""
        return {"fanout": [[None if np.isnan(v) else float(v) for v in row] for row in self.fanout]}

    def restore(self, state: Mapping[str, list[list[float | None]]]) -> None:
        self.fanout = np.array([[np.nan if v is None else v for v in row] for row in state["fanout"]], np.float64)
        for i, name in enumerate(self._spec.names):
            if name not in self._spec.sequences:
                self._orders[i] = self._sorted(i)
