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

import math
from collections.abc import Iterator
from enum import Enum

import numpy as np
import pyarrow as pa

from dovetail.kernels.frequent import frequent_codes
from dovetail.kernels.value_table import ValueTable
from dovetail.operators.adaptive import CYCLES_PER_EVICTION, AdaptiveCacheJoin, Objective
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.spec import JoinSpec
from dovetail.operators.switching import CANDIDATE_LOAD, ENTRY_BYTES, Candidates, Decision, SwitchingBuffer

__all__ = ["BalancedJoin"]

_MOST_SWITCHED_SHARE = 4  # the part of what is shared that may be switched at once
_CANDIDATE_SHARE = 0.75  # a candidate's first count may be this much below what would be worth caching


class Phase(Enum):
    """The cycles of a round."""

    COUNTING = 1
    MAKING_ROOM = 2
    SWITCHING = 3
    PHASE_OUT = 4


class BalancedJoin(AdaptiveCacheJoin):
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
    # Half of what the others have: tuples that wait and rows that are cached make better use of it.
    _output_share = 32

    def __init__(self, spec: JoinSpec, *, objective: Objective = "rate", switching_factor: float = 1.0) -> None:
        super().__init__(spec, objective, switching_factor)
        self._begin_round()

    def _begin_round(self) -> None:
        self._phase = Phase.COUNTING
        self._phase_end: int | None = None
        self._candidates: Candidates | None = None
        self._buffer: SwitchingBuffer | None = None

    @property
    def phase(self) -> Phase:
        """Where in its round the operator is."""
        return self._phase

    # ================================================================ the disk phase

    def _reads_in_place(self, spec: JoinSpec) -> bool:
        # The paper's block is part of its memory, and here also the room through which the window is moved.
        return False

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
        if self._is_tenth_cycle() and self._buffer is None:
            self._evict()
        self._move_asked_border()
        self._look_over_window()

    # ---------------------------------------------------------------- the round

    def _begin_phase(self) -> None:
        """Begin a cycle with the block that was just read; there are waiting tuples now, to be counted."""
        if self._phase is Phase.COUNTING:
            self._candidates = self._choose_candidates()
        elif self._phase is Phase.MAKING_ROOM:
            is_first_look = self._buffer is None
            if is_first_look:
                self._decide()
            if self._buffer is None:
                self._phase = Phase.COUNTING
                self._candidates = self._choose_candidates()
            elif self._move_border(self._wanted_limit()):
                self._freeze(has_newer_count=not is_first_look)
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

    def _choose_candidates(self) -> Candidates | None:
        assert self._window is not None
        capacity = ValueTable.capacity_within(self._learning_bytes, CANDIDATE_LOAD)
        tuple_bytes = self._window_tuple_bytes()
        worth = self.switching_factor * (self._row_bytes + ENTRY_BYTES) / (tuple_bytes * self._scale())
        codes, waiting = frequent_codes(self._window.index, max(1, math.ceil(_CANDIDATE_SHARE * worth)), capacity)
        is_new = self._cache.probe(codes).is_miss
        codes, waiting = codes[is_new], waiting[is_new]
        if codes.size == 0:
            self._learning_account.resize(0)
            return None
        candidates = Candidates(codes, waiting, self._scale())
        return candidates if self._try_resize(self._learning_account, candidates.table.nbytes) else None

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
        room = self._most_for_cache() - self._cache.nbytes - self._slack()
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
        buffer_bytes = ValueTable.nbytes_of(max(1, len(decision)), CANDIDATE_LOAD) + decision.held_bytes
        if len(decision) and self._ledger.has_room_for(buffer_bytes):
            self._buffer = SwitchingBuffer(decision)
            if not self._is_worth_the_room(decision):
                self._buffer = None
                return
            self._switching_account.resize(self._buffer.nbytes)
            self._ask_for_border(self._wanted_limit())
            self._asked_limit_bytes = None

    def _is_worth_the_room(self, decision: Decision) -> bool:
        """Whether what the decided values save until they may be evicted makes up for tuples kept out to make room.

        A few values that came often by chance, in a stream in which none does, would otherwise cost half a window each
        round.
        """
        kept_out = self.pending - self._capacity_beside(self._wanted_limit())
        return bool(decision.frequencies.sum() * CYCLES_PER_EVICTION >= kept_out)

    def _freeze(self, has_newer_count: bool) -> None:
        """Begin to switch; where room had to be made, tuples can be counted once more, against what came by chance."""
        assert self._buffer is not None
        assert self._window is not None
        self._phase = Phase.SWITCHING
        if not has_newer_count:
            return
        decision = self._buffer.decision
        now = self._window.index.count(decision.codes) * self._scale()
        frequencies = (2 * decision.frequencies + now) / 3
        saved_bytes = self._saved_bytes(frequencies)
        kept = saved_bytes > self.switching_factor * self._cached_bytes(decision.row_counts)
        if kept.all() or not kept.any():
            return
        nbytes = int(np.ceil(self._cached_bytes(decision.row_counts[kept]).sum()))
        confirmed = Decision(decision.codes[kept], decision.row_counts[kept], frequencies[kept], nbytes)
        self._buffer = SwitchingBuffer(confirmed)
        self._switching_account.resize(self._buffer.nbytes)

    def _wanted_limit(self) -> int:
        """What the cache will need when the decided values are in it."""
        wanted = self._cache.nbytes + self._slack()
        if self._buffer is not None:
            wanted += self._buffer.most_nbytes + max(0, self._cache.table_growth_bytes(len(self._buffer.decision)))
        return max(wanted, self._cache_limit_bytes)

    def _collect(self, block: RelationBlock) -> None:
        assert self._buffer is not None
        self._buffer.collect(block)
        is_within = self._cache.nbytes + self._buffer.nbytes <= self._cache_limit_bytes
        if not is_within or not self._try_resize(self._switching_account, self._buffer.nbytes):
            # Rows turned out to be longer than expected: next time that is known.
            self._row_bytes *= 1.25
            self._drop_buffer()

    def _switch(self, buffer: SwitchingBuffer) -> None:
        """Move all tuples from s_B to H_R."""
        decision = buffer.decision
        page_bytes = self._memory.output_bytes
        growth_bytes = max(0, self._cache.table_growth_bytes(len(decision)))
        copied_bytes = page_bytes if buffer.is_contiguous() else buffer.nbytes
        if self._cache.nbytes + buffer.rows_nbytes + growth_bytes > self._cache_limit_bytes:
            return
        if copied_bytes + growth_bytes + self._cache.table_bytes > self._ledger.free_bytes + page_bytes:
            return
        if self._cache.keeps_rows:
            codes, pages = buffer.pages(page_bytes)
            is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
            order = np.argsort(decision.codes)
            place = order[np.searchsorted(decision.codes[order], codes[is_first])]
            self._drop_buffer()
            self._cache.insert(codes, pages, self._credit(decision.frequencies[place]))
        else:
            self._drop_buffer()
            self._cache.insert_counts(decision.codes, decision.row_counts, self._credit(decision.frequencies))
        self.metrics.cache_insertions += len(decision)
        if self._cache.num_rows:
            self._row_bytes = (self._cache.nbytes - self._cache.table_bytes) / self._cache.num_rows
        self._account_cache()
        self._tidy_cache()
        self._give_back()

    def _drop_buffer(self) -> None:
        self._buffer = None
        self._switching_account.resize(0)

    # ---------------------------------------------------------------- other budgets, restarts

    def _replan(self, spec: JoinSpec) -> None:
        super()._replan(spec)
        self._abandon_round()

    def _abandon_round(self) -> None:
        """Begin to count again; what is cached stays."""
        self._asked_limit_bytes = self._admission_limit = None
        self._learning_account.resize(0)
        self._switching_account.resize(0)
        self._begin_round()

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._begin_round()
