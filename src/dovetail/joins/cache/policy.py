"""What the cache keeps: the inequality, eviction, and values without rows.

The cache inequality (SSBJ, theorem 2): a join value belongs in the cache if its rows take less memory there, m v_R,
than its tuples take in the window, n v_S. All sizes are real ones, including the tables.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import PlanError
from dovetail.joins.cache.border import Border
from dovetail.joins.cache.switching import ENTRY_BYTES
from dovetail.joins.phases.scan import Scan
from dovetail.joins.state import JoinState
from dovetail.joins.window.tuple_store import Positions

__all__ = ["CYCLES_PER_EVICTION", "CachePolicy"]

FloatArray = npt.NDArray[np.float64]
CYCLES_PER_EVICTION = 10
_MOST_SCALED = 8.0
_MOST_NEGATIVE_SHARE = 8  # the part of the shared memory that negative entries may request at once


class CachePolicy:
    """Decides which values are worth caching.

    `switching_factor` is s_f: by how much the waiting tuples of a value must outweigh its rows before it enters the
    cache, and its rows the tuples before it is evicted. The paper finds 1 to be best.
    """

    def __init__(self, state: JoinState, scan: Scan, border: Border, switching_factor: float) -> None:
        if not 0 < switching_factor < float("inf"):
            raise PlanError(f"switching_factor={switching_factor!r}: must be above 0.")
        self.state, self._scan, self.border = state, scan, border
        self.switching_factor = switching_factor
        self.cycles_waited = 1.0  # how long a tuple waits if it misses the cache
        self.row_bytes = state.spec.shard.row_bytes if border.cache.keeps_rows else 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Restart counting."""
        self._unmet_bytes = 0
        self._last_eviction = self._scan.odometer
        self._entered_by_eviction = self.state.entered

    # ---------------------------------------------------------------- the inequality

    def saved_bytes(self, tuples_per_cycle: npt.NDArray[Any]) -> FloatArray:
        """What the window saves if the cache answers this many tuples per cycle."""
        return np.asarray(tuples_per_cycle * (self.cycles_waited * self.border.tuple_bytes), np.float64)

    def cached_bytes(self, row_counts: Int64Array) -> FloatArray:
        """The size of values with this many rows in the cache."""
        return np.asarray(row_counts * self.row_bytes + ENTRY_BYTES, np.float64)

    def least_tuples_per_cycle(self) -> float:
        """How often a value with one row must occur to be worth caching."""
        saved_bytes = self.cycles_waited * self.border.tuple_bytes
        return self.switching_factor * (self.row_bytes + ENTRY_BYTES) / saved_bytes

    def scale(self) -> float:
        """Tuples per cycle for each waiting tuple; with a fixed budget the window is assumed full."""
        state = self.state
        if self.border.objective == "memory" or not state.pending:
            return 1.0
        # A few tuples say little about many: extrapolate to a full window only from a good part of one.
        return min(max(1.0, state.window_capacity / state.pending), _MOST_SCALED)

    def credit(self, frequencies: FloatArray) -> Int64Array:
        """The initial count of values, as if they had been cached since the last eviction."""
        cycles = (self._scan.odometer - self._last_eviction) / max(1, self.state.spec.shard.num_rows)
        return (frequencies * cycles).astype(np.int64)

    def measure_rows(self) -> None:
        """Use the width of the cached rows as that of all rows."""
        cache = self.border.cache
        if cache.num_rows:
            self.row_bytes = (cache.nbytes - cache.table_bytes) / cache.num_rows

    # ---------------------------------------------------------------- eviction

    def is_tenth_cycle(self) -> bool:
        """Whether it is time to evict."""
        rows = max(1, self.state.spec.shard.num_rows)
        return self._scan.odometer - self._last_eviction >= CYCLES_PER_EVICTION * rows

    def evict(self) -> None:
        """Evict values that no longer keep enough tuples from waiting."""
        state, cache = self.state, self.border.cache
        codes, _, counts, frequencies = cache.values()
        saved_bytes = self.saved_bytes(frequencies * self._cycles_per_count())
        state.metrics.cache_evictions += cache.evict(
            codes[self.cached_bytes(counts) >= self.switching_factor * saved_bytes]
        )
        cache.reset_frequencies()
        self._last_eviction, self._entered_by_eviction = self._scan.odometer, state.entered
        self.border.tidy_cache()
        self.border.give_back()

    def _cycles_per_count(self) -> float:
        """Tuples per cycle for each tuple counted since the last eviction; see `scale`."""
        state, rows = self.state, self.state.spec.shard.num_rows
        passed = self._scan.odometer - self._last_eviction
        if self.border.objective == "memory":
            return rows / max(1, passed)
        entered = max(1, state.entered - self._entered_by_eviction)
        cycles = max(1.0, passed / max(1, rows))
        return min(state.window_capacity / (self.cycles_waited * entered), _MOST_SCALED / cycles)

    # ---------------------------------------------------------------- values without rows

    def note_left(self, positions: Positions, is_matched: BoolArray) -> None:
        """Observe tuples that have just left the window."""
        window = self.state.window
        assert window is not None
        # With a condition, a tuple without a match may still have rows; only counting tells.
        if not self.state.results.plan.verifies and not is_matched.all():
            self._learn_unmatched(window.codes_left_at(positions[~is_matched]))

    def _learn_unmatched(self, left_codes: Int64Array) -> None:
        """Decide on values whose tuples have met the whole relation without a match, by the number of such tuples.

        The other tuples of a value that leave with one, or still wait, are those of one cycle.
        """
        window = self.state.window
        assert window is not None
        codes, left = np.unique(left_codes, return_counts=True)
        others = np.asarray((window.index.count(codes) + left - 1) * self.scale(), np.float64)
        chosen = self.saved_bytes(others) > self.switching_factor * ENTRY_BYTES
        self.insert_negative(codes[chosen], others[chosen])

    def insert_negative(self, codes: Int64Array, frequencies: FloatArray) -> None:
        """Add as many "no row" entries as fit, and request room for the others."""
        state, border, cache = self.state, self.border, self.border.cache
        is_new = cache.probe(codes).is_miss
        codes, frequencies = codes[is_new], frequencies[is_new]
        if codes.size == 0:
            return
        growth_bytes = cache.table_growth_bytes(codes.size)
        if growth_bytes > 0:
            held_bytes = border.cache_account.held_bytes + border.switching_account.held_bytes
            free_bytes = border.memory.cache_limit_bytes - held_bytes
            # While the table is resized, both exist.
            table_bytes = min(cache.table_bytes + free_bytes, state.ledger.free_bytes)
            if cache.table_bytes + growth_bytes > table_bytes:
                self._ask_for_entries(growth_bytes)
            best = np.argsort(-frequencies, kind="stable")[: cache.entries_within(table_bytes)]
            codes, frequencies = codes[best], frequencies[best]
        cache.insert_negative(codes, self.credit(frequencies))
        state.metrics.negative_insertions += codes.size
        border.account_cache()

    def _ask_for_entries(self, growth_bytes: int) -> None:
        border, cache = self.border, self.border.cache
        self._unmet_bytes = min(self._unmet_bytes + growth_bytes, border.shared_bytes // _MOST_NEGATIVE_SHARE)
        # The current table needs its room once more, because the larger one is built beside it.
        limit = cache.nbytes + cache.table_bytes + self._unmet_bytes + border.slack_bytes
        if border.switching_account.held_bytes == 0 and limit <= border.most_for_cache:
            border.ask(limit)

    def move_asked_border(self) -> None:
        """Move the border as requested, if possible now."""
        if self.border.move_asked():
            self._unmet_bytes = 0
