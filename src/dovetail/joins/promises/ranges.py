"""The punctuated range of an input: the join values it has promised not to send again, stored compactly.

If the join column is an integer, a date or a timestamp, values are merged into intervals. Other keys are stored one by
one with their hash, and ranges of them as predicates, which are merged if possible. Punctuations on other columns
cannot close a join value; they are kept to check the input's promise and to be propagated.

Memory is bounded: beyond its limit a range forgets, which is safe because a smaller range only saves less. Propagated
entries are forgotten first, then the narrowest intervals, the oldest keys and the oldest predicates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.promises.intervals import IntervalSet
from dovetail.joins.promises.keys import KeyPoints, KeyReader, Keys
from dovetail.joins.promises.patterns import BoundRange, BoundSet
from dovetail.joins.promises.punctuation import BoundPunctuation, points_of
from dovetail.joins.promises.set_log import SetLog
from dovetail.relation.keys import compute_codes

__all__ = ["MOST_PREDICATES", "Predicate", "PunctuatedRange", "key_punctuations", "values_of"]

_MOST_POINTS = 100_000
MOST_PREDICATES = 64
"""Predicates kept per input; each costs one pass over the keys of a check."""


@dataclass(frozen=True)
class Predicate:
    """A punctuation kept as a predicate."""

    bound: BoundPunctuation
    is_on_key: bool
    is_done: bool = False


class PunctuatedRange:
    """The promises of one input; see the module docstring."""

    def __init__(self, reader: KeyReader, log: SetLog) -> None:
        self.reader = reader
        self.log = log
        kinds = [reader.schema.field(name).type for name in reader.columns]
        self.intervals = IntervalSet.empty()
        self.points = KeyPoints.empty(kinds if reader.is_hashed else [])
        self.predicates: list[Predicate] = []
        self.added = 0
        self.comes: Callable[[Int64Array], BoolArray] | None = None
        """Which codes can occur; None: any."""

    # ---------------------------------------------------------------- adding

    def add(self, bound: BoundPunctuation) -> IntervalSet | Keys | None:
        """Add a punctuation; returns the join values that it closes, None if they cannot be listed."""
        is_on_key = set(bound.columns) <= set(self.reader.columns)
        if not is_on_key:
            self._add_predicate(bound, is_on_key=False)
            return IntervalSet.empty()
        if not self.reader.is_hashed:
            closed = self._interval_of(bound)
            self._close(closed)
            self.added += 1
            return closed
        values = points_of(bound, self.reader.columns, _MOST_POINTS)
        if values is None:
            self._add_predicate(bound, is_on_key=True)
            return None
        keys = self.reader.of_values(values)
        self.add_keys(keys)
        return keys

    def add_keys(self, keys: Keys) -> None:
        """Close join values one by one."""
        if not self.reader.is_hashed:
            self._close(IntervalSet.of(keys.codes))
        else:
            self.points = self.points.added(keys, self.added)
        self.added += len(keys.codes)

    def add_interval(self, closed: IntervalSet) -> None:
        """Close join values that are integers."""
        self.intervals = self.intervals.union(closed)
        self.log.add(closed)

    def _close(self, closed: IntervalSet) -> None:
        self.add_interval(closed)
        if self.comes is not None:
            self.intervals = self.intervals.bridged(self.comes)

    def _interval_of(self, bound: BoundPunctuation) -> IntervalSet:
        pattern = bound.columns.get(self.reader.columns[0])
        if pattern is None:
            return IntervalSet.between(None, None)
        if isinstance(pattern, BoundSet):
            return IntervalSet.of(self._codes(pattern.values))
        ends = self._codes(pa.array([v for v in (pattern.low, pattern.high) if v is not None], pattern.kind)).tolist()
        low = None if pattern.low is None else ends[0] + (not pattern.low_is_in)
        high = None if pattern.high is None else ends[-1] - (not pattern.high_is_in)
        return IntervalSet.between(low, high)

    def _codes(self, values: pa.Array) -> Int64Array:
        codes = compute_codes(pa.record_batch([values], names=["value"]), ["value"])
        return np.asarray(codes.to_numpy(zero_copy_only=False), np.int64)

    def _add_predicate(self, bound: BoundPunctuation, is_on_key: bool) -> None:
        """Add a predicate, merged with others where possible."""
        self.added += 1
        merged = bound
        kept = []
        for held in self.predicates:
            if held.is_on_key == is_on_key and held.bound.covers(merged):
                return
            # A propagated predicate is replaced only by one that covers it: it must not be propagated twice.
            joined = merged.union(held.bound) if held.is_on_key == is_on_key else None
            if joined is not None and (not held.is_done or merged.covers(held.bound)):
                merged = joined
            else:
                kept.append(held)
        self.predicates = [*kept, Predicate(merged, is_on_key)]
        if is_on_key and len(self.points):
            self.points = self.points.keep(~self._predicates_match(self.points.keys))

    # ---------------------------------------------------------------- asking

    @property
    def is_empty(self) -> bool:
        return not (len(self.intervals) or len(self.points) or any(p.is_on_key for p in self.predicates))

    def contains(self, keys: Keys) -> BoolArray:
        """Which join values are closed."""
        if not self.reader.is_hashed:
            return self.intervals.contains(keys.codes)
        return (self.points.locate(keys) >= 0) | self._predicates_match(keys)

    def covers(self, low: int, high: int) -> bool:
        """Whether all codes from low to high are closed."""
        if not self.reader.is_hashed:
            return self.intervals.covers(low, high)
        return any(p.is_on_key and not p.bound.columns for p in self.predicates)

    def broken_by(self, keys: Keys, valid: BoolArray, rows: pa.RecordBatch) -> BoolArray:
        """Which rows of the input itself break its promises; rows without a key only by their other columns."""
        broken = self.contains(keys) & valid
        for predicate in self.predicates:
            if not predicate.is_on_key:
                broken |= predicate.bound.matches(rows)
        return broken

    def promise_of(self, keys: Keys, rows: pa.RecordBatch) -> str:
        """The promise that this one row breaks, as text."""
        column = self.reader.columns[0]
        if not self.reader.is_hashed:
            place = int(self.intervals.find(keys.codes)[0])
            if place >= 0:
                low, high = self.intervals.pairs()[place]
                value = rows.column(rows.schema.get_field_index(column))[0].as_py()
                return f"{column} = {value}" if low == high else f"a range of {column} that holds {value}"
        for predicate in self.predicates:
            if predicate.bound.matches(rows).any():
                return str(predicate.bound)
        values = [rows.column(rows.schema.get_field_index(name))[0].as_py() for name in self.reader.columns]
        return " and ".join(f"{name} = {value}" for name, value in zip(self.reader.columns, values, strict=True))

    def _predicates_match(self, keys: Keys) -> BoolArray:
        found: BoolArray = np.zeros(len(keys.codes), np.bool_)
        on_key = [p.bound for p in self.predicates if p.is_on_key]
        if on_key:
            rows = pa.RecordBatch.from_arrays(list(keys.columns), names=list(self.reader.columns))
            for bound in on_key:
                found |= bound.matches(rows)
        return found

    # ---------------------------------------------------------------- memory

    @property
    def entries(self) -> int:
        """The number of intervals, keys and predicates held."""
        return len(self.intervals) + len(self.points) + len(self.predicates)

    @property
    def nbytes(self) -> int:
        return self.intervals.nbytes + self.points.nbytes + sum(p.bound.nbytes for p in self.predicates)

    def forget(self, limit_bytes: int, done: IntervalSet) -> int:
        """Above `limit_bytes`, drop entries until three quarters of it are left; returns how many were dropped.

        `done` are the join values that have been propagated.
        """
        forgotten = max(0, len(self.predicates) - MOST_PREDICATES)
        if forgotten:
            # The oldest propagated entries come first in this order.
            order = sorted(range(len(self.predicates)), key=lambda n: (not self.predicates[n].is_done, n))
            dropped = set(order[:forgotten])
            self.predicates = [p for n, p in enumerate(self.predicates) if n not in dropped]
        if self.nbytes <= limit_bytes:
            return forgotten
        target = limit_bytes * 3 // 4 - sum(p.bound.nbytes for p in self.predicates)
        if len(self.intervals):
            keep = max(0, target) // 16
            is_open = ~done.contains(self.intervals.lows)
            order_by_use = np.lexsort((self.intervals.lows, self.intervals.widths(), is_open))
            mask = np.ones(len(self.intervals), np.bool_)
            mask[order_by_use[: max(0, len(mask) - keep)]] = False
            forgotten += int((~mask).sum())
            self.intervals = self.intervals.keep(mask)
            self.log.write_anew()
        if len(self.points):
            keep = max(0, target) * len(self.points) // max(1, self.points.nbytes)
            order_by_age = np.lexsort((self.points.numbers, ~self.points.is_done))
            mask = np.ones(len(self.points), np.bool_)
            mask[order_by_age[: max(0, len(mask) - keep)]] = False
            forgotten += int((~mask).sum())
            self.points = self.points.keep(mask)
        return forgotten

    def mark_done(self, place: int) -> None:
        """Mark a predicate as propagated."""
        self.predicates[place] = replace(self.predicates[place], is_done=True)

    # ---------------------------------------------------------------- restart

    def as_state(self) -> tuple[dict[str, object], pa.Table | None]:
        """The state as JSON-able data and, if keys are hashed, a table; intervals are stored by their log."""
        described = [{"is_on_key": p.is_on_key, "is_done": p.is_done, "on": p.bound.as_dict()} for p in self.predicates]
        table = self.points.as_table(self.reader.columns) if self.reader.is_hashed else None
        return {"predicates": described, "added": self.added}, table

    def restore(self, values: dict[str, object], table: pa.Table | None, intervals: IntervalSet) -> None:
        """The inverse of `as_state`; no table stands for an empty one."""
        described = values["predicates"]
        assert isinstance(described, list)
        self.predicates = [
            Predicate(BoundPunctuation.from_dict(p["on"]), p["is_on_key"], p["is_done"]) for p in described
        ]
        self.added = int(str(values["added"]))
        self.intervals = intervals
        kinds = [self.reader.schema.field(name).type for name in self.reader.columns]
        self.points = KeyPoints.empty(kinds if self.reader.is_hashed else [])
        if table is not None and table.num_rows:
            self.points = KeyPoints.from_table(table, self.reader.columns)


def key_punctuations(intervals: IntervalSet, column: str, kind: pa.DataType) -> list[BoundPunctuation]:
    """Intervals of codes as punctuations on a column: one for all single values, and one per range."""
    single = intervals.lows == intervals.highs
    found = []
    if single.any():
        found.append(BoundPunctuation({column: BoundSet(_of_codes(intervals.lows[single], kind))}))
    for low, high in intervals.keep(~single).pairs():
        ends = [None if end in (-(2**63), 2**63 - 1) else _of_codes(np.array([end]), kind)[0].as_py()
                for end in (low, high)]  # fmt: skip
        if ends == [None, None]:
            found.append(BoundPunctuation({}))
        else:
            found.append(BoundPunctuation({column: BoundRange(kind, ends[0], ends[1], True, True)}))
    return found


def values_of(bound: BoundPunctuation, columns: Sequence[str], most: int) -> pa.RecordBatch | None:
    """The join column values that a punctuation closes, as rows; None if it names anything else or too many."""
    if set(bound.columns) != set(columns):
        return None
    pattern = bound.columns[columns[0]]
    if len(columns) == 1 and isinstance(pattern, BoundRange):
        if pattern.low is None or pattern.high is None or not _is_discrete(pattern.kind):
            return None
        ends = compute_codes(pa.record_batch([pa.array([pattern.low, pattern.high], pattern.kind)], names=["v"]), ["v"])
        points = IntervalSet.between(*ends.to_pylist()).points(most)
        return None if points is None else pa.record_batch([_of_codes(points, pattern.kind)], names=list(columns))
    return points_of(bound, columns, most)


def _is_discrete(kind: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def _of_codes(codes: Int64Array, kind: pa.DataType) -> pa.Array:
    storage = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
    limits = np.iinfo(f"int{kind.bit_width}")
    return pa.array(np.clip(codes, limits.min, limits.max)).cast(storage).view(kind)
