"""SSBJ: a cache of the join values that take less room there than their tuples take in the window (Naeem et al., 2018).

What it computes
    As `auto`: joins on equal keys, with or without a residual condition.
How
    The cache phase answers what it can; the rest goes through MESHJOIN's disk phase. Rounds of three cycles over the
    relation decide what is cached: counting, switching, phase-out; see `dovetail.joins.cache.rounds`.
Objectives
    ``"memory"``: n is counted as it is, so that the least memory serves the stream. ``"rate"``: the window takes the
    rest of the budget, and n is counted as if it were full. The inequality is then the condition for the highest
    service rate: with T tuples served per cycle, of which W wait, a byte of cache is worth more than a byte of window
    if n / (m v_R) > 1 / v_S. So the operator finds the best split itself.
Memory
    One block, one batch of output, the counters, cache and switching buffer, and the window, which gets the rest.
What is emitted when
    Answers of the cache at once, the rest as in MESHJOIN.
What a restart keeps
    The window, the scan position, held results, counters. The cache starts empty.
Not cached
    Values with more rows than fit a batch of output, or more than 4,094.
"""

from dovetail.joins.cache.border import Border, Objective, SharedMemory
from dovetail.joins.cache.front import CacheFront
from dovetail.joins.cache.policy import CachePolicy
from dovetail.joins.cache.rounds import Phase, Rounds
from dovetail.joins.engine import Phases, SemiStreamOperator, require_equality
from dovetail.joins.phases.admission import Admission
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.phases.scan import Scan
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving

__all__ = ["BalancedJoin"]

_OUTPUT_SHARE = 32  # half of the other strategies' share: waiting tuples and cached rows make better use of it


class BalancedJoin(SemiStreamOperator):
    """Join a stream with a relation by a cyclic scan behind a cache of the most valuable join values.

    Parameters
    ----------
    objective
        ``"rate"``: serve as much as the budget allows. ``"memory"``: hold as little as the stream needs.
    switching_factor
        s_f: by how much the waiting tuples of a value must outweigh its rows before it enters the cache, and its rows
        the tuples before it is evicted. The paper finds 1 to be best.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> from dovetail.joins.spec import join_spec
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
        require_equality(self.kind, spec)
        memory = SharedMemory(self.kind, _OUTPUT_SHARE)
        state = JoinState(self.kind, spec, memory.plan)
        leaving = Leaving(state)
        # No views: the paper's block is part of its memory, and the window is moved through it.
        self._scan = scan = Scan(state, BlockJoin(state, leaving), leaving)
        border = Border(state, scan, memory, objective)
        policy = CachePolicy(state, scan, border, switching_factor)
        leaving.on_left = policy.note_left
        scan.observer = self._rounds = rounds = Rounds(state, scan, border, policy)
        front = CacheFront(state, border.cache)

        def begin_anew() -> None:
            front.finish()
            policy.begin_anew()
            rounds.begin_round()

        border.on_forgotten = begin_anew
        intake = Admission(state, front, scan.deadline, self._one_step, room_limit=border)
        super().__init__(Phases(state, intake, scan, border, after_replan=rounds.abandon))
        self._border, self._policy = border, policy

    @property
    def phase(self) -> Phase:
        """The current phase of its round."""
        return self._rounds.phase

    @property
    def switching_factor(self) -> float:
        """s_f."""
        return self._policy.switching_factor

    @property
    def position(self) -> int:
        """The relation row at which the next block starts."""
        return self._scan.position
