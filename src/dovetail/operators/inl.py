"""Index nested loops: every stream tuple is looked up by itself. The papers' baseline, honestly built.

What it computes
    The exact join of every offered tuple, by equality of keys with or without a residual condition; all join types.
How
    The sparse index tells the few pages where a tuple's matches can be; they are read through a buffer pool that gets
    the budget, least recently used pages leaving first. One tuple after the other: nothing is shared between tuples but
    the pool. That is the algorithm, so its cost per tuple is that of a random read whenever the pool misses.
Memory
    The resident index, the pool, one page on its way in, one batch of matches and one of output.
What is emitted when
    Everything at once, in stream order, so ``ordered`` costs nothing. No tuple ever waits.
What a restart keeps
    Counters. The pool is only a cache and starts empty.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.operators.base import SemiStreamOperator
from dovetail.operators.memory_plan import MemoryPlan, plan_memory
from dovetail.operators.output import BatchRows, OutputPlan, record_batch
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import copy_of

__all__ = ["IndexNestedLoopJoin"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FEWEST_MATCHES = 16
_PAGE_ROWS = 128  # with the papers' 120-byte rows one page of a B+-tree of 16 KiB pages


@dataclass
class _Page:
    codes: Int64Array
    rows: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes) + self.codes.nbytes


@dataclass
class _Group:
    """The candidates of consecutive rows of a batch: relation rows, and the batch row that each belongs to."""

    first: int
    parts: list[pa.RecordBatch] = field(default_factory=list)
    owners: list[Int64Array] = field(default_factory=list)
    nbytes: int = 0
    num_rows: int = 0

    def add(self, row: int, candidates: list[pa.RecordBatch]) -> None:
        for batch in candidates:
            self.parts.append(batch)
            self.owners.append(np.full(batch.num_rows, row, np.int64))
            self.nbytes += int(batch.nbytes)
            self.num_rows += batch.num_rows

    def joined(self, schema: pa.Schema) -> tuple[pa.RecordBatch, Int64Array]:
        if not self.parts:
            return record_batch([pa.array([], f.type) for f in schema], schema, 0), np.empty(0, np.int64)
        return pa.concat_batches(self.parts), np.concatenate(self.owners)


class IndexNestedLoopJoin(SemiStreamOperator):
    """Join a stream with a relation by one index lookup per tuple.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.operators.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = IndexNestedLoopJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> [row for batch in join.offer(stream) for row in batch.to_pylist()]
    [{'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}, {'id': 7, 'city': None}]
    """

    kind = "index_nested_loop"

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._ledger.reserve("index", spec.shard.index_bytes)
        self._matches_account = self._ledger.reserve("matches")
        self._pool_account = self._ledger.reserve("pool")
        self._pool: OrderedDict[int, _Page] = OrderedDict()

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        # Besides the page on its way there is one in the pool, and matches wait beside the output made of them.
        paged = replace(spec, block_rows=spec.block_rows or _PAGE_ROWS)
        index_bytes, page_bytes = spec.shard.index_bytes, int(paged.block_rows or 0) * (int(spec.shard.row_bytes) + 9)
        matches_bytes = _FEWEST_MATCHES * int(OutputPlan(spec).row_bytes + 1)
        other_bytes = index_bytes + page_bytes + matches_bytes
        return plan_memory(paged, who=self.kind, has_window=False, other_bytes=other_bytes)

    def _select_waiting(self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray) -> Int64Array:
        return np.empty(0, np.int64)

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        yield from ()

    def _replan(self, spec: JoinSpec) -> None:
        self._plan_memory(spec)  # refuses before the pool is given up
        self._pool.clear()
        self._pool_account.resize(0)
        super()._replan(spec)

    # ---------------------------------------------------------------- the loop

    def _take_in(
        self, part: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, waiting: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """For each stream tuple: look it up, and put out what was found, many tuples to a batch."""
        group = _Group(first=0)
        for row, ranges in enumerate(self._locate(codes, is_null)):
            self.metrics.lookups += not is_null[row]
            mine: list[pa.RecordBatch] = []
            for candidates in self._candidates(int(codes[row]), ranges):
                mine.append(candidates)
                if sum(part.num_rows for part in mine) > self.results.max_rows:
                    break
            count = sum(batch.num_rows for batch in mine)
            if group.num_rows + count > self.results.max_rows or row - group.first >= self.results.max_rows:
                yield from self._put_out(part, is_null, group, row)
                group = _Group(first=row)
            if count > self.results.max_rows:
                del mine
                yield from self._put_out_alone(part, row, int(codes[row]), ranges)
                group = _Group(first=row + 1)
                continue
            group.add(row, mine)
            self._matches_account.resize(group.nbytes)
        yield from self._put_out(part, is_null, group, part.num_rows)

    def _locate(self, codes: Int64Array, is_null: BoolArray) -> Iterator[list[tuple[int, int]]]:
        """For each row the ranges of positions where its matches can be, from the resident index."""
        keyed = np.flatnonzero(~is_null)
        queries, starts, stops = self.spec.shard.locate(codes[keyed])
        bounds = np.searchsorted(keyed[queries], np.arange(codes.size + 1)).tolist()
        ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
        for row in range(codes.size):
            yield ranges[bounds[row] : bounds[row + 1]]

    def _candidates(self, code: int, ranges: list[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        """The relation rows of a code, page by page."""
        rows = self.block_rows
        numbers = {number for start, stop in ranges for number in range(start // rows, -(-stop // rows))}
        for number in sorted(numbers):
            page = self._page(number)
            matches = np.flatnonzero(page.codes == code)
            if matches.size:
                yield page.rows.take(pa.array(matches))

    # ---------------------------------------------------------------- the pool

    def _page(self, number: int) -> _Page:
        page = self._pool.get(number)
        if page is not None:
            self._pool.move_to_end(number)
            return page
        block, size_bytes = self._read(number * self.block_rows, self.block_rows)
        # What the batch of matches and the batch of output may take stays free.
        kept_bytes = 2 * self.results.output_bytes - self._matches_account.held_bytes
        while self._pool and self._ledger.free_bytes - kept_bytes < size_bytes:
            self._pool_account.shrink(self._pool.popitem(last=False)[1].nbytes)
        columns = [copy_of(column) for column in block.rows.columns]
        page = _Page(block.codes.copy(), record_batch(columns, block.rows.schema, block.rows.num_rows))
        self._pool_account.grow(page.nbytes)
        self._pool[number] = page
        return page

    # ---------------------------------------------------------------- putting out

    def _put_out(self, part: pa.RecordBatch, is_null: BoolArray, group: _Group, stop: int) -> Iterator[pa.RecordBatch]:
        """Put out the rows from the group's first up to ``stop``, in order; if a condition raises, nothing changes."""
        rows = np.arange(group.first, stop)
        relation, owners = group.joined(self.spec.shard.schema)
        side = BatchRows(part)
        pairs = np.arange(owners.size)
        if self.results.plan.verifies and owners.size:
            pairs = np.flatnonzero(self.results.plan.verify(side, owners, relation, pairs))
            self.metrics.pairs_rejected += owners.size - pairs.size
        owners = owners[pairs]
        has_match = np.zeros(part.num_rows, np.bool_)
        has_match[owners] = True
        tickets = self._count_in(part, is_null, rows, int(np.count_nonzero(has_match)))
        if self.spec.how in ("semi", "anti"):
            given = rows[has_match[rows] == (self.spec.how == "semi")]
            yield from self.results.give_tuples(side, given, tickets[given])
        elif self.spec.how == "left":
            unmatched = rows[~has_match[rows]]
            all_rows = np.concatenate([owners, unmatched])
            order = np.argsort(all_rows, kind="stable")
            numbers = np.concatenate([pairs, np.full(unmatched.size, -1, np.int64)])[order]
            given = all_rows[order]
            yield from self.results.give_pairs(side, given, relation, numbers, tickets[given], is_pinned=True)
        else:
            yield from self.results.give_pairs(side, owners, relation, pairs, tickets[owners], is_pinned=True)
        self._matches_account.resize(0)

    def _put_out_alone(
        self, part: pa.RecordBatch, row: int, code: int, ranges: list[tuple[int, int]]
    ) -> Iterator[pa.RecordBatch]:
        """Put out one tuple with more candidates than fit a batch, page by page."""
        side = BatchRows(part)
        # Everything is asked of the condition before anything is put out: it may raise.
        matches = sum(self._verified(side, row, page).size for page in self._candidates(code, ranges))
        no_nulls = np.zeros(part.num_rows, np.bool_)
        tickets = self._count_in(part, no_nulls, np.array([row]), min(1, matches))
        one = np.array([row])
        if self.spec.how in ("semi", "anti"):
            if (matches > 0) == (self.spec.how == "semi"):
                yield from self.results.give_tuples(side, one, tickets[one])
            return
        if matches == 0:
            if self.spec.how == "left":
                yield from self.results.give_tuples(side, one, tickets[one])
            return
        for page in self._candidates(code, ranges):
            rows = self._verified(side, row, page)
            owners = np.full(rows.size, row, np.int64)
            yield from self.results.give_pairs(side, owners, page, rows, tickets[owners], is_pinned=True)

    def _verified(self, side: BatchRows, row: int, candidates: pa.RecordBatch) -> Int64Array:
        rows = np.arange(candidates.num_rows)
        if not self.results.plan.verifies:
            return rows
        owners = np.full(rows.size, row, np.int64)
        return np.flatnonzero(self.results.plan.verify(side, owners, candidates, rows))

    def _count_in(self, part: pa.RecordBatch, is_null: BoolArray, rows: Int64Array, matched: int) -> Int64Array:
        """Count rows as accepted and gone, and give the tickets of all rows of the part."""
        self.metrics.stream_tuples_in += rows.size
        self.metrics.null_key_tuples += int(np.count_nonzero(is_null[rows]))
        self.metrics.matched_tuples += matched
        self.metrics.unmatched_tuples += rows.size - matched
        self._arrivals += rows.size
        first_of_part = self._arrivals - (int(rows[-1]) + 1 if rows.size else 0)
        return np.arange(first_of_part, first_of_part + part.num_rows, dtype=np.int64)
