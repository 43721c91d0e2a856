"""HYBRIDJOIN: the oldest waiting tuple decides which block of the relation to read (Naeem et al., 2011, section 4).

What it computes
    As `auto`: joins on equal keys, with or without a residual condition.
How
    Waiting tuples are in a hash table and a queue (the window). The code at the front of the queue picks a block
    through the relation's index; the block is joined with all waiting tuples, and tuples that found their rows leave.
    See `dovetail.joins.phases.visit`. `step` does not depend on arrivals: it continues while tuples wait.
No match
    A code that the index excludes never waits. A code that picked a visit and found nothing leaves unmatched. While
    such codes turn up, each visit also looks for other waiting codes that should have been in its block and were
    not; they leave too.
Memory
    The relation's resident index, one block, one batch of output, and the window, which gets the rest of the budget;
    with ``ordered``, held results.
What is emitted when
    inner: each pair when its row's block is read. semi: a tuple at its first match. left and anti: unmatched tuples
    at the end of their visit. ``ordered``: a finished tuple stays in the window until those before it are finished.
What a restart keeps
    The window, an unfinished visit, held results, counters.
"""

from dovetail.joins.engine import Phases, SemiStreamOperator, require_equality
from dovetail.joins.memory_plan import MemoryPlan, plan_memory
from dovetail.joins.phases.admission import Admission
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.phases.visit import NotExcluded, Visits, age_classes
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving

__all__ = ["HybridJoin"]


class HybridJoin(SemiStreamOperator):
    """Join a stream with a relation, reading the block that the oldest waiting tuple needs.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> from dovetail.joins.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7, 1], "id": [2, 7, 1]})
    >>> join = HybridJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> [row for batch in join.offer(stream) for row in batch.to_pylist()], join.pending
    ([{'id': 7, 'city': None}], 2)
    >>> [row for batch in join.step() for row in batch.to_pylist()], join.pending
    ([{'id': 1, 'city': 'Rome'}, {'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}], 0)
    """

    kind = "hybrid"

    def __init__(self, spec: JoinSpec) -> None:
        require_equality(self.kind, spec)
        state = JoinState(self.kind, spec, _plan, age_classes)
        state.ledger.reserve("index", spec.shard.index_bytes)
        leaving = Leaving(state)
        visits = Visits(state, BlockJoin(state, leaving), leaving, self._one_step)
        intake = Admission(state, NotExcluded(state), visits.deadline, self._one_step)
        super().__init__(Phases(state, intake, visits))


def _plan(spec: JoinSpec) -> MemoryPlan:
    return plan_memory(spec, who="hybrid", other_bytes=spec.shard.index_bytes)
