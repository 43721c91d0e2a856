"""A tree of MJoins: the results of one node are an input of the next.

The nodes share the budget equally (see `tree_nodes`). A node with outstanding results of spilled tuples holds back the
watermark of the nodes above it, which would otherwise purge matches of those results. The tree's own watermark decides
on arrival whether a tuple is late.

The output columns are those of one MJoin of all inputs. Join types other than inner need a tree of one node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import PlanError, StateError
from dovetail.joins.multiway.integers import integers_of
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.mjoin import MJoin
from dovetail.joins.multiway.output import MultiOutput
from dovetail.joins.multiway.planner import MultiwayPlan
from dovetail.joins.multiway.spec import MJoinSpec, TimeWindow
from dovetail.joins.multiway.tree_nodes import TreeNode, final_columns, internal_names, tree_nodes
from dovetail.joins.protocol import Snapshot

__all__ = ["MJoinTree", "TreeJoin"]

_FORMAT = 2
"""The snapshot format; it changes with the column names of inner nodes."""


class TreeJoin:
    """One MJoin of the tree, with its parent."""

    def __init__(self, about: TreeNode, join: MJoin) -> None:
        self.about = about
        self.join = join
        self.parent: TreeJoin | None = None

    @property
    def name(self) -> str:
        return self.about.name


class MJoinTree:
    """Executes a plan of `plan_multiway` with the interface of one `MJoin`; it computes codes itself.

    Examples
    --------
    >>> from dovetail.joins.multiway.planner import plan_multiway
    >>> from dovetail.joins.multiway.spec import mjoin_spec
    >>> schemas = {"a": pa.schema({"x": pa.int64()}), "b": pa.schema({"x": pa.int64(), "y": pa.int64()}),
    ...            "c": pa.schema({"y": pa.int64(), "v": pa.int64()})}
    >>> spec = mjoin_spec(schemas, on=[("a.x", "b.x"), ("b.y", "c.y")], budget="1MB")
    >>> tree = MJoinTree(spec, plan_multiway(spec.graph))
    >>> offered = [("a", {"x": [1]}), ("c", {"y": [2], "v": [9]}), ("b", {"x": [1], "y": [2]})]
    >>> [out.to_pylist() for name, rows in offered for out in tree.offer(name, pa.record_batch(rows))]
    [[{'x': 1, 'y': 2, 'v': 9}]]
    """

    kind = "mjoin_tree"

    def __init__(self, spec: MJoinSpec, plan: MultiwayPlan) -> None:
        self.spec = spec
        self.plan = plan
        self._output = MultiOutput(spec)
        self._nodes: list[TreeJoin] = []
        self._leaf_node: dict[str, TreeJoin] = {}
        by_name: dict[str, TreeJoin] = {}
        for about in tree_nodes(spec, plan):
            node = by_name[about.name] = TreeJoin(about, self._new_join(self._with_directory(about)))
            self._nodes.append(node)
            self._leaf_node |= dict.fromkeys(about.inputs, node)
            for name in about.lower:
                by_name[name].parent = node
        is_tree = len(self._nodes) > 1
        names = internal_names(spec.graph) if is_tree else {}
        self._internal = {
            name: {column: names.get((name, column), column) for column in schema.names}
            for name, schema in spec.schemas.items()
        }
        self._final = final_columns(spec) if is_tree else {name: name for name in self._output.schema.names}
        self._counts_places = is_tree and spec.window is not None and not isinstance(spec.window, TimeWindow)
        self._place = 0
        self.watermark: int | None = None

    def _new_join(self, node: TreeNode) -> MJoin:
        return MJoin(node.spec)

    def _with_directory(self, node: TreeNode) -> TreeNode:
        """Each node spills to its own directory, because operators number their files."""
        directory = self.spec.spill_directory
        if directory is None:
            return node
        return replace(node, spec=replace(node.spec, spill_directory=Path(directory) / f"node-{node.number}"))

    # ---------------------------------------------------------------- running

    @property
    def output_schema(self) -> pa.Schema:
        """See `MJoin.output_schema`."""
        return self._output.schema

    def offer(self, name: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept tuples of an input, without codes; see `MJoin.offer`."""
        node = self._node_of(name)
        leaf = self._on_time(node, name, self._leaf_batch(node, name, batch))
        yield from self._run(node, node.join.offer(name, node.join.spec.with_codes(name, leaf)))
        if self._counts_places:
            yield from self._advance(self._place)

    def _node_of(self, name: str) -> TreeJoin:
        if name not in self._leaf_node:
            raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(self.spec.names)}.")
        return self._leaf_node[name]

    def _leaf_batch(self, node: TreeJoin, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Tuples in the form that the node takes."""
        columns = list(batch.select(self.spec.schemas[name].names).columns)
        if self._counts_places:
            columns.append(pa.array(range(self._place, self._place + batch.num_rows), pa.int64()))
            self._place += batch.num_rows
        return pa.RecordBatch.from_arrays(columns, schema=node.join.spec.schemas[name])

    def _on_time(self, node: TreeJoin, name: str, leaf: pa.RecordBatch) -> pa.RecordBatch:
        """Tuples that are not late by the tree's watermark, which may be ahead of the node's own."""
        if self.watermark is None or self.watermark == node.join.watermark:
            return leaf
        is_late = self._late_by(self.watermark, node, name, leaf)
        if not is_late.any():
            return leaf
        node.join.refuse_late(name, leaf.filter(pa.array(is_late)))
        return leaf.filter(pa.array(~is_late))

    def _late_by(self, watermark: int, node: TreeJoin, name: str, leaf: pa.RecordBatch) -> BoolArray:
        window = node.join.spec.window
        assert isinstance(window, TimeWindow)
        times, valid = integers_of(leaf.column(leaf.schema.get_field_index(window.columns_of(name)[0])))
        found: BoolArray = valid & (times < watermark)
        return found

    def _run(self, node: TreeJoin, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run a node's work and pass its results up."""
        yield from self._pass_up(node, batches)
        yield from self._after(node)

    def _after(self, node: TreeJoin) -> Iterator[pa.RecordBatch]:
        """A hook that runs after each piece of work of a node."""
        yield from ()

    def _pass_up(self, node: TreeJoin, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Offer a node's results to its parent; emit those of the root."""
        for batch in batches:
            parent = node.parent
            if parent is None:
                yield self._given(batch)
                continue
            result = self._result_batch(node, parent, batch)
            coded = parent.join.spec.with_codes(node.name, result)
            yield from self._run(parent, parent.join.offer(node.name, coded))

    def _result_batch(self, node: TreeJoin, parent: TreeJoin, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = parent.join.spec.schemas[node.name]
        columns = [batch.column(name) for name in node.about.columns]
        if node.about.times:
            kind = schema.field(node.about.ends[0]).type
            times = [batch.column(name).cast(kind) for name in node.about.times]
            for pick in (pc.min_element_wise, pc.max_element_wise):
                columns.append(times[0] if len(times) == 1 else pick(*times))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _given(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [batch.column(self._final[name]) for name in self.output_schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def take_late(self) -> list[tuple[str, pa.RecordBatch]]:
        """See `MJoin.take_late`; for all inputs."""
        found = [each for node in self._nodes for each in node.join.take_late()]
        return [(name, self._as_written(name, rows)) for name, rows in found]

    def _as_written(self, name: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of an input under the user's column names; additional columns at the end keep theirs."""
        names = self.spec.schemas[name].names
        kept = [n for n in range(rows.num_columns) if not rows.schema.names[n].startswith("~place ")]
        called = [names[n] if n < len(names) else rows.schema.names[n] for n in kept]
        return pa.RecordBatch.from_arrays([rows.column(n) for n in kept], names=called)

    def set_time(self, now: int) -> None:
        """See `MJoin.set_time`."""
        for node in self._nodes:
            node.join.set_time(now)

    def step(self, idle: bool = False) -> Iterator[pa.RecordBatch]:
        """See `MJoin.step`; for every node, lower ones first."""
        for node in self._nodes:
            yield from self._run(node, node.join.step(idle))

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """See `MJoin.advance`."""
        if self.watermark is not None and watermark < self.watermark:
            raise PlanError(f"The watermark {watermark} is behind the previous one, {self.watermark}.")
        self.watermark = watermark
        return self._advance(watermark)

    def _advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        for node in self._nodes:
            reached = [n.join.completed_time for n in self._nodes if n.parent is node]
            safe = min([watermark, *(time for time in reached if time is not None)])
            if node.join.watermark is None or safe > node.join.watermark:
                yield from self._run(node, node.join.advance(safe))

    def watermark_reached(self) -> int | None:
        """See `MJoin.watermark_reached`; over the inputs of all nodes."""
        if not isinstance(self.spec.window, TimeWindow):
            return None
        times = [
            node.join.scalars()["greatest_time"].get(name)
            for name, node in self._leaf_node.items()
            if name not in node.join.ended
        ]
        known = [time for time in times if time is not None]
        return None if not known or len(known) < len(times) else min(known) - self.spec.window.lateness

    def finish(self, name: str) -> None:
        """See `MJoin.finish`."""
        self._node_of(name).join.finish(name)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """See `MJoin.drain`; lower nodes come first, so that the upper ones see all their results."""
        for node in self._nodes:
            yield from self._run(node, node.join.drain())
            if node.parent is not None and len(node.join.ended) == len(node.join.spec.names):
                node.parent.join.finish(node.name)

    # ---------------------------------------------------------------- state

    @property
    def pending(self) -> int:
        """See `MJoin.pending`; the sum over all nodes."""
        return sum(node.join.pending for node in self._nodes)

    @property
    def joins(self) -> list[MJoin]:
        """The joins of the tree, children before parents."""
        return [node.join for node in self._nodes]

    @property
    def metrics(self) -> MJoinMetrics:
        """The counters of all nodes; output rows are those of the root."""
        return MJoinMetrics.from_dict(self._counters())

    def _counters(self) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for join in self.joins:
            for name, value in join.metrics.as_dict().items():
                total[name] = _added(total[name], value) if name in total else value
        total["tuples_in"] = {name: self._leaf_node[name].join.metrics.tuples_in[name] for name in self.spec.names}
        total["output_rows"] = self._nodes[-1].join.metrics.output_rows
        return total

    def size(self) -> int:
        """Bytes held by all nodes."""
        return sum(join.size() for join in self.joins)

    def sizes(self) -> dict[str, int]:
        """Bytes held per node and component; the sum is `size`."""
        return {f"{node.name} {part}": size for node in self._nodes for part, size in node.join.sizes().items()}

    def state_rows(self) -> dict[str, int]:
        """Tuples held per input and per inner node."""
        held: dict[str, int] = {}
        for join in self.joins:
            held.update(join.state_rows())
        return held

    def snapshot(self) -> Snapshot:
        """The state of all nodes."""
        parts = [node.join.snapshot() for node in self._nodes]
        tables = {f"{n}/{name}": table for n, part in enumerate(parts) for name, table in part.tables.items()}
        values = {
            "place": self._place,
            "watermark": self.watermark,
            "nodes": [dict(part.values) for part in parts],
        }
        return Snapshot(self.kind, self.fingerprint(), tables, values)

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the state; a snapshot with another fingerprint is refused."""
        return {**self.spec.fingerprint(), "plan": self.plan.root.as_nested(), "format": _FORMAT}

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of a tree with the same spec and plan."""
        if snapshot.fingerprint.get("format") != _FORMAT:
            raise StateError(
                "This snapshot of a join tree was written by an earlier release with other column names in its joins.",
                hint="Drain the tree with that release, or start without a snapshot.",
            )
        if dict(snapshot.fingerprint) != self.fingerprint():
            raise StateError(
                "This snapshot is of another join or plan.", hint="Create the join with the same spec and plan."
            )
        for number, node in enumerate(self._nodes):
            tables = {n.split("/", 1)[1]: t for n, t in snapshot.tables.items() if n.startswith(f"{number}/")}
            values = snapshot.values["nodes"][number]
            node.join.restore(Snapshot(node.join.kind, node.join.fingerprint(), tables, values))
        self._place, self.watermark = snapshot.values["place"], snapshot.values["watermark"]


def _added(one: Any, other: Any) -> Any:
    """The sum of two counters, which may be dicts."""
    if isinstance(one, Mapping):
        return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}
    return one + other
