"""The task of `enrich` where only keys travel: key columns in, a list of the relation's rows per tuple out.

The stream's other columns stay in the JVM, which puts them beside the rows of each list. It is the same lookup as
`LookupTask`, within the same budget: what comes back is cut by bytes, and Spark takes lists in batches of any size. The
results of one tuple are one value for Spark and cannot be cut, so the way is for joins where they are few;
``docs/design/keys_only.md`` says which.

Counters travel as an additional element of the last tuple's list in each batch of lookups, marked by a
column that is NULL in results.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import BudgetError, InternalError
from dovetail.core.memory import format_bytes
from dovetail.joins import LookupJoin
from dovetail.relation import Relation
from dovetail.runtime.enrich import LookupTask
from dovetail.runtime.metrics_row import COUNTERS, METRICS_COLUMN

__all__ = ["KeysOnlyTask", "RowLists"]

_LIST_SHARE = 4  # one tuple's results may take a quarter of a task's budget


@dataclass
class KeysOnlyTask:
    """Looks up the tuples of a partition; an Arrow UDF calls it once per task."""

    lookup: LookupTask  # its recipe emits the column `row` first, then the relation's columns
    stream_schema: pa.Schema  # of the batches that are joined
    arguments: tuple[str, ...]  # the names of the columns that Spark passes, in order
    row: str  # the column with a tuple's number in its batch
    returned: pa.ListType  # what Spark expects per tuple

    @property
    def name(self) -> str:
        """Shown in Spark's plans."""
        return self.lookup.name

    def __call__(self, passed: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        relation = self.lookup.open()
        names = list(self.arguments)
        batches = self.lookup.merged(
            (pa.RecordBatch.from_arrays(list(columns), names=names) for columns in passed), relation
        )
        first = next(batches, None)
        if first is None:
            return
        with self.lookup.running(relation, self._numbered(first).schema) as join:
            for batch in itertools.chain([first], batches):
                yield from self._answers(join, batch, relation)

    def _numbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch as the join gets it, with the numbers of its tuples."""
        numbers = pa.array(np.arange(batch.num_rows), pa.int64())
        return self.lookup.recipe.stream_batch(batch.append_column(self.row, numbers))

    def _answers(self, join: LookupJoin, batch: pa.RecordBatch, relation: Relation) -> Iterator[pa.Array]:
        """One list per tuple of a batch, in order."""
        reports = self.lookup.reports_metrics
        most_bytes = self.lookup.task_budget().total_bytes // _LIST_SHARE
        # A wide row that is held would be one more than the join accounts for: only where there may be several.
        is_single = relation.is_unique_key or relation.stats.is_unique or self.lookup.recipe.how in ("semi", "anti")
        lists = RowLists(self.returned, batch.num_rows, most_bytes, keeps_last=reports, is_single=is_single)
        before = {name: getattr(join.metrics, name) for name in COUNTERS}
        for result in join.offer(self._numbered(batch)):
            rows = result.column(self.row).to_numpy()
            yield from lists.add(rows, self._elements(self.lookup.recipe.output_batch(result)))
        counters = None
        if reports:
            counters = {name: getattr(join.metrics, name) - count for name, count in before.items()}
            counters["relation_version"] = relation.version
        yield from lists.finish(None if counters is None else self._counted(counters))

    def _elements(self, results: pa.RecordBatch) -> pa.StructArray:
        """The relation's part of results, with NULLs in the columns of other purposes."""
        element = self.returned.value_type
        columns = results.columns[1:]
        fields = [element.field(number) for number in range(element.num_fields)]
        for number, field in enumerate(fields):
            if number >= len(columns):
                columns.append(pa.nulls(results.num_rows, field.type))
            elif columns[number].type != field.type:
                # The same values in another representation, such as strings with 64-bit offsets.
                columns[number] = columns[number].cast(field.type)
        return pa.StructArray.from_arrays(columns, fields=fields)

    def _counted(self, counters: Mapping[str, int]) -> pa.StructArray:
        """The element that reports what a batch of lookups did."""
        return pa.array([{METRICS_COLUMN: dict(counters)}], self.returned.value_type)


class RowLists:
    """Turns results that come in the order of their tuples into one list per tuple, which may be empty.

    The results of a tuple are in one batch, or alone in several: then they are held until the next tuple's arrive.

    Parameters
    ----------
    kind
        The type of the lists.
    rows
        The number of tuples.
    most_bytes
        The maximum size of a list that is held.
    keeps_last
        Whether the list of the last tuple gets an additional element at the end.
    is_single
        Whether a tuple has at most one result; then only the last tuple's can be held.

    Examples
    --------
    >>> lists = RowLists(pa.list_(pa.int64()), rows=4, most_bytes=1000)
    >>> [given.to_pylist() for given in lists.add(np.array([0, 2, 2]), pa.array([5, 6, 7]))]
    [[[5], [], [6, 7]]]
    >>> [given.to_pylist() for given in lists.finish()]
    [[[]]]
    """

    def __init__(
        self, kind: pa.ListType, rows: int, most_bytes: int, keeps_last: bool = False, is_single: bool = False
    ) -> None:
        self._kind, self._rows, self._most_bytes = kind, rows, most_bytes
        self._keeps_last, self._is_single = keeps_last, is_single
        self._next = 0  # the first tuple without a list
        self._held: list[pa.Array] = []  # results of the tuple `_held_row`, which may have more
        self._held_row = -1

    def add(self, rows: Int64Array, elements: pa.Array) -> Iterator[pa.Array]:
        """Take results with the numbers of their tuples, ascending; returns the lists that are complete."""
        if rows.size == 0:
            return
        first, last = int(rows[0]), int(rows[-1])
        if self._held and first != self._held_row:
            yield from self._release()
        if first < self._next:
            raise InternalError(f"results of tuple {first} came after those of tuple {self._next - 1}.")
        cut = int(rows.size)
        if (first == last and not self._is_single) or (self._keeps_last and last == self._rows - 1):
            cut = int(np.searchsorted(rows, last))
        if cut:
            yield self._lists(rows[:cut], elements.slice(0, cut), int(rows[cut - 1]) + 1)
        if cut < rows.size:
            self._hold(last, elements.slice(cut))

    def finish(self, last: pa.Array | None = None) -> Iterator[pa.Array]:
        """The lists of all other tuples; the element `last` is added to the last list."""
        parts, rows = list(self._held), [self._held_row] * sum(map(len, self._held))
        if last is not None:
            parts, rows = [*parts, last], [*rows, self._rows - 1]
        if self._next < self._rows:
            elements = _joined(parts) if parts else pa.nulls(0, self._kind.value_type)
            yield self._lists(np.array(rows, np.int64), elements, self._rows)
        self._held = []

    def _hold(self, row: int, elements: pa.Array) -> None:
        self._held_row = row
        self._held.append(elements)
        held_bytes = sum(int(part.nbytes) for part in self._held)
        if len(self._held) > 1 and held_bytes > self._most_bytes:
            raise BudgetError(
                f"One tuple matches rows of {format_bytes(held_bytes)}: more of them than there were when the query "
                "was planned, and more than a task can hold at once.",
                hint="Start the query again: it is then planned for this version of the relation.",
            )

    def _release(self) -> Iterator[pa.Array]:
        """The lists up to the tuple whose results were held."""
        elements, self._held = _joined(self._held), []
        yield self._lists(np.full(len(elements), self._held_row), elements, self._held_row + 1)

    def _lists(self, rows: Int64Array, elements: pa.Array, stop: int) -> pa.Array:
        """The lists of the tuples from `_next` to `stop`, of elements that belong to these tuples."""
        counts = np.bincount(rows - self._next, minlength=stop - self._next)
        offsets = np.zeros(counts.size + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        self._next = stop
        return pa.ListArray.from_arrays(pa.array(offsets), elements, type=self._kind)


def _joined(parts: Sequence[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
