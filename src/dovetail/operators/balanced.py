"""SSBJ: a cache of the join values that take less room there than their tuples take in the window (Naeem et al., 2018).

What it computes
    The exact join of every offered stream tuple with one version of a relation's shard: equality of keys, or equality
    plus a residual condition; one-to-many and many-to-many; inner, left, semi, anti.
How
    The cache phase answers what the cache knows; the rest goes through MESHJOIN's disk phase. What is cached is decided
    in rounds of three cycles over the relation, as the paper has it:

    counting
        The values of which most tuples wait are candidates; a cycle counts their relation rows.
    switching
        At its start it is decided for all candidates which enter the cache: those whose rows, m v_R, take less memory
        than their waiting tuples, n v_S (the cache inequality), the best ones first. The cycle collects their rows in
        the switching buffer. Before it, the window gives up the room that they will need.
    phase-out
        At its start the rows move into the cache, and w adapts. Tuples that waited by then finish in the disk phase,
        those that come now are answered by the cache.

    Once in ten cycles, values whose rows now outweigh the tuples that they kept from waiting are evicted. Values with
    no row are found out when their tuples leave, and are kept as negative entries while they are worth an entry.
Objectives
    ``"memory"``: n is counted as it is, so that the least memory serves the stream that comes. ``"rate"``: the window
    takes all that is left of the budget, and n is counted as if it were full. The inequality then is the condition for
    the highest service rate: with T tuples served per cycle, of which W wait, a byte of cache is worth more than a
    byte of window if n / (m v_R) > 1 / v_S. So the operator finds the best split by itself.
Memory
    One block, one batch of output, the counters, cache and switching buffer, and the window, which has the rest.
What is emitted when
    Answers of the cache at once, the rest as MESHJOIN does.
What a restart keeps
    The window, the place in the scan, held results, counters. The cache is not kept: it is found again.
Not cached
    Values with more rows than fit a batch of output, or more than 4,094.
Not supported
    Conditions without equality; those are for `mesh`.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import PlanError
from dovetail.kernels.frequent import frequent_codes
from dovetail.kernels.value_table import ValueTable
from dovetail.operators.cached import CachedMeshJoin
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.spec import JoinSpec
from dovetail.operators.switching import ENTRY_BYTES, Candidates, SwitchingBuffer
from dovetail.operators.tuple_store import Positions

__all__ = ["BalancedJoin"]

Int64Array = npt.NDArray[np.int64]
Objective = Literal["rate", "memory"]
_CYCLES_PER_EVICTION = 10
_SLACK_SHARE = 64  # room for negative entries that come between two decisions, as a part of what is shared
_MOST_SWITCHED_SHARE = 4  # the part of what is shared that may be switched at once
_LEAST_WINDOW_SHARE = 16  # the part of what is shared that always stays with the window
_CANDIDATE_SHARE = 0.75  # a candidate's first count may be this much below what would be worth caching


class Phase(Enum):
    """The cycles of a round."""

    COUNTING = 1
    MAKING_ROOM = 2
    SWITCHING = 3
    PHASE_OUT = 4


class BalancedJoin(CachedMeshJoin):
    """Join a stream with a relation by a cyclic scan, behind a cache of the join values that are worth it.

    Parameters
    ----------
    spec
        The join.
    objective
        ``"rate"``: serve as much as the budget allows. ``"memory"``: hold as little as the stream needs.
    switching_factor
        s_f: by how much the waiting tuples of a value must outweigh its rows before it enters the cache, and its rows
        the tuples before it is evicted. The paper finds 1 to be best.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.operators.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2] * 9, "id": [2] * 9})
    >>> join = BalancedJoin(join_spec(relation, stream.schema, budget="1MB"))
    >>> for _ in range(4):
    ...     given = sum(batch.num_rows for batch in join.offer(stream))
    ...     waited = join.pending
    ...     given += sum(batch.num_rows for batch in join.drain())
    ...     print(given, waited, len(join.cache))
    18 9 0
    18 9 1
    18 0 1
    18 0 1
    """

    kind = "balanced"

    def __init__(self, spec: JoinSpec, *, objective: Objective = "rate", switching_factor: float = 1.0) -> None:
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

    def _begin_anew(self) -> None:
        self._phase = Phase.COUNTING
        self._phase_end: int | None = None
        self._candidates: Candidates | None = None
        self._buffer: SwitchingBuffer | None = None
        self._asked_limit_bytes: int | None = None
        self._last_eviction = self._odometer
        self._entered_by_eviction = self._entered

    @property
    def phase(self) -> Phase:
        """Where in its round the operator is."""
        return self._phase

    # ================================================================ the disk phase

    def _rows_to_read(self, rows_left: int) -> int:
        rows = super()._rows_to_read(rows_left)
        if self._phase_end is None or self._pairs_done:
            return rows
        # A block belongs to one cycle, so that each cycle meets every row once.
        return min(rows, self._phase_end - self._odometer)

    def _join_block(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        if self._phase_end is None and not self._pairs_done:
            self._begin_phase()
        yield from super()._join_block(block)
        if self._phase is Phase.COUNTING and self._candidates is not None:
            self._candidates.table.count_rows(block.codes)
        elif self._phase is Phase.SWITCHING and self._buffer is not None:
            self._collect(block)

    def _advance(self, rows: int) -> None:
        super()._advance(rows)
        if self._phase_end is not None and self._odometer >= self._phase_end:
            self._end_phase()
        is_tenth_cycle = self._odometer - self._last_eviction >= _CYCLES_PER_EVICTION * self.spec.shard.num_rows
        if is_tenth_cycle and self._phase in (Phase.COUNTING, Phase.PHASE_OUT):
            self._evict()
        if self._asked_limit_bytes is not None and self._move_border(self._asked_limit_bytes):
            self._asked_limit_bytes = None

    # ---------------------------------------------------------------- the round

    def _begin_phase(self) -> None:
        """Begin a cycle with the block that was just read; there are waiting tuples now, to be counted."""
        if self._phase is Phase.COUNTING:
            self._candidates = self._choose_candidates()
        elif self._phase is Phase.MAKING_ROOM:
            if self._buffer is None:
                self._decide()
            if self._buffer is None:
                self._phase = Phase.COUNTING
                self._candidates = self._choose_candidates()
            elif self._move_border(self._wanted_limit()):
                self._phase = Phase.SWITCHING
            else:
                return
        self._phase_end = self._odometer + self.spec.shard.num_rows

    def _end_phase(self) -> None:
        self._phase_end = None
        if self._phase is Phase.COUNTING:
            self._phase = Phase.COUNTING if self._candidates is None else Phase.MAKING_ROOM
        elif self._phase is Phase.SWITCHING:
            self._phase = Phase.COUNTING if self._buffer is None else Phase.PHASE_OUT
            if self._buffer is not None:
                self._switch(self._buffer)
            self._drop_buffer()
        elif self._phase is Phase.PHASE_OUT:
            self._phase = Phase.COUNTING

    # ---------------------------------------------------------------- counting

    def _scale(self) -> float:
        """Tuples per cycle for each tuple that waits now: with a fixed budget the window is taken as full."""
        if self.objective == "memory" or not self.pending:
            return 1.0
        return max(1.0, self.window_capacity / self.pending)

    def _choose_candidates(self) -> Candidates | None:
        assert self._window is not None
        capacity = ValueTable.capacity_within(self._learning_bytes // 2)
        tuple_bytes = self._window_tuple_bytes()
        worth = self.switching_factor * (self._row_bytes + ENTRY_BYTES) / (tuple_bytes * self._scale())
        codes, waiting = frequent_codes(self._window.index, max(1, int(_CANDIDATE_SHARE * worth)), capacity)
        is_new = self._cache.probe(codes).is_miss
        codes, waiting = codes[is_new], waiting[is_new]
        if codes.size == 0:
            self._learning_account.resize(0)
            return None
        candidates = Candidates(codes, waiting, self._scale())
        self._learning_account.resize(candidates.table.nbytes)
        return candidates

    # ---------------------------------------------------------------- switching

    def _decide(self) -> None:
        """Freeze which candidates enter the cache."""
        candidates = self._candidates
        assert candidates is not None
        assert self._window is not None
        waiting = self._window.index.count(candidates.table.items().codes).astype(np.int64)
        tuple_bytes, scale = self._window_tuple_bytes(), self._scale()
        codes, frequencies = candidates.without_rows(waiting, scale, tuple_bytes, self.switching_factor)
        self._insert_negative(codes, frequencies)
        room = self._shared_bytes - self._shared_bytes // _LEAST_WINDOW_SHARE - self._cache.nbytes - self._slack()
        decision = candidates.decide(
            waiting,
            scale,
            tuple_bytes=tuple_bytes,
            row_bytes=self._row_bytes,
            factor=self.switching_factor,
            max_rows=self.results.max_rows,
            max_bytes=min(room, self._shared_bytes // _MOST_SWITCHED_SHARE),
        )
        self._candidates = None
        self._learning_account.resize(0)
        if len(decision) and self._ledger.has_room_for(ValueTable.nbytes_of(len(decision))):
            self._buffer = SwitchingBuffer(decision)
            self._switching_account.resize(self._buffer.nbytes)
            self._asked_limit_bytes = None
            self._admission_limit = self._capacity_beside(self._wanted_limit())

    def _wanted_limit(self) -> int:
        """What the cache will need when the decided values are in it."""
        wanted = self._cache.nbytes + self._slack()
        if self._buffer is not None:
            values = len(self._buffer.decision)
            wanted += max(self._buffer.decision.nbytes, self._buffer.nbytes) + 16 * values
            wanted += max(0, self._cache.table_growth_bytes(values))
        return max(wanted, self._cache_limit_bytes)

    def _slack(self) -> int:
        return self._shared_bytes // _SLACK_SHARE

    def _collect(self, block: RelationBlock) -> None:
        assert self._buffer is not None
        self._buffer.collect(block)
        if self._cache.nbytes + self._buffer.nbytes > self._cache_limit_bytes:
            # Rows turned out to be longer than expected: next time that is known.
            self._row_bytes *= 1.25
            self._drop_buffer()
            return
        self._switching_account.resize(self._buffer.nbytes)

    def _switch(self, buffer: SwitchingBuffer) -> None:
        """Move all tuples from s_B to H_R."""
        decision = buffer.decision
        page_bytes = self._memory.output_bytes
        growth_bytes = max(0, self._cache.table_growth_bytes(len(decision)))
        copied_bytes = page_bytes if buffer.is_contiguous() else buffer.nbytes
        if copied_bytes + growth_bytes + self._cache.table_bytes > self._ledger.free_bytes + page_bytes:
            return
        since = (self._odometer - self._last_eviction) / self.spec.shard.num_rows
        if self._cache.keeps_rows:
            codes, pages = buffer.pages(page_bytes)
            is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
            order = np.argsort(decision.codes)
            place = order[np.searchsorted(decision.codes[order], codes[is_first])]
            # Until the next eviction a value counts as if it had been there since the last.
            credit = (decision.frequencies[place] * since).astype(np.int64)
            self._drop_buffer()
            self._cache.insert(codes, pages, credit)
        else:
            credit = (decision.frequencies * since).astype(np.int64)
            self._drop_buffer()
            self._cache.insert_counts(decision.codes, decision.row_counts, credit)
        self.metrics.cache_insertions += len(decision)
        if self._cache.num_rows:
            self._row_bytes = (self._cache.nbytes - self._cache.table_bytes) / self._cache.num_rows
        self._account_cache()
        self._tidy_cache()
        self._give_back()

    def _drop_buffer(self) -> None:
        self._buffer = None
        self._switching_account.resize(0)

    # ---------------------------------------------------------------- eviction

    def _evict(self) -> None:
        """Evict values that no longer keep enough tuples from waiting."""
        codes, _, counts, frequencies = self._cache.values()
        if self.objective == "memory":
            scale = self.spec.shard.num_rows / (self._odometer - self._last_eviction)
        else:
            scale = self.window_capacity / max(1, self._entered - self._entered_by_eviction)
        cached_bytes = counts * self._row_bytes + ENTRY_BYTES
        waiting_bytes = frequencies * scale * self._window_tuple_bytes()
        gone = codes[cached_bytes >= self.switching_factor * waiting_bytes]
        self.metrics.cache_evictions += self._cache.evict(gone)
        self._cache.reset_frequencies()
        self._last_eviction, self._entered_by_eviction = self._odometer, self._entered
        self._tidy_cache()
        self._give_back()

    def _give_back(self) -> None:
        """Let the window have what the cache does not need."""
        limit = self._cache.nbytes + self._slack() if len(self._cache) else 0
        if limit < self._cache_limit_bytes:
            self._move_border(limit)
        elif self._cache.nbytes > self._cache_limit_bytes:
            self._ask_for_border(limit)

    # ---------------------------------------------------------------- values without rows

    def _put_out_left(self, positions: Positions) -> Iterator[pa.RecordBatch]:
        window = self._window
        assert window is not None
        if not self.results.plan.verifies:
            # With a condition, a tuple without a match may well have rows; then it is counting that finds out.
            alone = positions[~window.is_matched_at(positions)]
            if alone.size:
                self._learn_unmatched(np.unique(window.codes_left_at(alone)))
        yield from super()._put_out_left(positions)

    def _learn_unmatched(self, codes: Int64Array) -> None:
        """Decide on values whose tuples have met all of the relation and found nothing, by what still waits of them."""
        assert self._window is not None
        waiting = self._window.index.count(codes).astype(np.float64) * self._scale()
        chosen = waiting * self._window_tuple_bytes() > self.switching_factor * ENTRY_BYTES
        self._insert_negative(codes[chosen], waiting[chosen])

    def _insert_negative(self, codes: Int64Array, frequencies: npt.NDArray[np.float64]) -> None:
        is_new = self._cache.probe(codes).is_miss
        codes, frequencies = codes[is_new], frequencies[is_new]
        if codes.size == 0:
            return
        growth_bytes = self._cache.table_growth_bytes(codes.size)
        held = self._cache_account.held_bytes + self._switching_account.held_bytes
        if growth_bytes > 0:
            if held + growth_bytes > self._cache_limit_bytes:
                self._ask_for_slack()
                return
            if growth_bytes + self._cache.table_bytes > self._ledger.free_bytes:
                return
        since = (self._odometer - self._last_eviction) / max(1, self.spec.shard.num_rows)
        self._cache.insert_negative(codes, (frequencies * since).astype(np.int64))
        self.metrics.negative_insertions += codes.size
        self._account_cache()

    def _ask_for_slack(self) -> None:
        """Have the border moved a little, between two blocks, when enough tuples have left."""
        limit = self._cache.nbytes + self._slack()
        if self._buffer is None and limit <= self._shared_bytes - self._shared_bytes // _LEAST_WINDOW_SHARE:
            self._ask_for_border(limit)

    def _ask_for_border(self, cache_limit_bytes: int) -> None:
        self._asked_limit_bytes = cache_limit_bytes
        self._admission_limit = self._capacity_beside(cache_limit_bytes)

    # ---------------------------------------------------------------- other budgets, restarts

    def _replan(self, spec: JoinSpec) -> None:
        super()._replan(spec)
        self._abandon_round()

    def _abandon_round(self) -> None:
        """Begin to count again; what is cached stays."""
        self._phase, self._phase_end, self._candidates = Phase.COUNTING, None, None
        self._asked_limit_bytes = self._admission_limit = None
        self._learning_account.resize(0)
        self._drop_buffer()

    def _put_cache_aside(self) -> Any:
        kept = super()._put_cache_aside(), self._switching_account.held_bytes
        self._switching_account.resize(0)
        return kept

    def _put_cache_back(self, kept: Any) -> None:
        shared, switching_bytes = kept
        super()._put_cache_back(shared)
        self._switching_account.resize(switching_bytes)

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._drop_buffer()
        self._begin_anew()
