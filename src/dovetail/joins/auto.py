"""The strategy that chooses by itself: a cache in front, then lookup or scan, whichever is cheaper.

What it computes
    The exact join of every stream tuple with one version of a relation's shard: equality of keys, with or without a
    residual condition; one-to-many and many-to-many; inner, left, semi, anti.
How
    The cache phase answers what it can. For the rest there are three ways, and any mixture of them is exact:

    lookup
        The index finds the rows of many tuples at once, on arrival or after they have waited.
    scan
        The window meets the relation block by block, as in MESHJOIN; tuples leave once they have met all their rows.
    skip
        If few tuples wait, a scan skips rows that none of them can need.

    Every offer compares a lookup of the batch with its share of a cycle; every step and drain compares a lookup of
    the waiting tuples with the rest of a scan. Costs are those of this host, corrected by observed times.
What is cached
    The cache inequality, as for `balanced`, but without rounds of cycles: when a block holds all rows of a join
    value, their number is known and the value can enter the cache at once. If tuples are looked up and reads wait
    for a device, the lookups are counted instead.
Exactness
    A tuple leaves early only if all rows of its code were in one block that it met; otherwise at its deadline, when
    it has met or skipped every row once. A waiting tuple is looked up for the rows it has not met.
Memory
    One block, one batch of output, the counters, the cache, and the window, which gets the rest.
What is emitted when
    Answers of cache and lookups at once; the rest as the scan meets it.
What a restart keeps
    The window, the scan position, held results, counters. The cache starts empty.
Not cached
    Values with more rows than fit a batch of output, or more than 4,094.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dovetail.core.errors import BudgetError
from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.explain import Plan
from dovetail.joins.cache.border import Border, Objective, SharedMemory
from dovetail.joins.cache.from_blocks import LearnsFromBlocks
from dovetail.joins.cache.from_lookups import LearnsFromLookups
from dovetail.joins.cache.front import CacheFront
from dovetail.joins.cache.policy import CachePolicy
from dovetail.joins.engine import Phases, SemiStreamOperator, require_equality
from dovetail.joins.explaining import BATCH_ROWS, DEVICE_READ_S, factors_for, plan_of
from dovetail.joins.memory_plan import MemoryPlan, with_blocks_in_place
from dovetail.joins.phases.admission import Admission, Offered
from dovetail.joins.phases.auto_scan import AutoScan
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.phases.choice import Choice, timed
from dovetail.joins.phases.lookup import Lookup
from dovetail.joins.phases.row_source import CachedRows, IndexedRows
from dovetail.joins.phases.scan import Scan, reads_in_place
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving

__all__ = ["AutoJoin"]

_USUAL_WINDOW = 65_536  # tuples: prices a probe before there is a window


class AutoJoin(SemiStreamOperator):
    """Join a stream with a relation by cache, scan and index, whichever is cheapest.

    Parameters
    ----------
    objective
        ``"rate"``: serve as much as the budget allows. ``"memory"``: hold as little as the stream needs.
    factors
        The costs of operations; None: `factors_for` the shard.
    switching_factor
        See `BalancedJoin`.
    learns
        Whether it fills a cache of its own; False behind another cache.
    observes
        Whether costs are corrected by observed times. If not, choices depend on the tuples alone.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> from dovetail.joins.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = AutoJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> given = [row for batch in join.offer(stream) for row in batch.to_pylist()]
    >>> given += [row for batch in join.drain() for row in batch.to_pylist()]
    >>> sorted(str(row["city"]) for row in given)
    ['Bergen', 'None', 'Oslo']
    >>> join.explain().strategy
    'auto'
    """

    kind = "auto"

    def __init__(
        self,
        spec: JoinSpec,
        *,
        objective: Objective = "rate",
        factors: CostFactors | None = None,
        switching_factor: float = 1.0,
        learns: bool = True,
        observes: bool = True,
    ) -> None:
        require_equality(self.kind, spec)
        self.factors = factors_for(spec.shard) if factors is None else factors
        memory = SharedMemory(self.kind)
        state = JoinState(self.kind, spec, lambda changed: _plan(memory, self.factors, changed))
        leaving = Leaving(state)
        blocks = BlockJoin(state, leaving, reads_in_place)
        self._scan = scan = Scan(state, blocks, leaving)
        border = Border(state, scan, memory, objective)
        policy = CachePolicy(state, scan, border, switching_factor)
        leaving.on_left = policy.note_left
        # Reads of a simulated disk take no time to observe.
        choice = Choice(state, self.factors, observes=observes and spec.shard.disk is None)
        from_blocks = LearnsFromBlocks(state, scan, border, policy, is_enabled=learns)
        from_lookups = LearnsFromLookups(state, border, policy) if learns else None
        observer = AutoScan(state, scan, leaving, from_blocks, choice)
        scan.observer, blocks.select_pairs = observer, observer.select_pairs
        front = CacheFront(state, border.cache)
        lookup = Lookup(state, IndexedRows(state))
        admission = Admission(state, front, scan.deadline, self._one_step, room_limit=border)
        intake = _Intake(state, border, choice, lookup, admission, from_lookups)
        disk = _Disk(state, scan, leaving, lookup, choice)

        def choose() -> None:
            choice.choose_scan()
            policy.cycles_waited = choice.cycles_waited

        def begin_anew() -> None:
            front.finish()
            policy.begin_anew()
            from_blocks.begin_anew()
            if from_lookups is not None:
                from_lookups.begin_anew()
            choose()

        def after_replan() -> None:
            from_blocks.drop()
            from_blocks.begin_anew()
            if from_lookups is not None:
                from_lookups.begin_anew()
            border.learning_account.resize(0)
            choose()

        border.on_forgotten, border.on_moved = begin_anew, choose
        choose()
        super().__init__(Phases(state, intake, disk, border, lookup.alone, after_replan=after_replan))
        self._border, self._policy, self.choice = border, policy, choice

    @property
    def position(self) -> int:
        """The relation row at which the next block starts."""
        return self._scan.position

    @property
    def leaves_early(self) -> bool:
        """Whether tuples leave a scan as soon as they have met all their rows."""
        return self.choice.leaves_early

    @property
    def looks_up(self) -> bool:
        """Whether a large batch offered now would be looked up rather than wait."""
        return self.choice.looks_up(BATCH_ROWS)

    def use_costs(self, factors: CostFactors) -> None:
        """Use other costs from now on."""
        self.factors = self.choice.factors = factors
        self.choice.choose_scan()
        self._policy.cycles_waited = self.choice.cycles_waited

    def expect(self, tuples: float | None) -> None:
        """Set how many tuples will share a cycle, if known; None: as many as the window holds."""
        self.choice.expected = tuples

    def explain(self, factors: CostFactors | None = None) -> Plan:
        """What it does now, its predicted cost, and what limits it."""
        metrics, choice = self.metrics, self.choice
        factors = self.factors if factors is None else factors
        hit_ratio = (metrics.cache_hits + metrics.negative_hits) / max(1, metrics.stream_tuples_in)
        looks_up = self.looks_up
        steps = max(1, -(-self.spec.shard.num_rows // self.block_rows))
        window = 0 if looks_up else self.window_capacity
        chunk = max(1, round(window / (steps * choice.cycles_waited))) if window else 0
        capacity = max(1, self.window_capacity)
        if looks_up:
            missed_s = choice.corrected_lookup_seconds(BATCH_ROWS) / BATCH_ROWS
            is_device = choice.page_seconds > DEVICE_READ_S
            read_s = 2 * choice.page_seconds if is_device else choice.lookup_read_seconds(BATCH_ROWS) / BATCH_ROWS
        else:
            missed_s = choice.scan_seconds(choice.leaves_early, capacity)
            whole_s = self.spec.shard.num_rows * self.spec.shard.row_bytes / factors.bandwidth_bytes_per_s
            read_s = (whole_s + choice.scan_read_seconds()) * choice.cycles_waited / capacity
        hit_s = factors.cache_probe_s.at(max(1, len(self._border.cache))) + factors.output_s
        per_tuple = factors.stream_read_s + hit_ratio * hit_s + (1.0 - hit_ratio) * missed_s
        read_s *= 1.0 - hit_ratio
        served = chunk / max(1e-9, 1.0 - hit_ratio) if chunk else 1.0
        cost = LoopCost({"read": read_s * served, "cpu": (per_tuple - read_s) * served}, stream_tuples=served)
        way = "looked up in the index on arrival" if looks_up else "joined by the scan"
        why = f"Tuples that miss the cache are {way}; the disk takes {read_s / per_tuple:.0%} of the time."
        access = "index" if looks_up else "scan"
        return plan_of(self, "auto", access, cost, why, chunk, window, self._border.cache.num_rows, hit_ratio)


class _Intake:
    """Looks tuples up on arrival or lets them wait, whichever is cheaper."""

    def __init__(
        self,
        state: JoinState,
        border: Border,
        choice: Choice,
        lookup: Lookup,
        admission: Admission,
        learning: LearnsFromLookups | None,
    ) -> None:
        self._state, self._border, self._choice = state, border, choice
        self._lookup, self._admission, self._learning = lookup, admission, learning

    def accept(self, offered: Offered, may_drop: bool = True) -> Iterator[pa.RecordBatch]:
        state, choice, lookup = self._state, self._choice, self._lookup
        learning = self._learning
        if learning is not None:
            learning.look_over()
        must_wait = state.spec.ordered and (state.pending or state.results.held.num_rows)
        may_look_up = not state.pairs_done and not must_wait
        if not (may_look_up and choice.looks_up(len(offered)) and self._has_room()):
            yield from self._admission.accept(offered, may_drop)
            return
        cache = self._border.cache
        lookup.source = CachedRows(cache, state) if len(cache) else IndexedRows(state)
        lookup.observe = learning.observe if learning is not None and choice.waits_for_device else None
        predicted_s = choice.lookup_seconds(len(offered))
        yield from timed(
            lookup.accept(offered),
            lambda seconds: choice.note_lookup(seconds, predicted_s),
            may_wait=choice.waits_for_device,
        )

    def _has_room(self) -> bool:
        """Whether lookups have room; an empty window gives up its memory."""
        if self._state.window is not None and not self._state.pending:
            self._state.replace_window(None)
        return self._lookup.has_room


class _Disk:
    """Scans for the waiting tuples or looks them up, whichever is cheaper."""

    def __init__(self, state: JoinState, scan: Scan, leaving: Leaving, lookup: Lookup, choice: Choice) -> None:
        self._state, self._scan, self._leaving, self._lookup, self._choice = state, scan, leaving, lookup, choice
        self._stayed = (0, 0)  # tuples with too many results for a lookup, and the tuples entered by then

    def step(self) -> Iterator[pa.RecordBatch]:
        state, choice = self._state, self._choice
        waiting = state.pending
        may_look_up = not state.spec.ordered and not state.pairs_done and self._stayed != (waiting, state.entered)
        if may_look_up and self._lookup.has_room and choice.prefers_lookup(waiting):
            predicted_s = choice.lookup_seconds(waiting)
            work = self._lookup.answer_waiting(self._leaving, self._scan.met_rows)
            yield from timed(
                work, lambda seconds: choice.note_lookup(seconds, predicted_s), may_wait=choice.waits_for_device
            )
            self._stayed = state.pending, state.entered
            if not state.pending:
                return
        left_before, read_before = state.metrics.tuples_left, state.metrics.relation_rows_read

        def note(seconds: float) -> None:
            rows = state.metrics.relation_rows_read - read_before
            choice.note_scan(seconds, choice.step_seconds(rows, waiting, state.metrics.tuples_left - left_before))

        yield from timed(self._scan.step(), note, may_wait=choice.waits_for_device)

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        return self._scan.before_accept()

    def restart_after(self, ticket: int) -> None:
        self._scan.restart_after(ticket)

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        return self._scan.save()

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        self._scan.load(tables, values)


def _plan(memory: SharedMemory, factors: CostFactors, spec: JoinSpec) -> MemoryPlan:
    """Divide a budget; if blocks are copied, with the block length at which a cycle serves most tuples."""
    plan = memory.plan(spec)
    if spec.block_rows is not None:
        return plan
    if reads_in_place(spec):
        # A block that is a view is free; its part of the budget stays, because the window is moved through it.
        return with_blocks_in_place(plan, spec)
    # Longer blocks need fewer reads and steps, but leave less for the window.
    best = (_cycle_seconds(factors, spec, plan.block_rows) / memory.shared_bytes, plan.block_rows)
    longer = 2 * plan.block_rows
    while longer <= spec.shard.num_rows and longer * spec.shard.row_bytes <= spec.budget.total_bytes / 2:
        try:
            memory.plan(replace(spec, block_rows=longer))
        except BudgetError:
            break
        best = min(best, (_cycle_seconds(factors, spec, longer) / memory.shared_bytes, longer))
        longer *= 2
    return memory.plan(replace(spec, block_rows=best[1]))


def _cycle_seconds(factors: CostFactors, spec: JoinSpec, block_rows: int) -> float:
    rows = spec.shard.num_rows
    steps = -(-rows // block_rows)
    read_s = rows * spec.shard.row_bytes / factors.bandwidth_bytes_per_s
    return read_s + rows * factors.probe_s.at(_USUAL_WINDOW) + steps * (factors.read_call_s + factors.step_s)
