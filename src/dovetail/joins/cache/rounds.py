"""How values enter the cache of SSBJ: rounds of three cycles over the relation (Naeem et al., 2018, algorithm 1).

counting
    The values with most waiting tuples are candidates; a cycle counts their relation rows.
switching
    At its start it is decided which candidates enter the cache: those whose rows, m v_R, take less memory than their
    waiting tuples, n v_S (the cache inequality), the best first. The cycle collects their rows in the switching
    buffer. Before it, the window gives up the room they will need.
phase-out
    At its start the rows move into the cache, and w adapts. Tuples that already wait finish in the disk phase; those
    that arrive now are answered by the cache.

Every ten cycles, values whose rows now outweigh the tuples they kept from waiting are evicted. Values without rows are
discovered when their tuples leave, and kept as negative entries while they are worth an entry.
"""

import math
from enum import Enum

import numpy as np

from dovetail.joins.cache.border import Border
from dovetail.joins.cache.policy import CYCLES_PER_EVICTION, CachePolicy
from dovetail.joins.cache.switching import CANDIDATE_LOAD, ENTRY_BYTES, Candidates, Decision, SwitchingBuffer
from dovetail.joins.phases.scan import Observer, Scan
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.state import JoinState
from dovetail.kernels.frequent import frequent_codes
from dovetail.kernels.value_table import ValueTable

__all__ = ["Phase", "Rounds"]

_MOST_SWITCHED_SHARE = 4  # the part of the shared memory that may be switched at once
_CANDIDATE_SHARE = 0.75  # a candidate's first count may be this share of what is worth caching


class Phase(Enum):
    """The cycles of a round."""

    COUNTING = 1
    MAKING_ROOM = 2
    SWITCHING = 3
    PHASE_OUT = 4


class Rounds(Observer):
    """Fills the cache beside a scan, in rounds."""

    def __init__(self, state: JoinState, scan: Scan, border: Border, policy: CachePolicy) -> None:
        self.state, self._scan, self.border, self.policy = state, scan, border, policy
        self.begin_round()

    def begin_round(self) -> None:
        """Start with a counting cycle."""
        self._phase = Phase.COUNTING
        self._phase_end: int | None = None
        self._candidates: Candidates | None = None
        self._buffer: SwitchingBuffer | None = None

    @property
    def phase(self) -> Phase:
        """The current phase of the round."""
        return self._phase

    # ================================================================ beside the scan

    def rows_to_read(self, rows: int) -> int:
        """A block belongs to one cycle, so that each cycle meets every row once."""
        return rows if self._phase_end is None else min(rows, self._phase_end - self._scan.odometer)

    def begin_block(self, block: RelationBlock) -> None:
        if self._phase_end is None and not self.state.pairs_done:
            self._begin_phase()

    def end_block(self, block: RelationBlock) -> None:
        if self._phase is Phase.COUNTING and self._candidates is not None:
            self._candidates.table.count_rows(block.codes)
        elif self._phase is Phase.SWITCHING and self._buffer is not None:
            self._collect(block)

    def after_advance(self) -> None:
        if self._phase_end is not None and self._scan.odometer >= self._phase_end:
            self._end_phase()
        if self.policy.is_tenth_cycle() and self._buffer is None:
            self.policy.evict()
        self.policy.move_asked_border()
        self.border.look_over_window()

    def abandon(self) -> None:
        """Restart counting; the cache stays."""
        self.border.learning_account.resize(0)
        self.border.switching_account.resize(0)
        self.begin_round()

    # ---------------------------------------------------------------- the round

    def _begin_phase(self) -> None:
        """Start a cycle with the block just read; there are waiting tuples now to count."""
        state, border = self.state, self.border
        if self._phase is Phase.COUNTING:
            self._candidates = self._choose_candidates()
        elif self._phase is Phase.MAKING_ROOM:
            is_first_look = self._buffer is None
            if is_first_look:
                self._decide()
            if self._buffer is None:
                self._phase = Phase.COUNTING
                self._candidates = self._choose_candidates()
            elif border.move(self._wanted_limit()):
                self._freeze(has_newer_count=not is_first_look)
            else:
                return
        self._phase_end = self._scan.odometer + state.spec.shard.num_rows

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
        state, border, policy = self.state, self.border, self.policy
        assert state.window is not None
        capacity = ValueTable.capacity_within(border.memory.learning_bytes, CANDIDATE_LOAD)
        tuple_bytes = border.tuple_bytes
        worth = policy.switching_factor * (policy.row_bytes + ENTRY_BYTES) / (tuple_bytes * policy.scale())
        codes, waiting = frequent_codes(state.window.index, max(1, math.ceil(_CANDIDATE_SHARE * worth)), capacity)
        is_new = border.cache.probe(codes).is_miss
        codes, waiting = codes[is_new], waiting[is_new]
        if codes.size == 0:
            border.learning_account.resize(0)
            return None
        candidates = Candidates(codes, waiting, policy.scale())
        return candidates if state.try_resize(border.learning_account, candidates.table.nbytes) else None

    # ---------------------------------------------------------------- switching

    def _decide(self) -> None:
        """Fix which candidates enter the cache."""
        state, border, policy = self.state, self.border, self.policy
        candidates = self._candidates
        assert candidates is not None
        assert state.window is not None
        waiting = state.window.index.count(candidates.table.items().codes).astype(np.int64)
        tuple_bytes, scale = border.tuple_bytes, policy.scale()
        codes, frequencies = candidates.without_rows(waiting, scale, tuple_bytes, policy.switching_factor)
        policy.insert_negative(codes, frequencies)
        room = border.most_for_cache - border.cache.nbytes - border.slack_bytes
        decision = candidates.decide(
            waiting,
            scale,
            tuple_bytes=tuple_bytes,
            row_bytes=policy.row_bytes,
            factor=policy.switching_factor,
            max_rows=state.results.max_rows,
            max_bytes=min(room, border.shared_bytes // _MOST_SWITCHED_SHARE),
        )
        self._candidates = None
        border.learning_account.resize(0)
        buffer_bytes = ValueTable.nbytes_of(max(1, len(decision)), CANDIDATE_LOAD) + decision.held_bytes
        if len(decision) and state.ledger.has_room_for(buffer_bytes):
            self._buffer = SwitchingBuffer(decision)
            if not self._is_worth_the_room(decision):
                self._buffer = None
                return
            border.switching_account.resize(self._buffer.nbytes)
            border.ask(self._wanted_limit())
            border.asked_limit_bytes = None

    def _is_worth_the_room(self, decision: Decision) -> bool:
        """Whether the chosen values save more until their eviction than the tuples kept out to make room cost.

        Otherwise a few values that are frequent by chance would cost half a window each round.
        """
        state, border = self.state, self.border
        kept_out = state.pending - border.capacity_beside(self._wanted_limit())
        return bool(decision.frequencies.sum() * CYCLES_PER_EVICTION >= kept_out)

    def _freeze(self, has_newer_count: bool) -> None:
        """Start switching; if room had to be made, count tuples once more to exclude chance."""
        state, border, policy = self.state, self.border, self.policy
        assert self._buffer is not None
        assert state.window is not None
        self._phase = Phase.SWITCHING
        if not has_newer_count:
            return
        decision = self._buffer.decision
        now = state.window.index.count(decision.codes) * policy.scale()
        frequencies = (2 * decision.frequencies + now) / 3
        saved_bytes = policy.saved_bytes(frequencies)
        kept = saved_bytes > policy.switching_factor * policy.cached_bytes(decision.row_counts)
        if kept.all() or not kept.any():
            return
        nbytes = int(np.ceil(policy.cached_bytes(decision.row_counts[kept]).sum()))
        confirmed = Decision(decision.codes[kept], decision.row_counts[kept], frequencies[kept], nbytes)
        self._buffer = SwitchingBuffer(confirmed)
        border.switching_account.resize(self._buffer.nbytes)

    def _wanted_limit(self) -> int:
        """The size of the cache with the chosen values."""
        border = self.border
        wanted = border.cache.nbytes + border.slack_bytes
        if self._buffer is not None:
            wanted += self._buffer.most_nbytes + max(0, border.cache.table_growth_bytes(len(self._buffer.decision)))
        return max(wanted, border.memory.cache_limit_bytes)

    def _collect(self, block: RelationBlock) -> None:
        state, border, policy = self.state, self.border, self.policy
        assert self._buffer is not None
        self._buffer.collect(block)
        is_within = border.cache.nbytes + self._buffer.nbytes <= border.memory.cache_limit_bytes
        if not is_within or not state.try_resize(border.switching_account, self._buffer.nbytes):
            # Rows are longer than expected: the next decision uses their real width.
            policy.row_bytes *= 1.25
            self._drop_buffer()

    def _switch(self, buffer: SwitchingBuffer) -> None:
        """Move all tuples from s_B to H_R."""
        state, border, policy = self.state, self.border, self.policy
        decision = buffer.decision
        page_bytes = state.memory.output_bytes
        growth_bytes = max(0, border.cache.table_growth_bytes(len(decision)))
        copied_bytes = page_bytes if buffer.is_contiguous() else buffer.nbytes
        if border.cache.nbytes + buffer.rows_nbytes + growth_bytes > border.memory.cache_limit_bytes:
            return
        if copied_bytes + growth_bytes + border.cache.table_bytes > state.ledger.free_bytes + page_bytes:
            return
        if border.cache.keeps_rows:
            codes, pages = buffer.pages(page_bytes)
            is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
            order = np.argsort(decision.codes)
            place = order[np.searchsorted(decision.codes[order], codes[is_first])]
            self._drop_buffer()
            border.cache.insert(codes, pages, policy.credit(decision.frequencies[place]))
        else:
            self._drop_buffer()
            border.cache.insert_counts(decision.codes, decision.row_counts, policy.credit(decision.frequencies))
        state.metrics.cache_insertions += len(decision)
        policy.measure_rows()
        border.account_cache()
        border.tidy_cache()
        border.give_back()

    def _drop_buffer(self) -> None:
        border = self.border
        self._buffer = None
        border.switching_account.resize(0)
