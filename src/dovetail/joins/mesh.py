"""MESHJOIN: a stream meets a relation that is scanned over and over (Polyzotis et al., 2007, section 3).

What it computes
    As `auto`, and also joins by any condition without equality.
How
    The relation is read cyclically in blocks of b rows, without an index. Stream tuples enter the window in chunks of
    at most w per step; each block is joined with the whole window; a chunk leaves when it has met every row exactly
    once. See `dovetail.joins.phases.scan`.
Memory
    One block, one batch of output, and the window, which gets the rest of the budget; with ``ordered``, held results.
    A block that is a view of mapped pages takes none of the budget, and is as long as the relation's record batch:
    that makes fewer, longer steps, whose fixed costs would otherwise dominate at small budgets.
What is emitted when
    inner: each pair when its row's block is read. semi: a tuple at its first match. left and anti: unmatched tuples
    when they leave. Tuples with a NULL key at once.
What a restart keeps
    The window, the scan position, held results, counters.
"""

from dovetail.joins.engine import Phases, SemiStreamOperator
from dovetail.joins.matching import matcher_for
from dovetail.joins.memory_plan import MemoryPlan, plan_memory
from dovetail.joins.phases.admission import Admission, NullKeys
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.phases.scan import Scan, reads_in_place
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving

__all__ = ["MeshJoin"]


class MeshJoin(SemiStreamOperator):
    """Join a stream with a relation by a cyclic scan.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> from dovetail.joins.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = MeshJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> list(join.offer(stream)), join.pending
    ([], 2)
    >>> [row for batch in join.drain() for row in batch.to_pylist()]
    [{'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}, {'id': 7, 'city': None}]
    """

    kind = "mesh"
    needs_equality = False

    def __init__(self, spec: JoinSpec) -> None:
        state = JoinState(self.kind, spec, _plan)
        leaving = Leaving(state)
        self._scan = Scan(state, BlockJoin(state, leaving, reads_in_place), leaving)
        intake = Admission(state, NullKeys(state), self._scan.deadline, self._one_step)
        super().__init__(Phases(state, intake, self._scan))

    @property
    def position(self) -> int:
        """The relation row at which the next block starts."""
        return self._scan.position


def _plan(spec: JoinSpec) -> MemoryPlan:
    per_tuple = matcher_for(spec).bytes_per_tuple
    return plan_memory(spec, who="mesh", bytes_per_tuple=per_tuple, is_block_in_place=reads_in_place(spec))
