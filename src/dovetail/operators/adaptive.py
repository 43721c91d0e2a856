"""What the cache keeps: eviction, values without rows, and how much of the memory it may have.

The cache inequality (SSBJ, theorem 2) decides: a join value belongs into the cache if its rows take less memory there,
m v_R, than its tuples take in the window, n v_S. Everything is counted at what it really takes, the tables' part
included.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import PlanError
from dovetail.operators.cached import CachedMeshJoin
from dovetail.operators.spec import JoinSpec
from dovetail.operators.switching import ENTRY_BYTES
from dovetail.operators.tuple_store import Positions
from dovetail.operators.window import StreamWindow

__all__ = ["CYCLES_PER_EVICTION", "AdaptiveCacheJoin", "Objective"]

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Objective = Literal["rate", "memory"]
CYCLES_PER_EVICTION = 10
_MOST_SCALED = 8.0
_FIRST_WINDOW_SHARE = 16  # with objective "memory", the part of what is shared that the window begins with
_WINDOW_GROWTH = 1.25
_WINDOW_MARGIN_BYTES = 1024
_FEWEST_TUPLES = 64
_FEWEST_TUPLES_BESIDE = 16  # a window beside a cache has room for so many at least
_SLACK_SHARE = 256  # room for entries that come between two decisions, as a part of what is shared
_LEAST_WINDOW_SHARE = 16  # the part of what is shared that always stays with the window
_MOST_NEGATIVE_SHARE = 8  # the part of what is shared that negative entries may ask for at once


class AdaptiveCacheJoin(CachedMeshJoin):
    """A scan behind a cache that follows the stream. Subclasses decide when and how values enter the cache."""

    # How long a tuple waits, in cycles, if it is not answered by the cache.
    _cycles_waited = 1.0

    def __init__(self, spec: JoinSpec, objective: Objective, switching_factor: float) -> None:
        if objective not in ("rate", "memory"):
            raise PlanError(f"objective={objective!r} is not an objective.", hint="Use 'rate' or 'memory'.")
        if not 0 < switching_factor < float("inf"):
            raise PlanError(f"switching_factor={switching_factor!r}: a number above zero is needed.")
        super().__init__(spec)
        self.objective = objective
        self.switching_factor = switching_factor
        self._switching_account = self._ledger.reserve("switching")
        self._row_bytes = spec.shard.row_bytes if self._cache.keeps_rows else 0.0
        self._begin_anew()
        if objective == "memory":
            self._needed_bytes = max(self._shared_bytes // _FIRST_WINDOW_SHARE, self._least_window_bytes())
            self._fit_window(self._window_bytes(0))

    def _begin_anew(self) -> None:
        self._peak_pending = 0
        self._last_look = self._odometer
        self._asked_limit_bytes: int | None = None
        self._unmet_bytes = 0
        self._last_eviction = self._odometer
        self._entered_by_eviction = self._entered

    # ---------------------------------------------------------------- the inequality

    def _saved_bytes(self, tuples_per_cycle: npt.NDArray[Any]) -> FloatArray:
        """What the window need not hold if so many tuples per cycle are answered by the cache."""
        return np.asarray(tuples_per_cycle * (self._cycles_waited * self._window_tuple_bytes()), np.float64)

    def _cached_bytes(self, row_counts: Int64Array) -> FloatArray:
        """What values with so many rows take in the cache."""
        return np.asarray(row_counts * self._row_bytes + ENTRY_BYTES, np.float64)

    def _scale(self) -> float:
        """Tuples per cycle for each tuple that waits now: with a fixed budget the window is taken as full."""
        if self.objective == "memory" or not self.pending:
            return 1.0
        # A few tuples tell little of many: what is expected of a full window must have been seen in part of it.
        return min(max(1.0, self.window_capacity / self.pending), _MOST_SCALED)

    def _credit(self, frequencies: FloatArray) -> Int64Array:
        """What to begin counting with, as if a value had been in the cache since the last eviction."""
        cycles = (self._odometer - self._last_eviction) / max(1, self.spec.shard.num_rows)
        return (frequencies * cycles).astype(np.int64)

    # ---------------------------------------------------------------- eviction

    def _is_tenth_cycle(self) -> bool:
        return self._odometer - self._last_eviction >= CYCLES_PER_EVICTION * max(1, self.spec.shard.num_rows)

    def _evict(self) -> None:
        """Evict values that no longer keep enough tuples from waiting."""
        codes, _, counts, frequencies = self._cache.values()
        gone = codes[
            self._cached_bytes(counts)
            >= self.switching_factor * self._saved_bytes(frequencies * self._cycles_per_count())
        ]
        self.metrics.cache_evictions += self._cache.evict(gone)
        self._cache.reset_frequencies()
        self._last_eviction, self._entered_by_eviction = self._odometer, self._entered
        self._tidy_cache()
        self._give_back()

    def _cycles_per_count(self) -> float:
        """Tuples per cycle for each that was counted since the last eviction; see `_scale`."""
        if self.objective == "memory":
            return self.spec.shard.num_rows / max(1, self._odometer - self._last_eviction)
        entered = max(1, self._entered - self._entered_by_eviction)
        cycles = max(1.0, (self._odometer - self._last_eviction) / max(1, self.spec.shard.num_rows))
        return min(self.window_capacity / (self._cycles_waited * entered), _MOST_SCALED / cycles)

    # ---------------------------------------------------------------- the border

    def _slack(self) -> int:
        return self._shared_bytes // _SLACK_SHARE

    def _most_for_cache(self) -> int:
        kept_bytes = max(self._shared_bytes // _LEAST_WINDOW_SHARE, self._window_bytes_for(_FEWEST_TUPLES_BESIDE))
        return max(0, self._shared_bytes - kept_bytes)

    def _give_back(self) -> None:
        """Let the window have what the cache does not need."""
        limit = self._cache.nbytes + self._slack() if len(self._cache) else 0
        if limit < self._cache_limit_bytes:
            self._move_border(limit)
        elif self._cache.nbytes > self._cache_limit_bytes:
            self._ask_for_border(limit)

    def _ask_for_border(self, cache_limit_bytes: int) -> None:
        """Have the border moved between two blocks, when enough tuples have left."""
        self._asked_limit_bytes = cache_limit_bytes
        self._admission_limit = self._capacity_beside(cache_limit_bytes)

    def _move_asked_border(self) -> None:
        if self._asked_limit_bytes is not None and self._move_border(self._asked_limit_bytes):
            self._asked_limit_bytes = None
            self._unmet_bytes = 0

    # ---------------------------------------------------------------- no more memory than is needed

    def _room_for(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        room = super()._room_for(part, waiting)
        # With objective "memory" the window grows when tuples find no room in it.
        grows = self._needed_bytes is not None and room < waiting.size and self._admission_limit is None
        wanted = max(self.pending + waiting.size, int(_WINDOW_GROWTH * self.window_capacity))
        if grows and self._fit_window_to(wanted):
            room = super()._room_for(part, waiting)
        self._peak_pending = max(self._peak_pending, self.pending + room)
        return room

    def _fit_window_to(self, tuples: int) -> bool:
        """Let the window take what so many tuples need, as far as there is memory; False if nothing changes now."""
        before = self._needed_bytes
        most = self._shared_bytes - self._cache_limit_bytes
        needed = max(int(tuples * self._window_tuple_bytes()) + _WINDOW_MARGIN_BYTES, self._least_window_bytes())
        self._needed_bytes = min(needed, most)
        if self._needed_bytes != before and self._fit_window(self._needed_bytes):
            return True
        self._needed_bytes = before
        return False

    def _least_window_bytes(self) -> int:
        return min(self._window_bytes_for(_FEWEST_TUPLES), self._shared_bytes - self._cache_limit_bytes)

    def _window_bytes_for(self, tuples: int) -> int:
        columns, ordered = self._stream_columns, self.spec.ordered
        per_tuple = self._paged_bytes + (self.results.plan.row_bytes + 8 if ordered else 0)
        chunks = self._max_chunks(self._memory)
        return StreamWindow.bytes_for(columns, tuples, ordered, chunks) + int(tuples * per_tuple)

    def _look_over_window(self) -> None:
        """With objective "memory": a window that was not half full in a whole cycle gives back what it did not need."""
        if self._needed_bytes is None or self._odometer - self._last_look < max(1, self.spec.shard.num_rows):
            return
        if 2 * self._peak_pending < self.window_capacity:
            self._fit_window_to(int(_WINDOW_GROWTH * self._peak_pending))
        self._peak_pending, self._last_look = self.pending, self._odometer

    # ---------------------------------------------------------------- values without rows

    def _note_left(self, positions: Positions, is_matched: BoolArray) -> None:
        window = self._window
        assert window is not None
        # With a condition, a tuple without a match may well have rows; then it is counting that finds out.
        if not self.results.plan.verifies and not is_matched.all():
            self._learn_unmatched(window.codes_left_at(positions[~is_matched]))

    def _learn_unmatched(self, left_codes: Int64Array) -> None:
        """Decide on values whose tuples have met all of the relation and found nothing, by how many others there are.

        Seen from one tuple, the others that leave with it or still wait are those of one cycle.
        """
        assert self._window is not None
        codes, left = np.unique(left_codes, return_counts=True)
        others = np.asarray((self._window.index.count(codes) + left - 1) * self._scale(), np.float64)
        chosen = self._saved_bytes(others) > self.switching_factor * ENTRY_BYTES
        self._insert_negative(codes[chosen], others[chosen])

    def _insert_negative(self, codes: Int64Array, frequencies: FloatArray) -> None:
        """Add entries that say "no row", as many as there is room for, and ask for room for the others."""
        is_new = self._cache.probe(codes).is_miss
        codes, frequencies = codes[is_new], frequencies[is_new]
        if codes.size == 0:
            return
        growth_bytes = self._cache.table_growth_bytes(codes.size)
        if growth_bytes > 0:
            held_bytes = self._cache_account.held_bytes + self._switching_account.held_bytes
            free_bytes = self._cache_limit_bytes - held_bytes
            # While the table moves, both exist.
            table_bytes = min(self._cache.table_bytes + free_bytes, self._ledger.free_bytes)
            if self._cache.table_bytes + growth_bytes > table_bytes:
                self._ask_for_entries(growth_bytes)
            best = np.argsort(-frequencies, kind="stable")[: self._cache.entries_within(table_bytes)]
            codes, frequencies = codes[best], frequencies[best]
        self._cache.insert_negative(codes, self._credit(frequencies))
        self.metrics.negative_insertions += codes.size
        self._account_cache()

    def _ask_for_entries(self, growth_bytes: int) -> None:
        self._unmet_bytes = min(self._unmet_bytes + growth_bytes, self._shared_bytes // _MOST_NEGATIVE_SHARE)
        # The table as it is needs its room once more, until the next eviction: a larger one is made beside it.
        limit = self._cache.nbytes + self._cache.table_bytes + self._unmet_bytes + self._slack()
        if self._switching_account.held_bytes == 0 and limit <= self._most_for_cache():
            self._ask_for_border(limit)

    # ---------------------------------------------------------------- other budgets, restarts

    def _window_of(
        self, table: pa.Table | None, chunks: list[tuple[int, int, int]]
    ) -> tuple[StreamWindow | None, float]:
        if self._needed_bytes is not None:
            # What a snapshot has may be more than the window begins with; it shrinks again when it is not needed.
            self._needed_bytes = self._shared_bytes
            self._memory = replace(self._memory, window_bytes=self._window_bytes(0))
        return super()._window_of(table, chunks)

    def _put_cache_aside(self) -> Any:
        kept = super()._put_cache_aside(), self._switching_account.held_bytes, self._needed_bytes
        self._switching_account.resize(0)
        return kept

    def _put_cache_back(self, kept: Any) -> None:
        shared, switching_bytes, self._needed_bytes = kept
        super()._put_cache_back(shared)
        self._switching_account.resize(switching_bytes)

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._switching_account.resize(0)
        self._begin_anew()
