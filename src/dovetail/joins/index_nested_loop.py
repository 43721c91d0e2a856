"""Index nested loops: one index lookup per stream tuple. The papers' baseline; see `dovetail.joins.phases.one_by_one`.

What it computes
    As `auto`: joins on equal keys, with or without a residual condition.
Memory
    The resident index, the buffer pool, one page in flight, one batch of matches and one of output.
What is emitted when
    Everything at once, in stream order, so ``ordered`` costs nothing. No tuple waits, except one with more matches
    than a batch holds, which is emitted in several: if the iterator is abandoned, the next call continues with it.
What a restart keeps
    Counters, and such a tuple. The pool starts empty.
"""

from functools import partial

from dovetail.joins.engine import Phases, SemiStreamOperator, require_equality
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.phases.one_by_one import OneByOne, plan_pages
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving

__all__ = ["IndexNestedLoopJoin"]


class IndexNestedLoopJoin(SemiStreamOperator):
    """Join a stream with a relation by one index lookup per tuple.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> from dovetail.joins.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = IndexNestedLoopJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> [row for batch in join.offer(stream) for row in batch.to_pylist()]
    [{'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}, {'id': 7, 'city': None}]
    """

    kind = "index_nested_loop"

    def __init__(self, spec: JoinSpec) -> None:
        require_equality(self.kind, spec)
        plan = partial(plan_pages, self.kind)
        state = JoinState(self.kind, spec, plan)
        loop = OneByOne(state, BlockJoin(state, Leaving(state)))

        def before_replan(changed: JoinSpec) -> None:
            plan(changed)  # may refuse, before the pool is dropped
            loop.clear()

        super().__init__(Phases(state, loop, loop, alone=loop.alone, before_replan=before_replan))
