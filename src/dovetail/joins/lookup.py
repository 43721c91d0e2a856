"""Batched lookups: every tuple is answered by index on arrival, and nothing waits.

What it computes
    As `auto`: joins on equal keys, with or without a residual condition.
How
    Each distinct code of a batch is looked up once. The rows are gathered in disk order and taken as often as tuples
    need them. A cache may stand in front: rows of hot values, in this process or in a file that all workers of a
    host map.
Memory
    The resident index, per-tuple data of a batch, the rows gathered for it, and one batch of output. Batches are cut
    by rows and by bytes before rows are read. A row wider than the budget is a `BudgetError`.
What is emitted when
    As for `index_nested_loop`: everything at once, in stream order.
What a restart keeps
    Counters, and a tuple that is emitted in several batches.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from dovetail.joins.engine import Phases, SemiStreamOperator, require_equality
from dovetail.joins.phases.lookup import Lookup, Observe, plan_lookups
from dovetail.joins.phases.row_source import CachedRows, IndexedRows, RowCache
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState

__all__ = ["LookupJoin"]


class LookupJoin(SemiStreamOperator):
    """Join a stream with a relation by index, a batch at a time.

    Parameters
    ----------
    spec
        The join.
    cache
        Rows of some values, which are looked up here first; None: no cache.
    observe
        Called with the codes of every batch, their frequencies, and what was found.
    sweeps
        Whether as many tuples of a batch as the budget has room for are looked up together, in one pass over the
        relation. For rows that are read from a device: the more of them are read together, the less each costs.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.joins.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = LookupJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> [row for batch in join.offer(stream) for row in batch.to_pylist()]
    [{'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}, {'id': 7, 'city': None}]
    """

    kind = "lookup"

    def __init__(
        self,
        spec: JoinSpec,
        *,
        cache: RowCache | None = None,
        observe: Observe | None = None,
        sweeps: bool = False,
    ) -> None:
        require_equality(self.kind, spec)
        state = JoinState(self.kind, spec, partial(plan_lookups, self.kind))
        state.ledger.reserve("index", spec.shard.index_bytes)
        source = IndexedRows(state) if cache is None else CachedRows(cache, state)
        lookup = Lookup(state, source, observe)
        lookup.sweeps = sweeps
        super().__init__(Phases(state, lookup, _NothingWaits(), alone=lookup.alone))


class _NothingWaits:
    """The disk phase of a join without a window."""

    def step(self) -> Iterator[pa.RecordBatch]:
        yield from ()

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        yield from ()

    def restart_after(self, ticket: int) -> None:
        pass

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        return {}, {}

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        pass
