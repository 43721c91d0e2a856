"""The middle of every semi-stream join: the window, the account of memory, joining a block, letting tuples leave.

`JoinCore` knows nothing of how tuples come in or of when which block is read; `SemiStreamOperator` adds the first, an
operator's own file the second.
"""

import time
from collections.abc import Generator, Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError, PlanError
from dovetail.memory import Budget, Ledger, Reservation, format_bytes
from dovetail.metrics import OperatorMetrics
from dovetail.operators.matching import matcher_for
from dovetail.operators.memory_plan import MemoryPlan, plan_memory
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.results import Results
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import Positions, TupleStore, is_fixed_width
from dovetail.operators.window import StreamWindow

__all__ = ["JoinCore"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_CHUNKS_BESIDES = 2  # a cycle may begin and end in the middle of a block
_PAGED_DRIFT = 1.5  # how much tuples may grow or shrink before an empty window is measured anew


class JoinCore:
    """Window, memory and output of one operator."""

    kind: ClassVar[str]
    needs_equality: ClassVar[bool] = True

    def __init__(self, spec: JoinSpec) -> None:
        if self.needs_equality and not spec.has_equality:
            raise PlanError(
                f"{self.kind} joins on equal keys only.", hint="Use mesh for a condition without equality, or pass on=."
            )
        self.spec = spec
        self.metrics = OperatorMetrics()
        self._stream_columns = spec.stream_columns
        self._has_paged_columns = any(not is_fixed_width(column.type) for column in self._stream_columns)
        self._paged_bytes = float(TupleStore.guess_paged_bytes(self._stream_columns))
        self._matcher = matcher_for(spec)
        self._shedding = None if spec.shed is None else spec.shed.start()
        self._memory = self._plan_memory(spec)
        self._ledger = Ledger(spec.budget)
        self._block_account = self._ledger.reserve("block", self._memory.block_bytes)
        self._window_account = self._ledger.reserve("window")
        self.results = Results(spec, self._ledger, self.metrics, self._memory.output_rows, self._memory.output_bytes)
        self.results.give_up_extras = self._give_up_extras
        if self._shedding is not None:
            self._ledger.reserve("shedding", self._shedding.nbytes)
        self._window: StreamWindow | None = None
        self._pairs_done = 0

    # ================================================================ memory

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        """Divide the budget."""
        return plan_memory(spec, who=self.kind, bytes_per_tuple=self._matcher.bytes_per_tuple)

    @property
    def budget(self) -> Budget:
        """The most bytes that may be held."""
        return self._ledger.budget

    @property
    def block_rows(self) -> int:
        """b: the relation rows of a disk step."""
        return self._memory.block_rows

    @property
    def window_capacity(self) -> int:
        """The most stream tuples that can wait within the budget."""
        return self._capacity_for(self._paged_bytes, self._memory) if self._window is None else self._window.capacity

    @property
    def pending(self) -> int:
        """Stream tuples that were accepted and still wait."""
        return 0 if self._window is None else len(self._window)

    @property
    def oldest(self) -> int | None:
        """How many tuples had been offered before the oldest that waits (at most so many); None if none does."""
        return self._window.chunks.oldest.first_arrival if self._window is not None and self.pending else None

    def size(self) -> int:
        """Bytes held now; never above the budget."""
        return self._ledger.held_bytes

    def sizes(self) -> dict[str, int]:
        """Bytes held per component; the sum is `size`."""
        return self._ledger.by_component()

    def _capacity_for(self, paged_bytes: float, memory: MemoryPlan) -> int:
        """The window's capacity when tuples have so many paged bytes each."""
        per_tuple = paged_bytes + self._matcher.bytes_per_tuple
        if self.spec.ordered and self.spec.how in ("inner", "left"):
            # One result held per tuple; when there are more, the youngest tuples' are discarded and found again.
            per_tuple += self.results.plan.row_bytes + 8
        return StreamWindow.capacity_within(
            self._stream_columns, memory.window_bytes, per_tuple, self.spec.ordered, self._max_chunks(memory)
        )

    def _max_chunks(self, memory: MemoryPlan) -> int:
        """How many chunks there can be: one for each step of a cycle."""
        return -(-self.spec.shard.num_rows // memory.block_rows) + _CHUNKS_BESIDES

    def _window_for(self, part: pa.RecordBatch) -> StreamWindow:
        """The window; made when the first tuples show how long they are, and anew when it is empty and they differ."""
        if self._window is not None and (len(self._window) or not self._has_paged_columns):
            return self._window
        if self._has_paged_columns and part.num_rows:
            paged = sum(int(c.nbytes) for c in part.columns if not is_fixed_width(c.type)) / part.num_rows
            is_alike = paged / _PAGED_DRIFT <= self._paged_bytes <= paged * _PAGED_DRIFT
            if self._window is not None and is_alike:
                return self._window
            self._paged_bytes = paged
        self._replace_window(None)
        capacity = max(1, self._capacity_for(self._paged_bytes, self._memory))
        self._replace_window(
            StreamWindow(self._stream_columns, capacity, self.spec.ordered, self._max_chunks(self._memory))
        )
        assert self._window is not None
        return self._window

    def _replace_window(self, window: StreamWindow | None) -> None:
        self._window_account.resize(0 if window is None else window.nbytes)
        self._window = window
        self._matcher = matcher_for(self.spec)

    def _account_window(self) -> None:
        """Tidy up the window and bring its account up to date."""
        if self._window is not None:
            if self._has_paged_columns:
                self._window.tidy(self._ledger.free_bytes)
            self._window_account.resize(self._window.nbytes + self._matcher.nbytes)

    def _try_resize(self, account: Reservation, size_bytes: int) -> bool:
        """Let a component hold so much if there is room, for what can also be done without."""
        if not self._ledger.has_room_for(size_bytes - account.held_bytes):
            return False
        account.resize(size_bytes)
        return True

    def _replan(self, spec: JoinSpec) -> None:
        """Divide another budget, or the same one otherwise; if what is held does not fit, refuse and change nothing."""
        memory = self._plan_memory(spec)
        capacity, window_bytes = 0, 0
        if self._window is not None:
            capacity = max(1, self._capacity_for(self._paged_bytes, memory))
            self._require_fits(spec, memory, len(self._window), capacity)
            window_bytes = self._window.nbytes_at(capacity, self._max_chunks(memory)) + self._matcher.nbytes
        needed = memory.block_bytes + window_bytes + self._other_bytes()
        if needed > spec.budget.total_bytes:
            raise self._too_small(spec, needed)
        self._window_account.resize(0)
        self._block_account.resize(0)
        self._ledger.resize(spec.budget)
        self._block_account.resize(memory.block_bytes)
        if self._window is not None:
            self._window.resize(capacity, self._max_chunks(memory))
        self._matcher = matcher_for(spec)
        self._window_account.resize(0 if self._window is None else self._window.nbytes)
        self._memory = memory
        self.results.max_rows, self.results.output_bytes = memory.output_rows, memory.output_bytes
        self.spec = spec

    def _other_bytes(self, *but: str) -> int:
        """Bytes held by components besides block, window, output on its way, and those named."""
        left_out = {"block", "window", "output", *but}
        return sum(held for name, held in self._ledger.by_component().items() if name not in left_out)

    def _require_fits(self, spec: JoinSpec, memory: MemoryPlan, tuples: int, capacity: int) -> None:
        if tuples > capacity:
            window_bytes = StreamWindow.bytes_for(self._stream_columns, tuples, spec.ordered)
            needed = spec.budget.total_bytes - memory.window_bytes + window_bytes + int(tuples * self._paged_bytes)
            raise self._too_small(spec, max(needed, spec.budget.total_bytes + 1))

    def _too_small(self, spec: JoinSpec, needed: int) -> BudgetError:
        return BudgetError(
            f"A budget of {spec.budget.total_bytes} bytes is too small for what {self.kind} holds: {self.pending} "
            f"waiting tuples and what belongs to them need about {needed} bytes ({format_bytes(needed)}).",
            hint="Let tuples leave first, or choose a larger budget or smaller blocks.",
            minimum_bytes=needed,
        )

    # ================================================================ reading and joining

    def _read_block(self, start: int, rows: int) -> RelationBlock:
        """Read rows of the relation; fewer where they turn out so large that they do not fit."""
        block, size_bytes = self._read(start, rows)
        is_view = block.stop - start <= self._rows_in_place(start)
        wanted_bytes = max(0 if is_view else size_bytes, self._memory.block_bytes)
        extra_bytes = wanted_bytes - self._block_account.held_bytes
        # A block that is joined in part had that room; a shorter one would count other pairs, and results would be lost
        # or repeated.
        output_bytes = 0 if self._pairs_done else self._output_room(block, size_bytes)
        if extra_bytes + output_bytes > self._ledger.free_bytes:
            if rows > 1 and not self._pairs_done:
                return self._read_block(start, rows // 2)
            if extra_bytes > 0:
                self._give_up_extras()
            if self._pairs_done and extra_bytes > self._ledger.free_bytes:
                needed = self._ledger.held_bytes + extra_bytes
                raise BudgetError(
                    f"The block whose join was interrupted does not fit any more: {needed} bytes "
                    f"({format_bytes(needed)}) are needed, the budget has {self.budget.total_bytes}.",
                    hint="Enlarge the budget with resize_budget, then go on with step.",
                    minimum_bytes=needed,
                )
        self._block_account.resize(wanted_bytes)
        return block

    def _reads_in_place(self, spec: JoinSpec) -> bool:
        """Whether blocks are views of mapped pages, which are not memory of this process."""
        return False

    def _rows_in_place(self, start: int) -> int:
        """How many rows can be read from here on without a copy; 0 where blocks are copied anyway."""
        return self.spec.shard.rows_in_place(start) if self._reads_in_place(self.spec) else 0

    def _output_room(self, block: RelationBlock, size_bytes: int) -> int:
        """What must stay free for output: as planned, and at least two of the block's rows, however long they are."""
        if size_bytes <= self._memory.read_bytes:
            return 0
        return max(self._memory.output_bytes, 2 * size_bytes // max(1, block.stop - block.start))

    def _planned_bytes(self) -> int:
        """Bytes that components besides window and output may come to hold, and do not hold yet."""
        return 0

    def _give_up_extras(self) -> bool:
        """Let go of memory that results do not depend on, where tuples need it; False if there is none."""
        return False

    def _read(self, start: int, rows: int) -> tuple[RelationBlock, int]:
        """Read rows of the relation, count what that took, and give their bytes, too, which are not free to tell."""
        if not self._pairs_done:
            # One that was interrupted is as long as it was, also if it was read otherwise then.
            rows = min(rows, self._rows_in_place(start) or rows)
        began = time.perf_counter()
        block = self.spec.shard.read_block(start, rows)
        self.metrics.disk_seconds += time.perf_counter() - began
        self.metrics.blocks_read += 1
        self.metrics.relation_rows_read += block.stop - block.start
        size_bytes = block.nbytes
        self.metrics.bytes_read += size_bytes
        return block, size_bytes

    def _join_block(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        """Join a block with everything that waits.

        Progress is kept in `_pairs_done`, so that a block whose join was interrupted, by an error or by giving up the
        iterator, can be joined again without repeating a result. The caller sets it to 0 when it has moved on.
        """
        window = self._window
        assert window is not None
        leaves_at_match = self.spec.how in ("semi", "anti") and not self.spec.ordered
        if leaves_at_match:
            window.clear_matches()
        leaving: list[Int64Array] = []
        seen = 0
        for rows, positions in self._matcher.pairs(block, window, self.results.max_rows):
            done, first, seen = max(0, self._pairs_done - seen), seen, seen + rows.size
            if done >= rows.size:
                continue
            rows, positions = rows[done:], positions[done:]
            kept = self._matches(block, rows, positions)
            if kept is not None:
                rows, positions = rows[kept], positions[kept]
            if self._shedding is not None:
                self._shedding.observe(window.codes_at(positions))
            if leaves_at_match:
                positions = np.unique(np.asarray(positions, np.int64))
                leaving.append(positions[~window.is_matched_at(positions)])
            window.mark_matched(positions)
            if self.spec.how in ("inner", "left"):
                yield from self._give_joined(block, rows, positions, kept, first + done)
                self._pairs_done = seen
        if leaving:
            yield from self._leave(np.concatenate(leaving))

    def _matches(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        """Which candidate pairs are matches; None if all are."""
        plan = self.results.plan
        if not plan.verifies:
            return None
        assert self._window is not None
        kept = np.flatnonzero(plan.verify(self._window, positions, block.rows, rows))
        self.metrics.pairs_rejected += int(rows.size - kept.size)
        return kept

    def _give_joined(
        self, block: RelationBlock, rows: Positions, positions: Positions, kept: Int64Array | None, first: int
    ) -> Iterator[pa.RecordBatch]:
        """Put out matches, the candidate with number ``first`` being the first that was looked at."""
        window = self._window
        assert window is not None

        def on_progress(done: int) -> None:
            self._pairs_done = first + (done if kept is None else int(kept[done - 1]) + 1)

        tickets = window.tickets_at(positions) if self.spec.ordered else None
        yield from self.results.give_pairs(window, positions, block.rows, rows, tickets, on_progress)

    # ================================================================ leaving
    # What is put out for tuples that leave is made first; then as many leave as it holds, and then it is handed out. So
    # whoever gives up finds the others still waiting, to leave at the next step.

    def _leave_oldest(self, count: int) -> Iterator[pa.RecordBatch]:
        """Let the oldest tuples leave, which have met every row: put out what their join type asks for."""
        assert self._window is not None
        if self.spec.how == "inner":
            # Nothing is put out for them, so they may all go together.
            self._forget_left(self._window.take_oldest(count))
            yield from self.results.release()
            return
        while count:
            positions = self._window.oldest_positions(min(count, self.results.max_rows))
            count -= yield from self._leave_together(positions, is_oldest=True)

    def _leave(self, positions: Positions) -> Iterator[pa.RecordBatch]:
        """Let tuples leave from the middle, which need meet no further row. Each position once.

        Not for ordered output, where tuples leave by age.
        """
        if self.spec.how == "inner":
            self._let_go(positions)
            return
        start = 0
        while start < positions.size:
            start += yield from self._leave_together(positions[start : start + self.results.max_rows])

    def _leave_codes(self, codes: Int64Array) -> Iterator[pa.RecordBatch]:
        """Let all tuples of some codes leave, which need meet no further row. Not for ordered output."""
        assert self._window is not None
        if self.spec.how == "inner":
            # Nothing is put out for them, so they may all go together.
            self._forget_left(self._window.take_codes(codes))
            return
        while codes.size:
            _, positions, _ = self._window.probe(codes, None, self.results.max_rows)
            if positions.size == 0:
                return
            yield from self._leave(positions)

    def _leave_together(self, positions: Positions, is_oldest: bool = False) -> Generator[pa.RecordBatch, None, int]:
        """Let the first of these tuples leave, as many as one batch of output holds, and tell how many."""
        window, results = self._window, self.results
        assert window is not None
        wanted = np.flatnonzero(self._is_put_out(window.is_matched_at(positions)))
        if wanted.size == 0:
            self._let_go(positions, is_oldest)
            yield from results.release()
            return int(positions.size)
        given = positions[wanted]
        stop, batch, size_bytes = results.fit(
            given.size, lambda start, stop: results.plan.unmatched(window, given[start:stop])
        )
        if not self.spec.ordered:
            left = int(wanted[stop]) if stop < wanted.size else int(positions.size)
            results.reserve(size_bytes)
            self._let_go(positions[:left], is_oldest)
            yield from results.hand_out(batch, size_bytes)
            return left
        return (yield from self._leave_in_order(positions, wanted, batch, size_bytes))

    def _leave_in_order(
        self, positions: Positions, wanted: Int64Array, batch: pa.RecordBatch, size_bytes: int
    ) -> Generator[pa.RecordBatch, None, int]:
        """Let the oldest tuples leave, of which the first wanted ones make the batch; results held go in between."""
        window, results = self._window, self.results
        assert window is not None
        tickets = window.tickets_at(positions[wanted[: batch.num_rows]])
        first_held = results.held.first_ticket()
        if first_held is None or first_held > tickets[-1]:
            left = int(wanted[batch.num_rows - 1]) + 1
            results.reserve(size_bytes)
            self._let_go(positions[:left], is_oldest=True)
            yield from results.hand_out(batch, size_bytes)
        elif results.has_room_to_hold(batch, tickets):
            left = int(wanted[batch.num_rows - 1]) + 1
            results.hold(batch, tickets)
            self._let_go(positions[:left], is_oldest=True)
        elif wanted[0] > 0 or first_held <= tickets[0]:
            # Results of those before them come first.
            left = int(wanted[0])
            self._let_go(positions[:left], is_oldest=True)
        else:
            run = int(np.searchsorted(tickets, first_held))
            left = int(wanted[run - 1]) + 1
            first = batch.slice(0, run)
            results.reserve(size_bytes)
            self._let_go(positions[:left], is_oldest=True)
            yield from results.hand_out(first, size_bytes)
        yield from results.release()
        return left

    def _is_put_out(self, is_matched: BoolArray) -> BoolArray:
        """Which tuples that leave are put out by themselves."""
        if self.spec.how in ("left", "anti"):
            return ~is_matched
        return is_matched if self.spec.how == "semi" else np.zeros(is_matched.size, np.bool_)

    def _let_go(self, positions: Positions, is_oldest: bool = False) -> None:
        """Take tuples out of the window, count them and forget them."""
        assert self._window is not None
        if is_oldest:
            self._window.take_oldest(positions.size)
        else:
            self._window.take(positions)
        self._forget_left(positions)

    def _forget_left(self, positions: Positions) -> None:
        """Count tuples that have just left the window and forget them."""
        window = self._window
        assert window is not None
        is_matched = window.is_matched_at(positions)
        matched = int(np.count_nonzero(is_matched))
        self.metrics.matched_tuples += matched
        self.metrics.unmatched_tuples += positions.size - matched
        self._note_left(positions, is_matched)
        window.forget(positions)
        self._window_account.resize(window.nbytes + self._matcher.nbytes)
        self._update_boundary()

    def _note_left(self, positions: Positions, is_matched: BoolArray) -> None:
        """Learn of tuples that have just left the window."""

    def _update_boundary(self) -> None:
        """Tell the results how far ordered output may go."""
        if self.spec.ordered:
            self.results.boundary = None if self._window is None else self._window.oldest_ticket
