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
    Everything at once, in stream order, so ``ordered`` costs nothing. No tuple ever waits, but one whose matches are
    more than a batch is put out bit by bit: if the iterator is given up meanwhile, the next call goes on with it.
What a restart keeps
    Counters, and such a tuple. The pool is only a cache and starts empty.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.operators.admission import Offered
from dovetail.operators.base import SemiStreamOperator
from dovetail.operators.memory_plan import MemoryPlan, plan_memory
from dovetail.operators.output import BatchRows, OutputPlan, record_batch
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import copy_of

__all__ = ["IndexNestedLoopJoin"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FEWEST_MATCHES = 16
# A page is a few small allocations and as many small objects, and the pool has thousands of them.
_PAGE_OBJECT_BYTES = 1_000
_COLUMN_OBJECT_BYTES = 350
_PAGE_ROWS = 128  # with the papers' 120-byte rows one page of a B+-tree of 16 KiB pages


@dataclass
class _Page:
    codes: Int64Array
    rows: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        buffers = [buffer.size for column in self.rows.columns for buffer in column.buffers() if buffer is not None]
        held_bytes: int = sum(_allocated_bytes(int(size)) for size in [*buffers, self.codes.nbytes])
        return held_bytes + _PAGE_OBJECT_BYTES + _COLUMN_OBJECT_BYTES * int(self.rows.num_columns)


def _allocated_bytes(size_bytes: int) -> int:
    """What an allocator takes for so many bytes: a quarter of a power of two is its finest step above 1 KiB."""
    step = max(64, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step


def _page_bytes(row_bytes: int, columns: int) -> int:
    """At most what a page takes whose rows and codes have so many bytes."""
    return row_bytes + row_bytes // 4 + _PAGE_OBJECT_BYTES + (_COLUMN_OBJECT_BYTES + 3 * 64) * columns


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


@dataclass
class _Alone:
    """A tuple that is put out page by page.

    Attributes
    ----------
    row
        The tuple, in memory of its own.
    code, arrival
        Its code, and how many tuples had been offered before it.
    done
        How many of its matches were put out.
    """

    row: pa.RecordBatch
    code: int
    arrival: int
    done: int = 0


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
        self._alone: _Alone | None = None

    @property
    def pending(self) -> int:
        """Tuples that were accepted and are put out in part: one, or none."""
        return int(self._alone is not None)

    @property
    def oldest(self) -> int | None:
        """How many tuples had been offered before the one that is put out in part; None if none is."""
        return None if self._alone is None else self._alone.arrival

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        # Besides the page on its way there is one in the pool, and matches wait beside the output made of them.
        paged = replace(spec, block_rows=spec.block_rows or _PAGE_ROWS)
        index_bytes, page_bytes = spec.shard.index_bytes, int(paged.block_rows or 0) * (int(spec.shard.row_bytes) + 9)
        page_bytes = _page_bytes(page_bytes, len(spec.shard.schema))
        matches_bytes = _FEWEST_MATCHES * int(OutputPlan(spec).row_bytes + 1)
        other_bytes = index_bytes + page_bytes + matches_bytes
        return plan_memory(paged, who=self.kind, has_window=False, other_bytes=other_bytes)

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        yield from self._finish_alone()

    def _replan(self, spec: JoinSpec) -> None:
        self._plan_memory(spec)  # refuses before the pool is given up
        self._pool.clear()
        self._pool_account.resize(0)
        super()._replan(spec)

    # ---------------------------------------------------------------- the loop

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        """For each stream tuple: look it up, and put out what was found, many tuples to a batch."""
        yield from self._finish_alone()
        start = 0
        try:
            while start < len(offered):
                stop = min(start + self._admission_rows(), len(offered))
                start += yield from self._look_up(offered.part(start, stop))
        finally:
            self._matches_account.resize(0 if self._alone is None else int(self._alone.row.nbytes))

    def _look_up(self, part: Offered) -> Generator[pa.RecordBatch, None, int]:
        """Look up and put out the first rows of a part, and tell how many."""
        group, most, most_bytes = _Group(first=0), self.results.max_rows, self.results.output_bytes
        for row, ranges in enumerate(self._locate(part.codes, part.is_null)):
            self.metrics.lookups += not part.is_null[row]
            mine: list[pa.RecordBatch] = []
            count = size_bytes = 0
            for candidates in self._candidates(int(part.codes[row]), ranges):
                mine.append(candidates)
                count, size_bytes = count + candidates.num_rows, size_bytes + int(candidates.nbytes)
                if count > most or size_bytes > most_bytes:
                    break
            is_full = group.num_rows + count > most or group.nbytes + size_bytes > most_bytes
            if is_full or row - group.first >= most:
                reached = yield from self._put_out(part, group, row)
                group = _Group(first=row)
                if reached < row:
                    del mine
                    yield from self._put_out_alone(part, reached)
                    return reached + 1
            if count > most or size_bytes > most_bytes:
                del mine
                yield from self._put_out_alone(part, row)
                return row + 1
            group.add(row, mine)
            self._matches_account.resize(group.nbytes)
        reached = yield from self._put_out(part, group, len(part))
        if reached < len(part):
            yield from self._put_out_alone(part, reached)
            reached += 1
        return reached

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
            for page in self._pages(number):
                matches = np.flatnonzero(page.codes == code)
                if matches.size:
                    yield page.rows.take(pa.array(matches))

    # ---------------------------------------------------------------- the pool

    def _pages(self, number: int) -> Iterator[_Page]:
        """A page: out of the pool, or read into it; in smaller ones, and past the pool, where its rows are too long."""
        page = self._pool.get(number)
        if page is not None:
            self._pool.move_to_end(number)
            yield page
            return
        start, rows = number * self.block_rows, self.block_rows
        block, size_bytes = self._read(start, rows)
        size_bytes = _page_bytes(size_bytes, block.rows.num_columns)
        # What the batch of matches and the batch of output may take stays free.
        kept_bytes = 2 * self.results.output_bytes - self._matches_account.held_bytes
        while self._pool and self._ledger.free_bytes - kept_bytes < size_bytes:
            self._pool_account.shrink(self._pool.popitem(last=False)[1].nbytes)
        if size_bytes > self._ledger.free_bytes:
            yield from self._small_pages(start, min(start + rows, self.spec.shard.num_rows))
            return
        columns = [copy_of(column) for column in block.rows.columns]
        page = _Page(block.codes.copy(), record_batch(columns, block.rows.schema, block.rows.num_rows))
        self._pool_account.grow(page.nbytes)
        self._pool[number] = page
        yield page

    def _small_pages(self, start: int, stop: int) -> Iterator[_Page]:
        """The rows of a page that does not fit, as many at a time as do; they are looked at and not kept."""
        rows = max(1, (stop - start) // 2)
        while start < stop:
            block, size_bytes = self._read(start, min(rows, stop - start))
            if size_bytes > self._ledger.free_bytes and rows > 1:
                rows //= 2
                continue
            yield _Page(block.codes, block.rows)
            start = block.stop

    # ---------------------------------------------------------------- putting out

    def _put_out(self, part: Offered, group: _Group, stop: int) -> Generator[pa.RecordBatch, None, int]:
        """Put out the rows from the group's first up to ``stop``, in order; if a condition raises, nothing changes.

        Returns
        -------
        int
            Where it stopped: there, or before a row whose matches alone do not fit what is free.
        """
        relation, owners = group.joined(self.spec.shard.schema)
        side, plan = BatchRows(part.rows), self.results.plan
        pairs = np.arange(owners.size)
        if plan.verifies and owners.size:
            pairs = np.flatnonzero(plan.verify(side, owners, relation, pairs))
            self.metrics.pairs_rejected += owners.size - pairs.size
        owners = owners[pairs]
        has_match = np.zeros(len(part), np.bool_)
        has_match[owners] = True
        given, numbers = self._given(np.arange(group.first, stop), owners, pairs, has_match)

        def build(low: int, high: int) -> pa.RecordBatch:
            if numbers is None:
                return plan.unmatched(side, given[low:high])
            return plan.joined(side, given[low:high], relation, numbers[low:high])

        # A batch has all of what it gives for a tuple, and the tuples that it has count as accepted with it.
        row, start = group.first, 0
        while start < given.size:
            end, batch, size_bytes = self.results.fit(given.size, build, start)
            if end < given.size:
                end = int(np.searchsorted(given, given[end], side="left"))
                if end <= start:
                    self._count_in(part, row, int(given[start]), has_match)
                    row = int(given[start])
                    break
                batch = build(start, end)
                size_bytes = self.results.bytes_of(batch)
            next_row = int(given[end]) if end < given.size else stop
            self.results.reserve(size_bytes)
            self._count_in(part, row, next_row, has_match)
            yield from self.results.hand_out(batch, size_bytes)
            row, start = next_row, end
        if start == given.size:
            self._count_in(part, row, stop, has_match)
            row = stop
        self._matches_account.resize(0)
        return row

    def _given(
        self, rows: Int64Array, owners: Int64Array, pairs: Int64Array, has_match: BoolArray
    ) -> tuple[Int64Array, Int64Array | None]:
        """What is put out for rows: the row of each result, ascending, and the relation's row, -1 for none."""
        if self.spec.how in ("semi", "anti"):
            return rows[has_match[rows] == (self.spec.how == "semi")], None
        if self.spec.how == "inner":
            return owners, pairs
        unmatched = rows[~has_match[rows]]
        given = np.concatenate([owners, unmatched])
        order = np.argsort(given, kind="stable")
        return given[order], np.concatenate([pairs, np.full(unmatched.size, -1, np.int64)])[order]

    def _put_out_alone(self, part: Offered, row: int) -> Iterator[pa.RecordBatch]:
        """Put out one tuple with more matches than fit a batch, page by page."""
        one, code = part.part(row, row + 1), int(part.codes[row])
        side = BatchRows(one.rows)
        # Everything is asked of the condition before anything is put out: it may raise.
        matches = sum(self._verified(side, page).size for page in self._candidates_of(code))
        has_match = np.array([matches > 0])
        if self.spec.how in ("inner", "left") and matches:
            columns = [copy_of(column) for column in one.rows.columns]
            alone = _Alone(record_batch(columns, one.rows.schema, 1), code, self._arrivals)
            self._matches_account.resize(int(alone.row.nbytes))
            self._alone = alone
            self._arrivals += 1
            self.metrics.stream_tuples_in += 1
            yield from self._finish_alone()
            return
        if self.spec.how == "semi" or (self.spec.how in ("left", "anti") and not matches):
            given = self.spec.how != "semi" or matches > 0
            if given:
                batch = self.results.plan.unmatched(side, np.zeros(1, np.int64))
                size_bytes = self.results.bytes_of(batch)
                self.results.reserve(size_bytes)
                self._count_in(one, 0, 1, has_match)
                yield from self.results.hand_out(batch, size_bytes)
                return
        self._count_in(one, 0, 1, has_match)

    def _finish_alone(self) -> Iterator[pa.RecordBatch]:
        """Put out what is left of a tuple that is put out page by page."""
        alone = self._alone
        if alone is None:
            return
        side, seen = BatchRows(alone.row), 0
        for page in self._candidates_of(alone.code):
            rows = self._verified(side, page)
            first, seen = max(0, alone.done - seen), seen + rows.size
            if first >= rows.size:
                continue
            before = seen - rows.size

            def note(done: int, start: int = before + first) -> None:
                alone.done = start + done

            owners = np.zeros(rows.size - first, np.int64)
            tickets = owners + alone.arrival
            yield from self.results.give_pairs(side, owners, page, rows[first:], tickets, note)
        self.metrics.matched_tuples += 1
        self._alone = None
        self._matches_account.resize(0)

    def _candidates_of(self, code: int) -> Iterator[pa.RecordBatch]:
        _, starts, stops = self.spec.shard.locate(np.array([code]))
        return self._candidates(code, list(zip(starts.tolist(), stops.tolist(), strict=True)))

    def _verified(self, side: BatchRows, candidates: pa.RecordBatch) -> Int64Array:
        """Which candidates match the one row."""
        rows = np.arange(candidates.num_rows)
        if not self.results.plan.verifies:
            return rows
        owners = np.zeros(rows.size, np.int64)
        return np.flatnonzero(self.results.plan.verify(side, owners, candidates, rows))

    def _count_in(self, part: Offered, start: int, stop: int, has_match: BoolArray) -> None:
        """Count rows of a part as accepted and gone."""
        matched = int(np.count_nonzero(has_match[start:stop]))
        self.metrics.stream_tuples_in += stop - start
        self.metrics.null_key_tuples += int(np.count_nonzero(part.is_null[start:stop]))
        self.metrics.matched_tuples += matched
        self.metrics.unmatched_tuples += stop - start - matched
        self._arrivals += stop - start

    # ---------------------------------------------------------------- saving

    def _save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        alone = self._alone
        if alone is None:
            return {}, {"alone": None}
        values = {"code": alone.code, "arrival": alone.arrival, "done": alone.done}
        return {"alone": pa.Table.from_batches([alone.row])}, {"alone": values}

    def _load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        saved, alone = values["alone"], None
        if saved is not None:
            (row,) = tables["alone"].combine_chunks().to_batches()
            alone = _Alone(row.select(self._stream_columns.names), saved["code"], saved["arrival"], saved["done"])
        self._matches_account.resize(0 if alone is None else int(alone.row.nbytes))
        self._alone = alone
