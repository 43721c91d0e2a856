"""A tree of MJoins: what one node gives is an input of the next.

Memory: the budget is shared equally by the nodes. Windows are pairwise over all inputs of the tree, so a node's results
carry their earliest and their latest time. A node that still owes results of spilled tuples holds back the watermark of
the nodes above it, which would otherwise purge what those results will meet.

Join columns go by internal names, the same for all inputs, since two inputs may use one name for different attributes;
the root gives the columns that one MJoin of all inputs would give. Supported: inner joins; other join types only where
the tree is one node.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.errors import PlanError, StateError
from dovetail.memory import Budget
from dovetail.model.multiway import MultiwayPlan, PlanNode, leaves_of
from dovetail.model.multiway_graph import JoinAttribute, JoinGraph
from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.mjoin import MJoin
from dovetail.operators.mjoin.output import MultiOutput
from dovetail.operators.mjoin.spec import MJoinSpec, TimeWindow, mjoin_spec
from dovetail.operators.protocol import Snapshot

__all__ = ["MJoinTree", "graph_of_node", "internal_names"]


class _Node:
    """One MJoin of the tree, and where its results go."""

    def __init__(self, number: int, name: str, join: MJoin, inputs: Mapping[str, str]) -> None:
        self.number = number
        self.name = name
        self.join = join
        self.inputs = inputs  # name in this node -> name in the tree: a leaf's, or another node's
        self.parent: _Node | None = None


class MJoinTree:
    """Executes a plan of `dovetail.model.multiway`; offers and results as of one `MJoin`, codes are computed here.

    Examples
    --------
    >>> from dovetail.model.multiway import plan_multiway
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
        if plan.graph.as_dict() != spec.graph.as_dict():
            raise PlanError("The plan is of another join graph than the join.", hint="Plan with spec.graph.")
        self.spec = spec
        self.plan = plan
        nodes = list(plan.root.nodes())
        if spec.how != "inner" and len(nodes) > 1:
            raise PlanError(
                f"how={spec.how!r} needs one MJoin of all inputs, and the plan has {len(nodes)}.",
                hint='Join on one attribute with plan="single".',
            )
        self._output = MultiOutput(spec)
        self._budget = Budget(max(1, spec.budget.total_bytes // len(nodes)))
        self._internal = internal_names(spec.graph)
        self._nodes: list[_Node] = []
        self._leaf_node: dict[str, _Node] = {}
        self._build(plan.root)
        self._place = 0
        self.watermark: int | None = None
        self.late_tuples = 0

    # ---------------------------------------------------------------- building

    def _build(self, node: PlanNode) -> _Node:
        schemas: dict[str, pa.Schema] = {}
        inputs: dict[str, str] = {}
        times: dict[str, str | tuple[str, str]] = {}
        below: list[_Node] = []
        for child in node.children:
            if isinstance(child, str):
                schemas[child], times[child], inputs[child] = self._leaf_schema(child), f"~low {child}", child
                continue
            lower = self._build(child)
            below.append(lower)
            schemas[lower.name] = self._result_schema(lower)
            times[lower.name] = (f"~low {lower.name}", f"~high {lower.name}")
            inputs[lower.name] = lower.name
        number = len(self._nodes)
        directory = self.spec.spill_directory
        window = None if self.spec.window is None else TimeWindow(self.spec.window.width, times)
        options: dict[str, Any] = {"how": self.spec.how, "flushing": self.spec.flushing, "seed": self.spec.seed}
        options |= {"partitions": self.spec.partitions, "max_delay": self.spec.max_delay, "window": window}
        options["spill_directory"] = None if directory is None else Path(directory) / f"node-{number}"
        if self.spec.how == "left":
            options["driving"] = self.spec.driving
        if len(self.plan.root.inputs) == len(node.children):
            options["sequences"] = self.spec.sequences
        join = MJoin(
            mjoin_spec(schemas, graph_of_node(self.spec.graph, node, list(schemas)), budget=self._budget, **options)
        )
        made = _Node(number, f"~node {number}", join, inputs)
        self._nodes.append(made)
        for lower in below:
            lower.parent = made
        for child in node.children:
            if isinstance(child, str):
                self._leaf_node[child] = made
        return made

    def _leaf_schema(self, name: str) -> pa.Schema:
        fields = [
            field.with_name(self._internal.get((name, field.name), field.name)) for field in self.spec.schemas[name]
        ]
        if self.spec.window is not None:
            fields.append(pa.field(f"~low {name}", pa.int64()))
        return pa.schema(fields)

    def _result_schema(self, node: _Node) -> pa.Schema:
        fields = [field for field in node.join.output_schema if not _is_time(field.name)]
        if self.spec.window is not None:
            fields += [pa.field(f"~{end} {node.name}", pa.int64()) for end in ("low", "high")]
        return pa.schema(fields)

    # ---------------------------------------------------------------- running

    @property
    def output_schema(self) -> pa.Schema:
        """Columns of every batch given."""
        return self._output.schema

    def offer(self, name: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept tuples of an input, without codes; see `MJoin.offer`."""
        if name not in self._leaf_node:
            raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(self.spec.names)}.")
        rows = batch.select(self.spec.schemas[name].names)
        schema = self._leaf_schema(name)
        columns = list(rows.columns)
        if isinstance(self.spec.window, TimeWindow):
            time = rows.column(self.spec.window.columns_of(name)[0])
            width = time.type.bit_width
            columns.append(time.view(pa.int64() if width == 64 else pa.int32()).cast(pa.int64()))
        elif self.spec.window is not None:
            columns.append(pa.array(range(self._place, self._place + rows.num_rows), pa.int64()))
        self._place += rows.num_rows
        leaf = pa.RecordBatch.from_arrays(columns, schema=schema)
        if self.watermark is not None and self.spec.window is not None:
            # Judged here, once: a node's own watermark may be behind.
            is_late = pc.less(leaf.column(leaf.num_columns - 1), self.watermark).fill_null(False)
            self.late_tuples += pc.sum(is_late).as_py() or 0
            leaf = leaf.filter(pc.invert(is_late))
        node = self._leaf_node[name]
        yield from self._pass_up(node, node.join.offer(name, node.join.spec.with_codes(name, leaf)))
        if self.spec.window is not None and not isinstance(self.spec.window, TimeWindow):
            yield from self._advance(self._place)

    def _pass_up(self, node: _Node, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Offer a node's results to its parent; the root's are given out."""
        for batch in batches:
            parent = node.parent
            if parent is None:
                yield self._given(batch)
                continue
            result = self._result_batch(node, batch)
            coded = parent.join.spec.with_codes(node.name, result)
            yield from self._pass_up(parent, parent.join.offer(node.name, coded))

    def _result_batch(self, node: _Node, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [c for f, c in zip(batch.schema, batch.columns, strict=True) if not _is_time(f.name)]
        if self.spec.window is not None:
            for end, pick in (("low", pc.min_element_wise), ("high", pc.max_element_wise)):
                times = [c for f, c in zip(batch.schema, batch.columns, strict=True) if _is_end(f.name, end)]
                columns.append(times[0] if len(times) == 1 else pick(*times))
        return pa.RecordBatch.from_arrays(columns, schema=self._result_schema(node))

    def _given(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        canonical: dict[str, str] = {}
        for attribute in self.spec.attributes:
            for place, column in enumerate(attribute.columns[attribute.inputs[0]]):
                canonical[column] = f"~key {attribute.name} {place}"
        columns = [batch.column(canonical.get(name, name)) for name in self.output_schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.output_schema)

    def set_time(self, now: int) -> None:
        """As `MJoin.set_time`."""
        for node in self._nodes:
            node.join.set_time(now)

    def step(self, idle: bool = False) -> Iterator[pa.RecordBatch]:
        """As `MJoin.step`, for every node, the lower ones first."""
        for node in self._nodes:
            yield from self._pass_up(node, node.join.step(idle))

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """As `MJoin.advance`."""
        if self.watermark is not None and watermark < self.watermark:
            raise PlanError(f"The watermark {watermark} is behind the previous one, {self.watermark}.")
        self.watermark = watermark
        return self._advance(watermark)

    def _advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        for node in self._nodes:
            reached = [n.join.completed_time for n in self._nodes if n.parent is node]
            safe = min([watermark, *(time for time in reached if time is not None)])
            if node.join.watermark is None or safe > node.join.watermark:
                yield from self._pass_up(node, node.join.advance(safe))

    def finish(self, name: str) -> None:
        """As `MJoin.finish`."""
        self._leaf_node[name].join.finish(name)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """As `MJoin.drain`: the lower nodes first, so that the upper ones see everything."""
        for node in self._nodes:
            yield from self._pass_up(node, node.join.drain())
            if node.parent is not None and len(node.join.ended) == len(node.join.spec.names):
                node.parent.join.finish(node.name)

    # ---------------------------------------------------------------- state

    @property
    def pending(self) -> int:
        """As `MJoin.pending`, of all nodes."""
        return sum(node.join.pending for node in self._nodes)

    @property
    def joins(self) -> list[MJoin]:
        """The joins of the tree, children before parents."""
        return [node.join for node in self._nodes]

    @property
    def metrics(self) -> MJoinMetrics:
        """The counters of all nodes together; rows given out are the root's."""
        total = MJoinMetrics({name: self._leaf_node[name].join.metrics.tuples_in[name] for name in self.spec.names})
        for join in self.joins:
            for name, value in join.metrics.as_dict().items():
                if name not in ("tuples_in", "output_rows"):
                    setattr(total, name, getattr(total, name) + value)
        total.output_rows = self._nodes[-1].join.metrics.output_rows
        total.late_tuples += self.late_tuples
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
            "late_tuples": self.late_tuples,
            "nodes": [dict(part.values) for part in parts],
        }
        fingerprint = {**self.spec.fingerprint(), "plan": self.plan.root.as_nested()}
        return Snapshot(self.kind, fingerprint, tables, values)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of a tree with the same spec and plan."""
        if dict(snapshot.fingerprint) != {**self.spec.fingerprint(), "plan": self.plan.root.as_nested()}:
            raise StateError("This snapshot is of another join or plan.", hint="Make the join as it was.")
        for number, node in enumerate(self._nodes):
            tables = {n.split("/", 1)[1]: t for n, t in snapshot.tables.items() if n.startswith(f"{number}/")}
            values = snapshot.values["nodes"][number]
            node.join.restore(Snapshot(node.join.kind, node.join.spec.fingerprint(), tables, values))
        self._place, self.watermark = snapshot.values["place"], snapshot.values["watermark"]
        self.late_tuples = snapshot.values["late_tuples"]


def internal_names(graph: JoinGraph) -> dict[tuple[str, str], str]:
    """What the join columns of inputs, (input, column), are called inside a tree: the same for all of an attribute.

    Examples
    --------
    >>> internal_names(JoinGraph.of({"a": ["x"], "b": ["y"]}, on=[("a.x", "b.y")]))
    {('a', 'x'): '~key x 0', ('b', 'y'): '~key x 0'}
    """
    return {
        (name, column): _key_name(attribute, place)
        for attribute in graph.attributes
        for name, columns in attribute.columns.items()
        for place, column in enumerate(columns)
    }


def _key_name(attribute: JoinAttribute, place: int) -> str:
    return f"~key {attribute.name} {place}"


def graph_of_node(graph: JoinGraph, node: PlanNode, names: Sequence[str]) -> JoinGraph:
    """What the children of a node, called so, are joined on there, by the columns' internal names.

    These are the attributes that children share; those that the same children share are one.
    """
    by_children: dict[tuple[str, ...], list[JoinAttribute]] = {}
    for attribute in graph.attributes:
        holders = tuple(
            name
            for name, child in zip(names, node.children, strict=True)
            if set(leaves_of(child)) & set(attribute.columns)
        )
        if len(holders) > 1:
            by_children.setdefault(holders, []).append(attribute)
    attributes = []
    for holders, parts in by_children.items():
        columns = tuple(
            _key_name(part, place) for part in parts for place in range(len(next(iter(part.columns.values()))))
        )
        attributes.append(JoinAttribute("_".join(part.name for part in parts), dict.fromkeys(holders, columns)))
    attributes.sort(key=lambda attribute: -len(attribute.columns))
    return JoinGraph(tuple(names), tuple(attributes))


def _is_time(name: str) -> bool:
    return name.startswith(("~low ", "~high "))


def _is_end(name: str, end: str) -> bool:
    """Whether a column holds the earliest (low) or latest (high) time of a child; a leaf has one for both."""
    if name.startswith("~high "):
        return end == "high"
    return name.startswith("~low ") and (end == "low" or not name.startswith("~low ~node "))
