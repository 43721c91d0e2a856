"""What arriving rows say about their own input: the promises they break, and the join values they close.

Rows of unique, clustered and ordered inputs make promises. A row breaks one if its key is repeated, if its value
returns after another value, or if it is behind the order. Any row that matches an earlier punctuation of its own input
breaks that. The other rows close join values: in a clustered input all but the last value, in an ordered one all values
further behind than the slack.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import PromiseError
from dovetail.joins.multiway.spec import MJoinSpec, TimeWindow, TupleWindow
from dovetail.joins.promises.collection import PunctuationCollection
from dovetail.joins.promises.intervals import LEAST, MOST, IntervalSet
from dovetail.joins.promises.keys import Keys
from dovetail.joins.promises.patterns import BoundRange, decoded, encoded
from dovetail.joins.promises.punctuation import BoundPunctuation
from dovetail.joins.promises.spec import Metadata, Order

__all__ = ["REASONS", "ArrivalPromises", "Verdict", "late_rows"]

REASONS = {
    "ordered": "it is further behind the order of its input than the slack",
    "clustered": "its join value comes again after its cluster had ended",
    "punctuation": "it matches an earlier punctuation of its input",
    "unique": "it is a second row of a join value that is unique in its input",
}
"""Why a row was not joined, by the kind of promise it broke."""


class Verdict(NamedTuple):
    """Which rows break a promise, and of which kind."""

    broken: BoolArray
    kinds: dict[str, BoolArray]


@dataclass
class _Progress:
    """The progress of one input."""

    furthest: int | None = None
    furthest_value: Any = None
    last: Keys | None = None
    """The open cluster; if order is known only by micro-batch, all clusters of the last one."""
    seen: Keys | None = None
    """The keys of this micro-batch so far."""


class ArrivalPromises:
    """Checks the rows of all inputs of a join as they arrive.

    `holds` returns which of some keys an input already holds. Rows of `trusted` inputs are not checked. `written` gives
    the user's column names by the internal ones, for messages.
    """

    def __init__(
        self,
        spec: MJoinSpec,
        metadata: Metadata,
        collection: PunctuationCollection,
        holds: Callable[[int, Keys], BoolArray],
        trusted: Collection[str] = (),
        written: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._spec = spec
        self._policy = metadata.on_broken_promise
        self._collection = collection
        self._holds = holds
        names = spec.names
        self._trusted = [name in trusted for name in names]
        self._written = written or {}
        self._unique = [name in metadata.keys for name in names]
        self._clustered = [name in metadata.clustered for name in names]
        self._orders: list[Order | None] = [
            Order.of(metadata.ordered[name]) if name in metadata.ordered else None for name in names
        ]
        self._is_batchwise = metadata.is_batchwise
        self._progress = [_Progress() for _ in names]

    def keeps_order(self, i: int) -> bool:
        """Whether the processing order of an input's rows is significant."""
        return self._clustered[i] or self._orders[i] is not None

    # ---------------------------------------------------------------- judging

    def judge(self, i: int, keys: Keys, valid: BoolArray, rows: pa.RecordBatch, is_late: BoolArray) -> Verdict:
        """Find the rows that break a promise. Late rows break none; invalid rows, which have no key, break only
        punctuations on other columns.
        """
        kinds: dict[str, BoolArray] = {}
        broken: BoolArray = np.zeros(len(valid), np.bool_)
        if self._trusted[i]:
            return Verdict(broken, kinds)
        checks: list[tuple[str, Callable[[], BoolArray]]] = []
        if self._orders[i] is not None:
            checks.append(("ordered", lambda: self._out_of_order(i, keys, valid)))
        is_promised = self._collection.ranges[i].entries > 0
        if self._clustered[i]:
            checks.append(("clustered", lambda: self._out_of_cluster(i, keys, valid)))
        elif is_promised:
            checks.append(("punctuation", lambda: self._collection.ranges[i].broken_by(keys, valid, rows)))
        if self._unique[i]:
            checks.append(("unique", lambda: self._repeated(i, keys, valid & ~broken)))
        for kind, find in checks:
            found = find() & ~broken & ~is_late
            if kind != "punctuation":
                found &= valid
            if found.any():
                kinds[kind] = found
                broken = broken | found
        return Verdict(broken, kinds)

    def refuse(self, i: int, keys: Keys, rows: pa.RecordBatch, verdict: Verdict) -> None:
        """Raise the error for the first row that breaks a promise."""
        kind, mask = next(iter(verdict.kinds.items()))
        row = int(np.flatnonzero(mask)[0])
        name, columns = self._spec.names[i], self._spec.attributes[0].columns[self._spec.names[i]]
        one = rows.slice(row, 1)
        key = ", ".join(f"{c}={one.column(one.schema.get_field_index(c))[0].as_py()!r}" for c in columns)
        promise = ""
        if kind == "punctuation":
            promise = f" ({self._collection.ranges[i].promise_of(keys.take(np.array([row])), one)})"
        for inside, outside in self._written.get(name, {}).items():
            key, promise = key.replace(inside, outside), promise.replace(inside, outside)
        raise PromiseError(
            f"Input {name!r} broke its promise with a row of {key}: {REASONS[kind]}{promise}. It and "
            f"{int(verdict.broken.sum()) - 1} others of the same slice were not accepted.",
            hint='Correct the source, withdraw the promise, or pass on_broken_promise="quarantine".',
        )

    def _out_of_order(self, i: int, keys: Keys, valid: BoolArray) -> BoolArray:
        numbers, before, slack = self._numbered(i, keys)
        numbers = np.where(valid, numbers, LEAST)
        if self._is_batchwise:
            before = LEAST if before is None else before
            furthest = np.full(len(numbers), before)
        else:
            furthest = np.maximum.accumulate(np.concatenate([[LEAST if before is None else before], numbers]))[:-1]
        floors = np.where(furthest < LEAST + slack, LEAST, furthest - slack)
        broken: BoolArray = numbers < floors
        return broken

    def _numbered(self, i: int, keys: Keys) -> tuple[Int64Array, int | None, int]:
        """Numbers that ascend in the promised order, the furthest so far, and the slack."""
        order, progress = self._orders[i], self._progress[i]
        assert order is not None
        flip = np.int64(-1 if order.direction == "descending" else 0)
        if not self._collection.readers[i].is_hashed:
            slack = order.slack_units(self._kind(i))
            before = None if progress.furthest is None else progress.furthest ^ int(flip)
            # Inverting all bits reverses the order without overflow.
            return keys.codes ^ flip, before, slack
        column = keys.columns[0]
        if progress.furthest_value is not None:
            column = pa.concat_arrays([pa.array([progress.furthest_value], column.type), column])
        ranks = _ranks(column) ^ flip
        if progress.furthest_value is None:
            return ranks, None, 0
        return ranks[1:], int(ranks[0]), 0

    def _out_of_cluster(self, i: int, keys: Keys, valid: BoolArray) -> BoolArray:
        """Rows whose value was closed before, or starts a second run here."""
        broken: BoolArray = self._collection.ranges[i].contains(keys) & valid
        rows = np.flatnonzero(valid & ~broken)
        if not rows.size or self._is_batchwise:
            return broken
        ids, has_last = self._ids_after_last(i, keys.take(rows))
        begins = np.concatenate([[True], ids[1:] != ids[:-1]])
        run_of_row = np.cumsum(begins) - 1
        _, first_run = np.unique(ids[begins], return_index=True)
        is_first = np.zeros(int(begins.sum()), np.bool_)
        is_first[first_run] = True
        again = ~is_first[run_of_row]
        broken[rows[again[1:] if has_last else again]] = True
        return broken

    def _ids_after_last(self, i: int, keys: Keys) -> tuple[Int64Array, bool]:
        last = self._progress[i].last
        return (keys.ids(), False) if last is None else (_joined(last, keys).ids(), True)

    def _repeated(self, i: int, keys: Keys, candidates: BoolArray) -> BoolArray:
        broken: BoolArray = np.zeros(len(candidates), np.bool_)
        rows = np.flatnonzero(candidates)
        if not rows.size:
            return broken
        taken = keys.take(rows)
        _, first = np.unique(taken.ids(), return_index=True)
        is_first = np.zeros(rows.size, np.bool_)
        is_first[first] = True
        broken[rows] = ~is_first | self._holds(i, taken)
        return broken

    # ---------------------------------------------------------------- learning

    def observe(self, i: int, keys: Keys) -> Keys | IntervalSet | None:
        """Record rows that broke nothing; returns the join values they close, None if unknown."""
        closed: Keys | IntervalSet | None = Keys(np.zeros(0, np.int64))
        if not len(keys.codes):
            return closed
        if self._is_batchwise:
            if self.keeps_order(i):
                seen = self._progress[i].seen
                self._progress[i].seen = _unique(keys if seen is None else _joined(seen, keys))
            return closed
        if self._orders[i] is not None:
            closed = self._observe_order(i, keys)
        if self._clustered[i]:
            closed_clusters = self._observe_clusters(i, keys)
            if self._orders[i] is None:
                closed = closed_clusters
        return closed

    def end_batch(self) -> list[Keys | IntervalSet | None]:
        """Apply what a micro-batch says about order and clusters; returns what each input closed."""
        found: list[Keys | IntervalSet | None] = []
        for i, progress in enumerate(self._progress):
            seen, progress.seen = progress.seen, None
            if seen is None:
                found.append(Keys(np.zeros(0, np.int64)))
                continue
            closed: Keys | IntervalSet | None = None
            if self._clustered[i]:
                before, progress.last = progress.last, seen
                closed = seen.take(np.zeros(0, np.int64))
                if before is not None:
                    ids = _joined(seen, before).ids()
                    is_over = ~np.isin(ids[len(seen.codes) :], ids[: len(seen.codes)])
                    closed = before.take(np.flatnonzero(is_over))
                    self._collection.ranges[i].add_keys(closed)
            if self._orders[i] is not None:
                closed = self._observe_order(i, seen)
            found.append(closed)
        return found

    def _observe_order(self, i: int, keys: Keys) -> IntervalSet | None:
        order, progress, range_ = self._orders[i], self._progress[i], self._collection.ranges[i]
        assert order is not None
        numbers, before, slack = self._numbered(i, keys)
        top = int(np.argmax(numbers))
        if before is not None and int(numbers[top]) <= before:
            return IntervalSet.empty()
        is_descending = order.direction == "descending"
        if self._collection.readers[i].is_hashed:
            value = keys.columns[0][top].as_py()
            progress.furthest_value = value
            if isinstance(value, float) and value != value:
                return IntervalSet.empty()
            low, high = (value, None) if is_descending else (None, value)
            column = self._collection.readers[i].columns[0]
            range_.add(BoundPunctuation({column: BoundRange(self._kind(i), low, high, False, False)}))
            return None
        progress.furthest = furthest = int(keys.codes[top])
        edge = furthest + slack if is_descending else furthest - slack
        if not LEAST < edge < MOST:
            return IntervalSet.empty()
        closed = IntervalSet.between(edge + 1, None) if is_descending else IntervalSet.between(None, edge - 1)
        new = closed.minus(range_.intervals)
        range_.add_interval(closed)
        return new

    def _observe_clusters(self, i: int, keys: Keys) -> Keys:
        progress = self._progress[i]
        seen = keys if progress.last is None else _joined(progress.last, keys)
        ids = seen.ids()
        progress.last = seen.take(np.array([len(ids) - 1]))
        _, first = np.unique(ids[ids != ids[-1]], return_index=True)
        closed = seen.take(np.flatnonzero(ids != ids[-1])[first])
        if len(closed.codes):
            self._collection.ranges[i].add_keys(closed)
        return closed

    def _kind(self, i: int) -> pa.DataType:
        reader = self._collection.readers[i]
        return reader.schema.field(reader.columns[0]).type

    @property
    def nbytes(self) -> int:
        """The size of the keys of open clusters."""
        held = [keys for p in self._progress for keys in (p.last, p.seen) if keys is not None]
        return sum(
            keys.codes.nbytes + sum(int(column.get_total_buffer_size()) for column in keys.columns) for keys in held
        )

    # ---------------------------------------------------------------- restart

    def as_state(self) -> list[dict[str, Any]]:
        """The progress of the inputs as JSON-able data."""
        described = []
        for i, progress in enumerate(self._progress):
            last = progress.last
            value = progress.furthest_value
            described.append(
                {
                    "furthest": progress.furthest,
                    "furthest_value": None if value is None else encoded(pa.array([value], self._kind(i))),
                    "last_codes": None if last is None else encoded(pa.array(last.codes)),
                    "last_key": None if last is None else [encoded(column) for column in last.columns],
                }
            )
        return described

    def restore(self, described: list[dict[str, Any]]) -> None:
        """The inverse of `as_state`."""
        for progress, values in zip(self._progress, described, strict=True):
            value = values["furthest_value"]
            progress.furthest = values["furthest"]
            progress.furthest_value = None if value is None else decoded(value)[0].as_py()
            progress.last = None
            progress.seen = None
            if values["last_codes"] is not None:
                columns = tuple(decoded(text) for text in values["last_key"])
                progress.last = Keys(np.array(decoded(values["last_codes"]), np.int64), columns)


def late_rows(
    window: TimeWindow | TupleWindow | None, name: str, rows: pa.RecordBatch, watermark: int | None
) -> BoolArray:
    """Which rows of an input are late by the watermark; a row without a time is not, and joins nothing."""
    found: BoolArray = np.zeros(rows.num_rows, np.bool_)
    if isinstance(window, TimeWindow) and watermark is not None and len(set(window.columns_of(name))) == 1:
        column = rows.column(rows.schema.get_field_index(window.columns_of(name)[0]))
        times = column.view(pa.int64() if column.type.bit_width == 64 else pa.int32()).cast(pa.int64())
        found |= pc.less(times, watermark).fill_null(False).to_numpy(zero_copy_only=False)
    return found


def _joined(last: Keys, keys: Keys) -> Keys:
    columns = tuple(pa.concat_arrays([a, b]) for a, b in zip(last.columns, keys.columns, strict=True))
    return Keys(np.concatenate([last.codes, keys.codes]), columns)


def _unique(keys: Keys) -> Keys:
    _, first = np.unique(keys.ids(), return_index=True)
    return keys.take(np.sort(first))


def _ranks(column: pa.Array) -> Int64Array:
    """Numbers that compare like the values; NULLs last."""
    order = pc.sort_indices(column).to_numpy()
    values = column.take(pa.array(order))
    rises = pc.not_equal(values.slice(1), values.slice(0, len(values) - 1)).fill_null(True)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.concatenate([[0], np.cumsum(rises.to_numpy(zero_copy_only=False))])
    return ranks
