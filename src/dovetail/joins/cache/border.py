"""The border between cache and window: how they divide their shared memory.

No result depends on the cache, and any value may leave it at any time. So the window comes first: the cache gives up
whatever tuples need.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from dovetail.core.errors import BudgetError, PlanError
from dovetail.joins.cache.relation_cache import RelationCache
from dovetail.joins.matching import matcher_for
from dovetail.joins.memory_plan import MemoryPlan, plan_memory
from dovetail.joins.phases.admission import FEWEST_ADMITTED
from dovetail.joins.phases.scan import Scan
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.stream_window import StreamWindow

__all__ = ["Border", "Objective", "SharedMemory"]

Objective = Literal["rate", "memory"]
_LEARNING_SHARE = 64  # one part in 64 of the window's memory is for counting join values
_SMALL_LEARNING_BYTES = 1024  # or this much, if that is more
_MOST_LEARNING_SHARE = 16  # but at most one part in 16
_ADMISSIONS_PER_WINDOW = 64
_FIRST_WINDOW_SHARE = 16  # with objective "memory", the window starts with this part of the shared memory
_WINDOW_GROWTH = 1.25
_WINDOW_MARGIN_BYTES = 1024
_FEWEST_TUPLES = 64
_FEWEST_TUPLES_BESIDE = 16  # the minimum capacity of a window beside a cache
_SLACK_SHARE = 256  # room for entries between two decisions, as a part of the shared memory
_LEAST_WINDOW_SHARE = 16  # the part of the shared memory that always belongs to the window


@dataclass
class SharedMemory:
    """The memory shared by cache and window, as planned from a budget."""

    who: str
    output_share: int = 16  # the divisor of the part of the budget for output in flight
    cache_limit_bytes: int = 0  # the window gets the rest
    needed_bytes: int | None = None  # the limit of the window; None: all that is left
    learning_bytes: int = 0
    shared_bytes: int = 0

    def plan(self, spec: JoinSpec) -> MemoryPlan:
        """Divide a budget: block, output, counters, and the memory shared by cache and window."""
        per_tuple = matcher_for(spec).bytes_per_tuple
        plan = plan_memory(spec, who=self.who, bytes_per_tuple=per_tuple, output_share=self.output_share)
        if plan.output_rows < FEWEST_ADMITTED:
            plan = plan_memory(spec, who=self.who, bytes_per_tuple=per_tuple)
        small = min(_SMALL_LEARNING_BYTES, plan.window_bytes // _MOST_LEARNING_SHARE)
        self.learning_bytes = max(plan.window_bytes // _LEARNING_SHARE, small)
        self.shared_bytes = plan.window_bytes - self.learning_bytes
        return replace(plan, window_bytes=self.window_bytes(self.cache_limit_bytes))

    def window_bytes(self, cache_limit_bytes: int) -> int:
        """The window's memory beside a cache with this limit."""
        left_bytes = self.shared_bytes - cache_limit_bytes
        return left_bytes if self.needed_bytes is None else min(self.needed_bytes, left_bytes)


@dataclass(frozen=True)
class _Kept:
    """State put aside while trying whether something fits without the cache."""

    cache_limit_bytes: int
    cache_bytes: int
    learning_bytes: int
    switching_bytes: int
    needed_bytes: int | None
    memory: MemoryPlan


class Border:
    """Divides memory between the cache and the window of a join, and accounts for the cache.

    With objective ``"rate"`` the window takes all that the cache leaves; with ``"memory"``, what the stream needs.
    """

    def __init__(self, state: JoinState, scan: Scan, memory: SharedMemory, objective: Objective) -> None:
        if objective not in ("rate", "memory"):
            raise PlanError(f"objective={objective!r} is not an objective.", hint="Use 'rate' or 'memory'.")
        self.state, self._scan, self.memory, self.objective = state, scan, memory, objective
        needs_rows = bool(state.spec.relation_columns) or state.results.plan.verifies
        self.cache = RelationCache(state.spec.shard.schema if needs_rows else pa.schema([]))
        ledger = state.ledger
        self.cache_account, self.learning_account = ledger.reserve("cache"), ledger.reserve("learning")
        self.switching_account = ledger.reserve("switching")
        state.results.reserved_bytes = memory.learning_bytes
        state.extras = self
        self.admission_limit: int | None = None
        self.asked_limit_bytes: int | None = None
        self.on_forgotten: Callable[[], None] | None = None  # the cache was emptied: restart learning
        self.on_moved: Callable[[], None] | None = None
        self._begin_anew()
        if objective == "memory":
            memory.needed_bytes = max(memory.shared_bytes // _FIRST_WINDOW_SHARE, self._least_window_bytes())
            self.fit_window(memory.window_bytes(0))

    def _begin_anew(self) -> None:
        self._learned: dict[str, int] = {}
        self._peak_pending = 0
        self._last_look = self._scan.odometer
        self.asked_limit_bytes = None

    # ================================================================ sizes

    @property
    def shared_bytes(self) -> int:
        return self.memory.shared_bytes

    @property
    def slack_bytes(self) -> int:
        """Room for entries that arrive between two decisions."""
        return self.shared_bytes // _SLACK_SHARE

    @property
    def most_for_cache(self) -> int:
        """The maximum size of the cache."""
        kept_bytes = max(self.shared_bytes // _LEAST_WINDOW_SHARE, self._window_bytes_for(_FEWEST_TUPLES_BESIDE))
        return max(0, self.shared_bytes - kept_bytes)

    @property
    def tuple_bytes(self) -> float:
        """v_S: the memory of a waiting tuple, with everything that belongs to it."""
        capacity = self.state.window_capacity
        return self.memory.window_bytes(self.memory.cache_limit_bytes) / capacity if capacity else float("inf")

    def _least_window_bytes(self) -> int:
        return min(self._window_bytes_for(_FEWEST_TUPLES), self.shared_bytes - self.memory.cache_limit_bytes)

    def _window_bytes_for(self, tuples: int) -> int:
        state, ordered = self.state, self.state.spec.ordered
        per_tuple = state.paged_bytes + (state.results.plan.row_bytes + 8 if ordered else 0)
        chunks = state.max_chunks()
        return StreamWindow.bytes_for(state.stream_columns, tuples, ordered, chunks) + int(tuples * per_tuple)

    # ================================================================ moving the border

    def move(self, cache_limit_bytes: int) -> bool:
        """Set the cache's limit and give the window the rest; False, with nothing changed, if impossible now."""
        if self.admission_limit is not None and self.state.pending > self.admission_limit:
            return False
        if cache_limit_bytes != self.memory.cache_limit_bytes:
            if not self.fit_window(self.memory.window_bytes(cache_limit_bytes)):
                return False
            self.memory.cache_limit_bytes = cache_limit_bytes
        self.admission_limit = None
        if self.on_moved is not None:
            self.on_moved()
        return True

    def fit_window(self, window_bytes: int) -> bool:
        """Resize the window in place; False, with nothing changed, if the waiting tuples do not allow it now."""
        state = self.state
        memory = replace(state.memory, window_bytes=window_bytes)
        capacity = state.capacity_for(memory)
        window = state.window
        if window is not None and len(window) == 0:
            state.replace_window(None)
        elif window is not None:
            free_bytes = state.ledger.free_bytes + state.block_account.held_bytes
            growth_bytes = max(0, window.nbytes_at(capacity, window.max_chunks) - window.nbytes)
            if state.pairs_done or len(window) > capacity or window.resize_bytes + growth_bytes > free_bytes:
                return False
            if growth_bytes > state.ledger.free_bytes:
                return False
            state.window_account.resize(window.nbytes + growth_bytes)
            window.resize(max(1, capacity))
            state.window_account.resize(window.nbytes)
        state.memory = memory
        return True

    def capacity_beside(self, cache_limit_bytes: int) -> int:
        """How many tuples may wait for `move` to succeed."""
        state = self.state
        memory = replace(state.memory, window_bytes=self.memory.window_bytes(cache_limit_bytes))
        free_bytes = state.ledger.free_bytes + state.block_account.held_bytes
        most = StreamWindow.resizable_within(free_bytes)
        return max(1, min(most, state.capacity_for(memory)))

    def give_back(self) -> None:
        """Give the window what the cache does not need."""
        limit = self.cache.nbytes + self.slack_bytes if len(self.cache) else 0
        if limit < self.memory.cache_limit_bytes:
            self.move(limit)
        elif self.cache.nbytes > self.memory.cache_limit_bytes:
            self.ask(limit)

    def ask(self, cache_limit_bytes: int) -> None:
        """Request a move of the border between two blocks, once enough tuples have left."""
        self.asked_limit_bytes = cache_limit_bytes
        self.admission_limit = self.capacity_beside(cache_limit_bytes)

    def move_asked(self) -> bool:
        """Move the border as requested, if possible now."""
        if self.asked_limit_bytes is not None and self.move(self.asked_limit_bytes):
            self.asked_limit_bytes = None
            return True
        return False

    # ================================================================ how many tuples may enter

    def limit(self, room: int, waiting: int, count_room: Callable[[], int]) -> int:
        state, memory = self.state, self.memory
        room = self._limited(room, waiting)
        # With objective "memory" the window grows when it has no room for tuples.
        grows = memory.needed_bytes is not None and room < waiting and self.admission_limit is None
        wanted = max(state.pending + waiting, int(_WINDOW_GROWTH * state.window_capacity))
        if grows and self._fit_window_to(wanted):
            room = self._limited(count_room(), waiting)
        self._peak_pending = max(self._peak_pending, state.pending + room)
        return room

    def _limited(self, room: int, waiting: int) -> int:
        state = self.state
        if self.admission_limit is not None:
            room = min(room, max(0, self.admission_limit - state.pending))
        if room == waiting or not state.pending or state.shedding is not None:
            return room
        # To avoid many small chunks and batches, tuples enter only when there is room for a good number.
        least = min(state.window_capacity // _ADMISSIONS_PER_WINDOW, state.spec.chunk_rows or state.window_capacity)
        return room if room >= least else 0

    def _fit_window_to(self, tuples: int) -> bool:
        """Resize the window for this many tuples, as far as there is memory; False if nothing changes now."""
        memory = self.memory
        before = memory.needed_bytes
        most = memory.shared_bytes - memory.cache_limit_bytes
        needed = max(int(tuples * self.tuple_bytes) + _WINDOW_MARGIN_BYTES, self._least_window_bytes())
        memory.needed_bytes = min(needed, most)
        if memory.needed_bytes != before and self.fit_window(memory.needed_bytes):
            return True
        memory.needed_bytes = before
        return False

    def look_over_window(self) -> None:
        """With objective "memory": shrink a window that was less than half full for a whole cycle."""
        odometer, state = self._scan.odometer, self.state
        if self.memory.needed_bytes is None or odometer - self._last_look < max(1, state.spec.shard.num_rows):
            return
        if 2 * self._peak_pending < state.window_capacity:
            self._fit_window_to(int(_WINDOW_GROWTH * self._peak_pending))
        self._peak_pending, self._last_look = state.pending, odometer

    def account_learning(self, owner: str, size_bytes: int) -> None:
        """Account for the memory of one of the learners."""
        self._learned[owner] = size_bytes
        self.learning_account.resize(sum(self._learned.values()))

    # ================================================================ the cache's account

    def account_cache(self) -> None:
        """Update the cache's account; if there is not enough memory, drop the cache."""
        if not self.state.try_resize(self.cache_account, self.cache.nbytes):
            self.state.metrics.cache_evictions += len(self.cache)
            self.cache.clear()
            self.cache_account.resize(0)

    def tidy_cache(self) -> None:
        """Rewrite pages with garbage; the memory planned for output is free between two steps."""
        self.cache.tidy(max(0, self.state.ledger.free_bytes))
        self.account_cache()

    def planned_bytes(self) -> int:
        learning_bytes = self.memory.learning_bytes - self.learning_account.held_bytes
        cache_bytes = self.memory.cache_limit_bytes - self.state.other_bytes("held", "shedding", "learning")
        return max(0, learning_bytes) + max(0, cache_bytes)

    def give_up(self) -> bool:
        state = self.state
        if state.other_bytes("held", "shedding") == 0:
            return False
        held_before = state.ledger.held_bytes
        state.metrics.cache_evictions += len(self.cache)
        if not state.pending:
            state.replace_window(None)
        self.forget()
        # The other memory may belong to a lookup that needs more: on the next request there is nothing to give.
        return state.ledger.held_bytes < held_before

    # ================================================================ other budgets, restarts

    def forget(self) -> None:
        """Start with an empty cache; results do not depend on it."""
        self.cache.clear()
        self.memory.cache_limit_bytes = 0
        self.admission_limit = None
        self.state.memory = replace(self.state.memory, window_bytes=self.memory.window_bytes(0))
        for account in (self.cache_account, self.learning_account, self.switching_account):
            account.resize(0)
        self._begin_anew()
        if self.on_forgotten is not None:
            self.on_forgotten()

    def replan(self, spec: JoinSpec) -> None:
        """Divide another budget; the cache is dropped if the waiting tuples fit only without it."""
        memory, state = self.memory, self.state
        before = memory.learning_bytes, memory.shared_bytes
        try:
            state.replan(spec)
        except BudgetError:
            memory.learning_bytes, memory.shared_bytes = before
            if not memory.cache_limit_bytes and not self.learning_account.held_bytes:
                raise
            self.without_cache(lambda: state.replan(spec), before)
        state.results.reserved_bytes = memory.learning_bytes
        self.asked_limit_bytes = self.admission_limit = None

    def without_cache(self, action: Callable[[], None], sizes: tuple[int, int] | None = None) -> None:
        """Do something that needs the cache's memory; if it fails, everything is as before."""
        kept = self._put_aside()
        try:
            action()
        except Exception:
            if sizes is not None:
                self.memory.learning_bytes, self.memory.shared_bytes = sizes
            self._put_back(kept)
            raise
        self.forget()

    def make_room_for_restored(self) -> None:
        """With objective "memory", a snapshot may need a larger window than the initial one; it shrinks again."""
        if self.memory.needed_bytes is not None:
            self.memory.needed_bytes = self.shared_bytes
            self.state.memory = replace(self.state.memory, window_bytes=self.memory.window_bytes(0))

    def _put_aside(self) -> _Kept:
        memory, state = self.memory, self.state
        accounts = self.cache_account, self.learning_account, self.switching_account
        cache_bytes, learning_bytes, switching_bytes = (account.held_bytes for account in accounts)
        kept = _Kept(
            memory.cache_limit_bytes, cache_bytes, learning_bytes, switching_bytes, memory.needed_bytes, state.memory
        )
        memory.cache_limit_bytes = 0
        state.memory = replace(state.memory, window_bytes=memory.window_bytes(0))
        for account in accounts:
            account.resize(0)
        return kept

    def _put_back(self, kept: _Kept) -> None:
        self.memory.cache_limit_bytes, self.memory.needed_bytes = kept.cache_limit_bytes, kept.needed_bytes
        self.state.memory = kept.memory
        self.cache_account.resize(kept.cache_bytes)
        self.learning_account.resize(kept.learning_bytes)
        self.switching_account.resize(kept.switching_bytes)
