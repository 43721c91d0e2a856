"""MetadataTree: a tree of joins that use the promises of their inputs in every node.

Result: exactly that of `MJoinTree`, for inputs that share one join attribute. An input's promises are used and checked
in the node that reads it. What that node propagates (`MetadataJoin.take_punctuations`) is a punctuation of its results
in the node above, so it reaches all nodes up to the output. The results of a node are unique if all its inputs are.
Clusters and orders stay in their node, because a join does not preserve them, but the values they close are propagated.

The results of a node are not checked: their promises follow from those checked on arrival.

Ding, Rundensteiner, Heineman: MJoin: A Metadata-Aware Stream Join Operator (2003).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.multiway.planner import MultiwayPlan
from dovetail.joins.multiway.spec import MJoinSpec
from dovetail.joins.multiway.tree import MJoinTree, TreeJoin
from dovetail.joins.multiway.tree_nodes import TreeNode, internal_names
from dovetail.joins.promises.join import MetadataJoin
from dovetail.joins.promises.metrics import MetadataMetrics
from dovetail.joins.promises.punctuation import BoundPunctuation, Punctuation
from dovetail.joins.promises.spec import Metadata

__all__ = ["MetadataTree", "node_metadata", "written_names"]


def node_metadata(metadata: Metadata, node: TreeNode, is_last: bool) -> Metadata:
    """The metadata of one node's inputs; every node but the last propagates punctuations."""
    unique = set(metadata.keys)
    keys = [name for name in node.inputs if name in unique]
    # Each join value is then in at most one combination of the inputs below.
    keys += [name for name, below in node.lower.items() if set(below.leaves) <= unique]
    return replace(
        metadata,
        keys=keys,
        clustered=[name for name in node.inputs if name in metadata.clustered],
        ordered={name: order for name, order in metadata.ordered.items() if name in node.inputs},
        propagate=metadata.propagate if is_last else True,
    )


def written_names(spec: MJoinSpec, node: TreeNode) -> dict[str, dict[str, str]]:
    """For each input of a node, the user's names of its join columns by the internal ones."""
    internal = internal_names(spec.graph) if node.spec is not spec else {}
    return {name: {inside: column for (n, column), inside in internal.items() if n == name} for name in node.inputs}


class MetadataTree(MJoinTree):
    """A tree of `MetadataJoin`; see the module docstring, and `MJoinTree` for the interface.

    Parameters
    ----------
    spec
        The join, on one attribute that all inputs share.
    plan
        Its tree.
    metadata
        What is known about the inputs.

    Examples
    --------
    >>> from dovetail.joins.multiway import mjoin_spec
    >>> from dovetail.joins.multiway.planner import plan_multiway
    >>> schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "abc"}
    >>> spec = mjoin_spec(schemas, on="k", budget="1MB")
    >>> tree = MetadataTree(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]), Metadata(goal="memory"))
    >>> for name in "abc":
    ...     out = [rows.to_pylist() for rows in tree.offer(name, pa.record_batch({"k": [1], name: [name]}))]
    >>> out
    [[{'k': 1, 'a': 'a', 'b': 'b', 'c': 'c'}]]
    >>> for name in "abc":
    ...     left = list(tree.punctuate(name, Punctuation({"k": 1})))
    >>> tree.state_rows(), tree.take_punctuations()
    ({'a': 0, 'b': 0, '~join 0': 0, 'c': 0}, [Punctuation(k = 1)])
    """

    kind = "metadata_tree"

    def __init__(self, spec: MJoinSpec, plan: MultiwayPlan, metadata: Metadata | None = None) -> None:
        self.metadata = Metadata() if metadata is None else metadata
        self.metadata.check(spec)
        self._last = len(list(plan.root.nodes())) - 1
        super().__init__(spec, plan)
        self._written = {inside: name for name, inside in self._final.items()}

    def _new_join(self, node: TreeNode) -> MetadataJoin:
        metadata = node_metadata(self.metadata, node, node.number == self._last)
        return MetadataJoin(node.spec, metadata, node.lower, written_names(self.spec, node))

    def _join_of(self, node: TreeJoin) -> MetadataJoin:
        assert isinstance(node.join, MetadataJoin)
        return node.join

    def _after(self, node: TreeJoin) -> Iterator[pa.RecordBatch]:
        """Pass punctuations to the parent, which has all results of this node by now."""
        parent = node.parent
        if parent is not None:
            found = self._join_of(node).take_punctuations()
            if found:
                yield from self._run(parent, self._join_of(parent).punctuate(node.name, *found))

    # ---------------------------------------------------------------- promises

    def punctuate(self, name: str, *punctuations: Punctuation) -> Iterator[pa.RecordBatch]:
        """See `MetadataJoin.punctuate`."""
        node = self._node_of(name)
        bound = [BoundPunctuation.of(each, name, self.spec.schemas[name]) for each in punctuations]
        inside = [each.renamed(self._internal[name]).unbound() for each in bound]
        return self._run(node, self._join_of(node).punctuate(name, *inside))

    def punctuate_rows(
        self,
        name: str,
        rows: pa.RecordBatch,
        times: Int64Array | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """See `MetadataJoin.punctuate_rows`."""
        node, names = self._node_of(name), self._internal[name]
        inside = rows.rename_columns([names[column] for column in rows.schema.names])
        named = None if columns is None else [names[column] for column in columns]
        return self._run(node, self._join_of(node).punctuate_rows(name, inside, times, named))

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        """See `MetadataJoin.end_batch`; for every node, lower ones first."""
        for node in self._nodes:
            yield from self._run(node, self._join_of(node).end_batch())

    def take_punctuations(self) -> list[Punctuation]:
        """See `MetadataJoin.take_punctuations`; those of the last node."""
        found = self._join_of(self._nodes[-1]).take_punctuations()
        return [Punctuation({self._written[name]: value for name, value in p.columns.items()}) for p in found]

    def take_quarantined(self) -> list[tuple[str, pa.RecordBatch]]:
        """See `MetadataJoin.take_quarantined`; for all inputs."""
        found = [each for node in self._nodes for each in self._join_of(node).take_quarantined()]
        return [(name, self._as_written(name, rows)) for name, rows in found]

    @property
    def metrics(self) -> MetadataMetrics:
        """The counters of all nodes; output rows and propagated punctuations are those of the last."""
        last = self._nodes[-1].join.metrics.as_dict()
        return MetadataMetrics(**{**self._counters(), "punctuations_out": last["punctuations_out"]})

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the state; a snapshot with another fingerprint is refused."""
        return {**super().fingerprint(), "metadata": self.metadata.fingerprint()}
