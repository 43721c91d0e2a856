"""The cache phase: answers cache hits at once; the other tuples must wait.

Every offered tuple is looked up in the cache first. Any tuple may wait instead of being answered: the cache never
decides what the result is, only when it is emitted.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.cache.relation_cache import CacheProbe, RelationCache
from dovetail.joins.memory_plan import MAX_BATCH_ROWS
from dovetail.joins.output.columns import BatchRows
from dovetail.joins.phases.admission import FEWEST_ADMITTED, Answer, NullKeys, Offered
from dovetail.joins.state import JoinState
from dovetail.kernels.sorted_codes import expand_ranges

__all__ = ["CacheAnswer", "CacheFront"]


@dataclass(frozen=True)
class CacheAnswer(Answer):
    """The cache's answer for rows of a piece."""

    probe: CacheProbe
    joined: Int64Array | None = field(repr=False)  # the piece's row of each pair; None: tuples only
    hits: int  # rows answered with relation rows
    rejected: int  # pairs that did not match


class CacheFront:
    """Answers cache hits and tuples with a NULL key; see `dovetail.joins.phases.admission.Front`."""

    def __init__(self, state: JoinState, cache: RelationCache) -> None:
        self.state, self.cache = state, cache
        self._plain = NullKeys(state)
        self._needs_pairs = state.spec.how in ("inner", "left") or state.results.plan.verifies
        self._probe: CacheProbe | None = None
        self._known: tuple[int, CacheProbe] | None = None
        self._expected_miss_share = 1.0

    def widest_result(self, offered: Offered) -> int:
        return self._plain.widest_result(offered) + self.cache.widest

    def finish(self) -> None:
        self._probe = self._known = None

    def rows_together(self) -> int:
        state = self.state
        if state.spec.ordered:
            return self._plain.rows_together()
        room = MAX_BATCH_ROWS if state.window is None else state.window.capacity - len(state.window)
        # As many of the rows should miss as there is room for; per-row data takes memory.
        most = max(FEWEST_ADMITTED, min(2 * state.results.max_rows, MAX_BATCH_ROWS))
        return int(min(max(room / self._expected_miss_share, FEWEST_ADMITTED), most))

    def select_waiting(self, offered: Offered) -> Int64Array:
        state = self.state
        codes, is_null = offered.codes, offered.is_null
        if len(self.cache) == 0:
            self._probe = None
            return np.flatnonzero(~is_null)
        probe = self._probe_once(codes)
        is_waiting = probe.is_miss & ~is_null
        self._expected_miss_share = max(1 / 64, np.count_nonzero(is_waiting) / max(1, codes.size))
        if state.spec.ordered and state.pending:
            # Results of tuples that need not wait are held for those that do; without room for that, more tuples wait.
            results = np.cumsum(np.where(is_null | is_waiting, 0, np.maximum(probe.counts, 1)))
            fitting = int(np.searchsorted(results, self._results_that_can_be_held(), side="right"))
            is_waiting[fitting:] = ~is_null[fitting:]
        self._probe = probe
        return np.flatnonzero(is_waiting)

    def _probe_once(self, codes: Int64Array) -> CacheProbe:
        """Probe codes, unless they were the last ones probed: tuples that wait for room come again."""
        place = codes.__array_interface__["data"][0]
        if self._known is not None:
            known_place, known = self._known
            if known_place == place and len(known) >= codes.size and known.revision == self.cache.revision:
                return known.part(0, codes.size)
        probe = self.cache.probe(codes)
        self._known = place, probe
        return probe

    def _results_that_can_be_held(self) -> int:
        state = self.state
        free_bytes = state.ledger.free_bytes - 2 * state.memory.output_bytes
        return max(0, int(free_bytes / (state.results.plan.row_bytes + 8)))

    def results_per_row(self, offered: Offered) -> Int64Array:
        if self._probe is None or not self._needs_pairs:
            return self._plain.results_per_row(offered)
        return np.where(offered.is_null, 0, self._probe.counts[: len(offered)])

    def prepare(self, piece: Offered, answered: Int64Array, start: int) -> Answer:
        if self._probe is None:
            return self._plain.prepare(piece, answered, start)
        return self._answer_of(piece, answered, self._probe.part(start, start + len(piece)))

    def _answer_of(self, piece: Offered, answered: Int64Array, probe: CacheProbe) -> CacheAnswer:
        """Build what is emitted for rows of a piece that are in the cache."""
        state = self.state
        self.cache.require_unchanged(probe)
        counts = np.where(piece.is_null, 0, probe.counts)[answered]
        hits = int(np.count_nonzero(counts))
        is_matched = counts > 0
        owners, relation, rejected = answered, None, 0
        if self._needs_pairs:
            which, rows_known = expand_ranges(probe.first_rows[answered], counts.astype(np.int32))
            relation, owners, rejected = self._matching_rows(piece.rows, answered[which], rows_known)
            is_matched = np.isin(answered, owners) if rejected else is_matched
        matched = int(np.count_nonzero(is_matched))
        joined, rows = (None if relation is None else owners), None
        how, plan, side = state.spec.how, state.results.plan, BatchRows(piece.rows)
        if how in ("semi", "anti"):
            owners = answered[is_matched if how == "semi" else ~is_matched]
            batch = plan.unmatched(side, owners) if owners.size else None
        else:
            assert relation is not None
            if how == "left" and matched < answered.size:
                alone = answered[~is_matched]
                rows = np.concatenate([np.arange(owners.size), np.full(alone.size, -1)])
                owners = np.concatenate([owners, alone])
                if state.spec.ordered:
                    order = np.argsort(owners, kind="stable")
                    owners, rows = owners[order], rows[order]
            batch = plan.joined(side, owners, relation, rows) if owners.size else None
        unmatched = int(answered.size) - matched
        return CacheAnswer(batch, owners, matched, unmatched, probe, joined, hits, rejected)

    def _matching_rows(
        self, batch: pa.RecordBatch, positions: Int64Array, rows: Int64Array
    ) -> tuple[pa.RecordBatch, Int64Array, int]:
        """The relation's half of the matching pairs, the stream's half, and the number of rejected pairs."""
        state = self.state
        if not self.cache.keeps_rows:
            return pa.RecordBatch.from_pylist([], schema=self.cache.schema), positions, 0
        order, relation = self.cache.gather(rows)
        if order is not None and state.spec.ordered:
            back = np.empty(order.size, np.int64)
            back[order] = np.arange(order.size)
            relation = relation.take(pa.array(back))
        elif order is not None:
            positions = positions[order]
        if not state.results.plan.verifies:
            return relation, positions, 0
        count = positions.size
        kept = np.flatnonzero(state.results.plan.verify(BatchRows(batch), positions, relation, np.arange(count)))
        if kept.size < count:
            relation, positions = relation.take(pa.array(kept)), positions[kept]
        return relation, positions, count - kept.size

    def count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        state = self.state
        self._plain.count_answer(answer, piece, answered)
        if not isinstance(answer, CacheAnswer):
            return
        metrics, probe = state.metrics, answer.probe
        metrics.cache_hits += answer.hits
        metrics.negative_hits += answered.size - answer.hits - int(np.count_nonzero(piece.is_null[answered]))
        metrics.pairs_rejected += answer.rejected
        self.cache.observe(probe, answered[~piece.is_null[answered]])
        if state.shedding is not None and answer.joined is not None:
            state.shedding.observe(piece.codes[answer.joined])
