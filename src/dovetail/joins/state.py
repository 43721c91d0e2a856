"""The state shared by the phases of one join: spec, memory, window, output and counters.

The phases are separate objects that hold a `JoinState`, and read and change it between two blocks or pieces. No phase
holds another phase's state. Everything that takes memory has an account in one ledger, so the budget binds for all of
them together.
"""

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget, Ledger, Reservation, format_bytes
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.matching import matcher_for
from dovetail.joins.memory_plan import MemoryPlan
from dovetail.joins.output.results import Results
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.joins.window.tuple_store import TupleStore, is_fixed_width

__all__ = ["Extras", "JoinState", "chunks_per_cycle"]

_CHUNKS_BESIDES = 2  # a cycle may start and end in the middle of a block
_PAGED_DRIFT = 1.5  # how much tuples may grow or shrink before an empty window is created anew


class Extras(Protocol):
    """A component with memory on which no result depends, such as a cache."""

    def planned_bytes(self) -> int:
        """Bytes that it may still come to hold."""

    def give_up(self) -> bool:
        """Free memory for tuples; False if it holds nothing."""


class _NoExtras:
    def planned_bytes(self) -> int:
        return 0

    def give_up(self) -> bool:
        return False


def chunks_per_cycle(spec: JoinSpec, memory: MemoryPlan) -> int:
    """The maximum number of chunks in a scan's window: one per step of a cycle."""
    return -(-spec.shard.num_rows // memory.block_rows) + _CHUNKS_BESIDES


class JoinState:
    """Window, memory, output and counters of one join.

    `kind` is the strategy's name, for messages. `plan_memory` divides a budget and may raise a `BudgetError`.
    `max_chunks` is the maximum number of chunks in the window.
    """

    def __init__(
        self,
        kind: str,
        spec: JoinSpec,
        plan_memory: Callable[[JoinSpec], MemoryPlan],
        max_chunks: Callable[[JoinSpec, MemoryPlan], int] = chunks_per_cycle,
    ) -> None:
        self.kind, self.spec = kind, spec
        self.metrics = OperatorMetrics()
        self.stream_columns: pa.Schema = spec.stream_columns
        self.has_paged_columns = any(not is_fixed_width(column.type) for column in self.stream_columns)
        self.paged_bytes = float(TupleStore.guess_paged_bytes(self.stream_columns))
        self.matcher = matcher_for(spec)
        self.shedding = None if spec.shed is None else spec.shed.start()
        # Called with rows dropped for lack of room, with the stream's own columns.
        self.on_shed: Callable[[pa.RecordBatch], None] | None = None
        self.extras: Extras = _NoExtras()
        self.memory = plan_memory(spec)
        self.ledger = Ledger(spec.budget)
        self.block_account = self.ledger.reserve("block", self.memory.block_bytes)
        self.window_account = self.ledger.reserve("window")
        self.results = Results(spec, self.ledger, self.metrics, self.memory.output_rows, self.memory.output_bytes)
        self.results.give_up_extras = lambda: self.extras.give_up()
        if self.shedding is not None:
            self.ledger.reserve("shedding", self.shedding.nbytes)
        self.window: StreamWindow | None = None
        # Candidate pairs of the current block that were examined: an interrupted block continues there.
        self.pairs_done = 0
        self.arrivals = 0  # tuples accepted
        self.entered = 0  # tuples that entered the window
        self.entered_since_step = 0
        self._plan_memory, self._max_chunks = plan_memory, max_chunks

    # ================================================================ what is held

    @property
    def budget(self) -> Budget:
        return self.ledger.budget

    @property
    def pending(self) -> int:
        """Waiting stream tuples."""
        return 0 if self.window is None else len(self.window)

    @property
    def oldest(self) -> int | None:
        """How many tuples, at most, were accepted before the oldest waiting one; None if none waits."""
        return self.window.chunks.oldest.first_arrival if self.window is not None and self.pending else None

    @property
    def window_capacity(self) -> int:
        """The maximum number of waiting tuples within the budget."""
        return self.capacity_for(self.memory) if self.window is None else self.window.capacity

    def capacity_for(self, memory: MemoryPlan, paged_bytes: float | None = None) -> int:
        """The window's capacity with this division of the budget."""
        per_tuple = (self.paged_bytes if paged_bytes is None else paged_bytes) + self.matcher.bytes_per_tuple
        if self.spec.ordered and self.spec.how in ("inner", "left"):
            # One held result per tuple; beyond that, those of the youngest tuples are discarded and found again.
            per_tuple += self.results.plan.row_bytes + 8
        return StreamWindow.capacity_within(
            self.stream_columns, memory.window_bytes, per_tuple, self.spec.ordered, self.max_chunks(memory)
        )

    def max_chunks(self, memory: MemoryPlan | None = None) -> int:
        """The maximum number of chunks in the window."""
        return self._max_chunks(self.spec, self.memory if memory is None else memory)

    def other_bytes(self, *but: str) -> int:
        """Bytes held by components other than block, window, output in flight, and those named."""
        left_out = {"block", "window", "output", *but}
        return sum(held for name, held in self.ledger.by_component().items() if name not in left_out)

    def try_resize(self, account: Reservation, size_bytes: int) -> bool:
        """Let an optional component hold this much if there is room."""
        if not self.ledger.has_room_for(size_bytes - account.held_bytes):
            return False
        account.resize(size_bytes)
        return True

    # ================================================================ the window

    def window_for(self, part: pa.RecordBatch) -> StreamWindow:
        """The window, created when the first tuples show their width, and again if it is empty and they differ."""
        if self.window is not None and (len(self.window) or not self.has_paged_columns):
            return self.window
        if self.has_paged_columns and part.num_rows:
            paged = sum(int(c.nbytes) for c in part.columns if not is_fixed_width(c.type)) / part.num_rows
            is_alike = paged / _PAGED_DRIFT <= self.paged_bytes <= paged * _PAGED_DRIFT
            if self.window is not None and is_alike:
                return self.window
            self.paged_bytes = paged
        self.replace_window(None)
        capacity = max(1, self.capacity_for(self.memory))
        self.replace_window(StreamWindow(self.stream_columns, capacity, self.spec.ordered, self.max_chunks()))
        assert self.window is not None
        return self.window

    def replace_window(self, window: StreamWindow | None) -> None:
        """Continue with another window, or with none."""
        self.window_account.resize(0 if window is None else window.nbytes)
        self.window = window
        self.matcher = matcher_for(self.spec)

    def account_window(self) -> None:
        """Tidy the window and update its account."""
        if self.window is not None:
            if self.has_paged_columns:
                self.window.tidy(self.ledger.free_bytes)
            self.window_account.resize(self.window.nbytes + self.matcher.nbytes)

    def update_boundary(self) -> None:
        """Tell the results how far ordered output may go."""
        if self.spec.ordered:
            self.results.boundary = None if self.window is None else self.window.oldest_ticket

    # ================================================================ other budgets

    def replan(self, spec: JoinSpec) -> None:
        """Divide another budget, or the same one differently; refused, with nothing changed, if it does not fit."""
        memory = self._plan_memory(spec)
        capacity, window_bytes = 0, 0
        if self.window is not None:
            capacity = max(1, self.capacity_for(memory))
            self._require_fits(spec, memory, len(self.window), capacity)
            window_bytes = self.window.nbytes_at(capacity, self.max_chunks(memory)) + self.matcher.nbytes
        needed = memory.block_bytes + window_bytes + self.other_bytes()
        if needed > spec.budget.total_bytes:
            raise self.too_small(spec, needed)
        self.window_account.resize(0)
        self.block_account.resize(0)
        self.ledger.resize(spec.budget)
        self.block_account.resize(memory.block_bytes)
        if self.window is not None:
            self.window.resize(capacity, self.max_chunks(memory))
        self.matcher = matcher_for(spec)
        self.window_account.resize(0 if self.window is None else self.window.nbytes)
        self.memory = memory
        self.results.max_rows, self.results.output_bytes = memory.output_rows, memory.output_bytes
        self.spec = spec

    def _require_fits(self, spec: JoinSpec, memory: MemoryPlan, tuples: int, capacity: int) -> None:
        if tuples > capacity:
            window_bytes = StreamWindow.bytes_for(self.stream_columns, tuples, spec.ordered)
            needed = spec.budget.total_bytes - memory.window_bytes + window_bytes + int(tuples * self.paged_bytes)
            raise self.too_small(spec, max(needed, spec.budget.total_bytes + 1))

    def too_small(self, spec: JoinSpec, needed: int) -> BudgetError:
        """The error for a budget that the current contents do not fit."""
        return BudgetError(
            f"A budget of {spec.budget.total_bytes} bytes is too small for the state of {self.kind}: {self.pending} "
            f"waiting tuples need about {needed} bytes ({format_bytes(needed)}).",
            hint="Drain tuples first, or choose a larger budget or smaller blocks.",
            minimum_bytes=needed,
        )
