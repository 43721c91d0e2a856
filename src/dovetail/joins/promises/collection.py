"""The punctuation collection: the punctuated range of every input, and which punctuations have been propagated.

A punctuation of an input is propagated once the input holds no tuple that matches it: no later tuple will, and the
earlier ones have emitted all their results or can have none. It then holds for the output: no later row matches. If the
join column is an integer, a date or a timestamp, parts of a punctuation are propagated as they become true.

This requires that every output row contains a tuple of that input. An outer or anti join emits rows of the preserved
input alone, so only that input's punctuations on the join column are propagated; a full join propagates what both
promise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.multiway.spec import MJoinSpec
from dovetail.joins.multiway.spill import Fetch
from dovetail.joins.promises.intervals import IntervalSet
from dovetail.joins.promises.keys import KeyReader, Keys
from dovetail.joins.promises.patterns import BoundSet
from dovetail.joins.promises.punctuation import BoundPunctuation
from dovetail.joins.promises.ranges import MOST_PREDICATES, PunctuatedRange, key_punctuations
from dovetail.joins.promises.set_log import SetLog
from dovetail.kernels.bucket_index import partitions_of

__all__ = ["Held", "PunctuationCollection", "Unread"]

_FEW = 4096
_LOGS_SHARE = 32
_PUNCTUATED, _PASSED_ON, _READY = "punctuated-", "passed_on", "ready"


class Held(NamedTuple):
    """Tuples that an input holds in memory and that may still be joined."""

    keys: Keys
    rows: pa.RecordBatch


class Unread(NamedTuple):
    """Metadata of tuples on disk that were not read."""

    partition: int
    low: int
    high: int


Holder = Callable[[int, "Int64Array | None"], Iterable[Held | Unread]]


class PunctuationCollection:
    """The promises of all inputs of a join."""

    def __init__(self, spec: MJoinSpec, limit_bytes: int) -> None:
        self._spec = spec
        attribute = spec.attributes[0]
        self.readers = [KeyReader(spec.schemas[n], attribute.columns[n], spec.hashed[0]) for n in spec.names]
        # A part of the limit is for what was added since the last commit.
        logged = [*(f"{_PUNCTUATED}{i}" for i in range(len(spec.names))), _PASSED_ON, _READY]
        self._logs = {name: SetLog(name, limit_bytes // _LOGS_SHARE // len(logged)) for name in logged}
        logs = [self._logs[f"{_PUNCTUATED}{i}"] for i in range(len(spec.names))]
        self.ranges = [PunctuatedRange(reader, log) for reader, log in zip(self.readers, logs, strict=True)]
        limit_bytes -= limit_bytes // _LOGS_SHARE
        self._limit_bytes = limit_bytes
        self.done = IntervalSet.empty()
        self._ready = IntervalSet.empty()
        self._ready_others: list[BoundPunctuation] = []
        # The output column of each input column; columns not in the output cannot be propagated.
        first = attribute.columns[attribute.inputs[0]]
        self._names: list[dict[str, str]] = []
        everyone = range(len(spec.names))
        alone = [i for i in everyone if spec.preserved[i]]
        # What all inputs of a group promise about the join column can be propagated.
        self._groups = [[i] for i in everyone] if spec.how in ("inner", "semi") else [alone]
        for number, name in enumerate(spec.names):
            shown = [] if spec.how in ("semi", "anti") and number else spec.schemas[name].names
            names = {column: column for column in shown} | dict(zip(attribute.columns[name], first, strict=True))
            self._names.append(names)

    @property
    def is_empty(self) -> bool:
        return all(each.is_empty for each in self.ranges)

    @property
    def entries(self) -> int:
        """The number of intervals, keys and predicates held."""
        return sum(each.entries for each in self.ranges)

    @property
    def nbytes(self) -> int:
        others = sum(bound.nbytes for bound in self._ready_others)
        logs = sum(log.nbytes for log in self._logs.values())
        return sum(each.nbytes for each in self.ranges) + self.done.nbytes + self._ready.nbytes + others + logs

    def is_over_limit(self) -> bool:
        """Whether entries must be forgotten or merged before more are added."""
        held = sum(each.nbytes for each in self.ranges)
        return 2 * held > self._limit_bytes or any(len(each.predicates) > MOST_PREDICATES for each in self.ranges)

    def forget(self) -> int:
        """Shrink to half of the limit, the other half being for propagation; returns the number of entries dropped."""
        limit = self._limit_bytes // (2 * len(self.ranges))
        forgotten = sum(each.forget(limit, self.done) for each in self.ranges)
        closed = IntervalSet.empty()
        for each in self.ranges:
            closed = closed.union(each.intervals)
        # Only values that are still closed could be propagated a second time.
        self.done = self.done.intersection(closed)
        self._logs[_PASSED_ON].write_anew()
        return forgotten

    # ---------------------------------------------------------------- propagating

    def awaited(self, i: int, keys: Keys) -> BoolArray:
        """Which tuples of an input match a punctuation of another input that is not propagated yet."""
        found: BoolArray = np.zeros(len(keys.codes), np.bool_)
        for j in self._carriers(i):
            each = self.ranges[j]
            if not each.reader.is_hashed:
                found |= each.intervals.contains(keys.codes) & ~self.done.contains(keys.codes)
            elif len(each.points):
                found |= (each.points.locate(keys) >= 0) & ~each.points.done_among(keys)
        return found

    def is_awaiting(self, i: int) -> bool:
        """Whether another input has a punctuation that is not propagated yet."""
        return any(
            len(self.ranges[j].intervals.minus(self.done)) or not self.ranges[j].points.is_done.all()
            for j in self._carriers(i)
        )

    def _carriers(self, i: int) -> list[int]:
        """The other inputs whose punctuations can be propagated."""
        return [j for group in self._groups for j in group if j != i]

    def pass_on(self, held: Holder) -> None:
        """Find the punctuations whose results have all been emitted.

        `held` returns the tuples of an input; given codes, at least those with one of them.
        """
        for group in self._groups:
            if not self.readers[0].is_hashed:
                self._pass_intervals_on(group, held)
                continue
            for i in group:
                points = self.ranges[i].points
                if len(points) and not points.is_done.all():
                    self._pass_points_on(i, group, held)
        for i in range(len(self.ranges)):
            self._pass_predicates_on(i, held)

    def _pass_intervals_on(self, group: Sequence[int], held: Holder) -> None:
        pending = self.ranges[group[0]].intervals.minus(self.done)
        for i in group[1:]:
            pending = pending.intersection(self.ranges[i].intervals)
        if len(pending) == 0:
            return
        few = pending.points(_FEW)
        blocked = [np.zeros(0, np.int64)]
        for part in (part for i in group for part in held(i, few)):
            if isinstance(part, Held):
                codes = part.keys.codes
                blocked.append(np.unique(codes[pending.contains(codes)]))
            elif few is None:
                pending = pending.minus(IntervalSet.between(part.low, part.high))
            else:
                might = (few >= part.low) & (few <= part.high)
                might &= partitions_of(few, self._spec.partitions) == part.partition
                blocked.append(few[might])
        clear = pending.minus(IntervalSet.of(np.concatenate(blocked)))
        room = max(0, self._limit_bytes // 4 - max(self._ready.nbytes, self.done.nbytes)) // 16
        if len(clear) > room:
            # The rest waits until these are fetched, or until gaps between propagated values have closed.
            clear = clear.keep(np.arange(len(clear)) < room)
        self.done = self.done.union(clear)
        self._ready = self._ready.union(clear)
        self._logs[_PASSED_ON].add(clear)
        self._logs[_READY].add(clear)

    def _pass_points_on(self, i: int, group: Sequence[int], held: Holder) -> None:
        points = self.ranges[i].points
        blocked = points.is_done.copy()
        for j in group:
            if j != i:
                blocked |= ~self.ranges[j].contains(points.keys)
        waiting = points.codes[~blocked]
        for part in (part for j in group for part in held(j, waiting)):
            if isinstance(part, Held):
                places = points.locate(part.keys)
                blocked[places[places >= 0]] = True
            else:
                blocked |= partitions_of(points.codes, self._spec.partitions) == part.partition
        clear = np.flatnonzero(~blocked)
        room = self._limit_bytes // 4 - sum(bound.nbytes for bound in self._ready_others)
        clear = clear[: max(0, room) // (1 + points.nbytes // max(1, len(points)) + 256)]
        if not clear.size:
            return
        keys = points.keys.take(clear)
        points.is_done[clear] = True
        new = np.ones(clear.size, np.bool_)
        for j, other in enumerate(self.ranges):
            if j != i:
                # A value that another input promises as well is propagated once.
                new &= ~other.points.done_among(keys)
                places = other.points.locate(keys)
                other.points.is_done[places[places >= 0]] = True
        if new.any():
            fresh = keys.take(np.flatnonzero(new))
            names = [self._names[i][column] for column in self.readers[i].columns]
            if len(names) == 1:
                self._ready_others.append(BoundPunctuation({names[0]: BoundSet(fresh.columns[0])}))
            else:
                # One each: the product of the columns' values would say more than was promised.
                for n in range(len(fresh.codes)):
                    parts = [BoundSet(column.take(pa.array([n]))) for column in fresh.columns]
                    self._ready_others.append(BoundPunctuation(dict(zip(names, parts, strict=True))))

    def _pass_predicates_on(self, i: int, held: Holder) -> None:
        each = self.ranges[i]
        for n, predicate in enumerate(each.predicates):
            if predicate.is_done or not set(predicate.bound.columns) <= set(self._names[i]):
                continue
            # An unmatched row of another input is NULL in all columns but the join's.
            group: list[int] | None = [i]
            if predicate.is_on_key:
                group = next((group for group in self._groups if i in group), None)
            if group is None or not all(self._covers(j, i, predicate.bound) for j in group if j != i):
                continue
            if any(self._may_match(j, i, predicate.bound, part) for j in group for part in held(j, None)):
                continue
            if 4 * sum(bound.nbytes for bound in self._ready_others) > self._limit_bytes:
                return  # until they are fetched
            each.mark_done(n)
            self._ready_others.append(each.predicates[n].bound.renamed(self._names[i]))

    def _covers(self, j: int, i: int, bound: BoundPunctuation) -> bool:
        """Whether input j has promised everything that a punctuation of input i on the join columns says."""
        theirs = bound.renamed(dict(zip(self.readers[i].columns, self.readers[j].columns, strict=True)))
        return any(p.is_on_key and p.bound.covers(theirs) for p in self.ranges[j].predicates)

    def _may_match(self, j: int, i: int, bound: BoundPunctuation, part: Held | Unread) -> bool:
        """Whether tuples held by input j may match a punctuation of input i."""
        if isinstance(part, Unread):
            return True
        if j != i:
            bound = bound.renamed(dict(zip(self.readers[i].columns, self.readers[j].columns, strict=True)))
        return bool(bound.matches(part.rows).any())

    def take_ready(self) -> list[BoundPunctuation]:
        """The punctuations that now hold for the output, each once."""
        reader = self.readers[0]
        kind = reader.schema.field(reader.columns[0]).type
        found = [] if reader.is_hashed else key_punctuations(self._ready, reader.columns[0], kind)
        found += self._ready_others
        if len(self._ready):
            self._logs[_READY].write_anew()
        self._ready, self._ready_others = IntervalSet.empty(), []
        return found

    # ---------------------------------------------------------------- restart

    def as_state(
        self, have: frozenset[str] = frozenset(), fetch: Fetch | None = None
    ) -> tuple[dict[str, Any], dict[str, pa.Table], list[str]]:
        """The state as JSON-able data, the tables to write, and the names of all that hold it; `have` are stored."""
        described, tables = [], {}
        for number, each in enumerate(self.ranges):
            values, table = each.as_state()
            described.append(values)
            if table is not None:
                tables[f"{_PUNCTUATED}{number}"] = table
        names, sets = [name for name, table in tables.items() if table.num_rows], {}
        for name, log in self._logs.items():
            new, sets[name] = log.tables(self._set_of(name), have, fetch)
            tables |= new
            names += sets[name]
        ready = [bound.as_dict() for bound in self._ready_others]
        return {"ranges": described, "ready": ready, "sets": sets}, tables, names

    def _set_of(self, name: str) -> IntervalSet:
        if name in (_PASSED_ON, _READY):
            return self.done if name == _PASSED_ON else self._ready
        return self.ranges[int(name.removeprefix(_PUNCTUATED))].intervals

    def stored_names(self) -> frozenset[str]:
        """The stored tables that the next snapshot may refer to."""
        return frozenset(name for log in self._logs.values() for name in log.names)

    def mark_stored(self, values: dict[str, Any], tables: Mapping[str, pa.Table]) -> None:
        """Remember that a snapshot with these values is stored."""
        for name, log in self._logs.items():
            log.mark_stored(tables, values["sets"][name])

    def restore(self, values: dict[str, Any], tables: dict[str, pa.Table], are_stored: bool) -> None:
        """The inverse of `as_state`; a missing table was empty. `are_stored`: the next commit may refer to them."""
        sets = values.get("sets")
        if sets is None:
            # Earlier versions had one table for each set, and the keys of an input that are hashes under the same name.
            sets = {
                name: [name] if name in tables and "low" in tables[name].column_names else [] for name in self._logs
            }
        found = {
            name: log.restored({part: tables[part] for part in sets[name]}, are_stored)
            for name, log in self._logs.items()
        }
        for number, (each, described) in enumerate(zip(self.ranges, values["ranges"], strict=True)):
            name = f"{_PUNCTUATED}{number}"
            each.restore(described, tables.get(name) if each.reader.is_hashed else None, found[name])
        self.done, self._ready = found[_PASSED_ON], found[_READY]
        self._ready_others = [BoundPunctuation.from_dict(described) for described in values["ready"]]
