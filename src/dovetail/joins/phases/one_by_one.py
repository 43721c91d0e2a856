"""Lookups one by one: every stream tuple is looked up by itself. The papers' baseline, index nested loops.

The sparse index gives the few pages where a tuple's matches can be; they are read through an LRU buffer pool that gets
the budget. Nothing is shared between tuples but the pool. That is the algorithm: a tuple costs a random read whenever
the pool misses.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.memory_plan import MemoryPlan, plan_memory
from dovetail.joins.output.columns import BatchRows, OutputPlan, record_batch
from dovetail.joins.output.emission import Candidates, emit_tuples
from dovetail.joins.phases.admission import NullKeys, Offered
from dovetail.joins.phases.alone import Alone
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.tuple_store import copy_of
from dovetail.relation.widths import row_widths, widest_row

__all__ = ["OneByOne", "plan_pages"]

_FEWEST_MATCHES = 16
# A page consists of a few small allocations and objects, and the pool has thousands of pages.
_PAGE_OBJECT_BYTES = 1_000
_COLUMN_OBJECT_BYTES = 350
_MOST_PARTS = 64  # candidates of this many tuples become one batch: a batch of one row takes kilobytes of objects
_PAGE_ROWS = 128  # with the papers' 120-byte rows, a 16 KiB page of a B+-tree


def plan_pages(who: str, spec: JoinSpec) -> MemoryPlan:
    """Divide a budget: beside the page in flight there is one in the pool, and matches beside their output."""
    paged = replace(spec, block_rows=spec.block_rows or _PAGE_ROWS)
    index_bytes, page_bytes = spec.shard.index_bytes, int(paged.block_rows or 0) * (int(spec.shard.row_bytes) + 9)
    page_bytes = _page_bytes(page_bytes, len(spec.shard.schema))
    matches_bytes = _FEWEST_MATCHES * int(OutputPlan(spec).row_bytes + 1)
    return plan_memory(paged, who=who, has_window=False, other_bytes=index_bytes + page_bytes + matches_bytes)


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
    """The allocated size: above 1 KiB an allocator rounds up to a quarter of a power of two."""
    step = max(64, 1 << max(0, size_bytes.bit_length() - 3))
    return -(-size_bytes // step) * step


def _page_bytes(row_bytes: int, columns: int) -> int:
    """Upper bound of the size of a page, given the bytes of its rows and codes."""
    return row_bytes + row_bytes // 4 + _PAGE_OBJECT_BYTES + (_COLUMN_OBJECT_BYTES + 3 * 64) * columns


@dataclass
class _Group:
    """The candidates of consecutive rows of a batch: relation rows, and the batch row of each."""

    first: int
    parts: list[pa.RecordBatch] = field(default_factory=list)
    owners: list[Int64Array] = field(default_factory=list)
    nbytes: int = 0
    num_rows: int = 0
    merged: int = 0  # the number of leading parts with many tuples each

    def add(self, row: int, candidates: list[pa.RecordBatch]) -> None:
        for batch in candidates:
            self.parts.append(batch)
            self.owners.append(np.full(batch.num_rows, row, np.int64))
            self.nbytes += int(batch.nbytes)
            self.num_rows += batch.num_rows
        if len(self.parts) - self.merged > _MOST_PARTS:
            self.parts[self.merged :] = [pa.concat_batches(self.parts[self.merged :])]
            self.owners[self.merged :] = [np.concatenate(self.owners[self.merged :])]
            self.merged += 1

    def joined(self, schema: pa.Schema) -> tuple[pa.RecordBatch, Int64Array]:
        if not self.parts:
            return record_batch([pa.array([], f.type) for f in schema], schema, 0), np.empty(0, np.int64)
        if len(self.parts) == 1:
            return self.parts[0], self.owners[0]
        return pa.concat_batches(self.parts), np.concatenate(self.owners)


class OneByOne:
    """Takes in tuples by one index lookup each; nothing waits but a tuple that is emitted in several batches."""

    def __init__(self, state: JoinState, blocks: BlockJoin) -> None:
        self.state, self._blocks = state, blocks
        self._front = NullKeys(state)
        state.ledger.reserve("index", state.spec.shard.index_bytes)
        self._matches_account = state.ledger.reserve("matches")
        self._pool_account = state.ledger.reserve("pool")
        self._pool: OrderedDict[int, _Page] = OrderedDict()
        self.alone = Alone(state, self._candidates_of, self._matches_account)

    def step(self) -> Iterator[pa.RecordBatch]:
        """Emit the rest of such a tuple."""
        yield from self.alone.finish()

    def deadline(self) -> int:
        """Nothing enters a window."""
        return 0

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        """`accept` itself starts with the unfinished tuple."""
        yield from ()

    def restart_after(self, ticket: int) -> None:
        """Nothing is held that could restart."""

    def clear(self) -> None:
        """Empty the pool."""
        self._pool.clear()
        self._pool_account.resize(0)

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """Its part of a snapshot; the pool starts empty."""
        return self.alone.save()

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        self.alone.load(tables, values)

    # ---------------------------------------------------------------- the loop

    def accept(self, offered: Offered, may_drop: bool = True) -> Iterator[pa.RecordBatch]:
        """Look up each stream tuple, and emit the results of many tuples per batch."""
        yield from self.alone.finish()
        start = 0
        try:
            while start < len(offered):
                stop = min(start + self._front.rows_together(), len(offered))
                start += yield from self._look_up(offered.part(start, stop))
        finally:
            self._matches_account.resize(self.alone.nbytes)

    def _look_up(self, part: Offered) -> Generator[pa.RecordBatch, None, int]:
        """Look up and emit the first rows of a part; returns how many."""
        state = self.state
        group, most, most_bytes = _Group(first=0), state.results.max_rows, state.results.output_bytes
        for row, ranges in enumerate(self._locate(part.codes, part.is_null)):
            state.metrics.lookups += not part.is_null[row]
            mine: list[pa.RecordBatch] = []
            count = size_bytes = 0
            for candidates in self._candidates(int(part.codes[row]), ranges):
                mine.append(candidates)
                count, size_bytes = count + candidates.num_rows, size_bytes + int(candidates.nbytes)
                if count > most or size_bytes > most_bytes:
                    break
            is_full = group.num_rows + count > most or group.nbytes + size_bytes > most_bytes
            if is_full or row - group.first >= most:
                reached = yield from self._emit(part, group, row)
                group = _Group(first=row)
                if reached < row:
                    del mine
                    yield from self.alone.emit(part, reached, self._count_one)
                    return reached + 1
            if count > most or size_bytes > most_bytes:
                del mine
                yield from self.alone.emit(part, row, self._count_one)
                return row + 1
            group.add(row, mine)
            self._matches_account.resize(group.nbytes)
        reached = yield from self._emit(part, group, len(part))
        if reached < len(part):
            yield from self.alone.emit(part, reached, self._count_one)
            reached += 1
        return reached

    def _locate(self, codes: Int64Array, is_null: BoolArray) -> Iterator[list[tuple[int, int]]]:
        """Per row, the position ranges of its possible matches, from the resident index."""
        state = self.state
        keyed = np.flatnonzero(~is_null)
        queries, starts, stops = state.spec.shard.locate(codes[keyed])
        bounds = np.searchsorted(keyed[queries], np.arange(codes.size + 1)).tolist()
        ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
        for row in range(codes.size):
            yield ranges[bounds[row] : bounds[row + 1]]

    def _candidates(self, code: int, ranges: list[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        """The relation rows of a code, page by page."""
        state = self.state
        rows = state.memory.block_rows
        numbers = {number for start, stop in ranges for number in range(start // rows, -(-stop // rows))}
        for number in sorted(numbers):
            for page in self._pages(number):
                matches = np.flatnonzero(page.codes == code)
                while matches.size:
                    some = self._rows_within(page, matches)
                    yield page.rows.take(pa.array(matches[:some]))
                    matches = matches[some:]

    def _rows_within(self, page: _Page, matches: Int64Array) -> int:
        """How many of the matches to take together, so that they and their output fit; at least one."""
        state = self.state
        if page.rows.num_columns == 0:
            return int(matches.size)
        widths = np.cumsum(row_widths(page.rows, matches))
        most_bytes = state.ledger.free_bytes // 2
        if int(widths[-1]) > most_bytes:
            state.results.require_room(2 * int(widths[0]))
        return max(1, int(np.searchsorted(widths, most_bytes, side="right")))

    # ---------------------------------------------------------------- the pool

    def _pages(self, number: int) -> Iterator[_Page]:
        """A page from the pool, or read into it; if it does not fit, smaller pages that bypass the pool."""
        state = self.state
        page = self._pool.get(number)
        if page is not None:
            self._pool.move_to_end(number)
            yield page
            return
        start, rows = number * state.memory.block_rows, state.memory.block_rows
        block, size_bytes = self._blocks.read_any(start, rows)
        size_bytes = _page_bytes(size_bytes, block.rows.num_columns)
        # Leave room for the batch of matches and the batch of output.
        kept_bytes = 2 * state.results.output_bytes - self._matches_account.held_bytes
        while self._pool and state.ledger.free_bytes - kept_bytes < size_bytes:
            self._pool_account.shrink(self._pool.popitem(last=False)[1].nbytes)
        if size_bytes > state.ledger.free_bytes:
            yield from self._small_pages(start, min(start + rows, state.spec.shard.num_rows))
            return
        columns = [copy_of(column) for column in block.rows.columns]
        page = _Page(block.codes.copy(), record_batch(columns, block.rows.schema, block.rows.num_rows))
        self._pool_account.grow(page.nbytes)
        self._pool[number] = page
        yield page

    def _small_pages(self, start: int, stop: int) -> Iterator[_Page]:
        """The rows of a page that does not fit, as many at a time as do; they are not kept."""
        state = self.state
        rows = max(1, (stop - start) // 2)
        while start < stop:
            block, size_bytes = self._blocks.read_any(start, min(rows, stop - start))
            if size_bytes > state.ledger.free_bytes and rows > 1:
                rows //= 2
                continue
            yield _Page(block.codes, block.rows)
            start = block.stop

    # ---------------------------------------------------------------- emitting

    def _emit(self, part: Offered, group: _Group, stop: int) -> Generator[pa.RecordBatch, None, int]:
        """Emit the rows from the group's first up to ``stop``; see `emit_tuples`."""
        state = self.state
        relation, owners = group.joined(state.spec.shard.schema)
        widest = widest_row(part.rows) + widest_row(relation)

        def require_room(row: int) -> None:
            if widest > state.ledger.free_bytes:
                state.results.require_room(int(row_widths(part.rows, np.array([row]))[0]))

        reached = yield from emit_tuples(
            state.spec,
            state.results,
            BatchRows(part.rows),
            None,
            group.first,
            stop,
            Candidates(relation, owners, np.arange(owners.size)),
            partial(self._count_in, part),
            widest=widest,
            require_room=require_room,
        )
        self._matches_account.resize(0)
        return reached

    def _count_in(self, part: Offered, start: int, stop: int, has_match: BoolArray) -> None:
        """Count rows of a part as accepted and finished."""
        state = self.state
        matched = int(np.count_nonzero(has_match[start:stop]))
        state.metrics.stream_tuples_in += stop - start
        state.metrics.null_key_tuples += int(np.count_nonzero(part.is_null[start:stop]))
        state.metrics.matched_tuples += matched
        state.metrics.unmatched_tuples += stop - start - matched
        state.arrivals += stop - start

    def _candidates_of(self, code: int) -> Iterator[pa.RecordBatch]:
        _, starts, stops = self.state.spec.shard.locate(np.array([code]))
        return self._candidates(code, list(zip(starts.tolist(), stops.tolist(), strict=True)))

    def _count_one(self, one: Offered, has_match: bool) -> None:
        self._count_in(one, 0, 1, np.array([has_match]))
