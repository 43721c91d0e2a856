"""Turns a plan into the specs of its joins: what each node joins, and which columns it passes on.

Both `MJoinTree` and the steps of a flow are built from this.

Inside a tree the join columns have internal names, the same in all inputs, because two inputs may use one name for
different attributes. Windows are pairwise over all inputs of a tree, so the results of a node carry their earliest and
latest time. Every node gets an equal part of the budget. A plan of one node is the original join.

A condition between two inputs is checked by the node in which they meet. So is a bound between their event times; what
it says of the earliest and latest times of whole parts also bounds the state of that node.

In a cascade of outer joins (`cascade`) each node has the join type of its last part. What a node knows of event times
follows from the bounds among the inputs so far: those of a later input need not hold for a row that lacks it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import pyarrow as pa

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.joins.multiway.cascade import DROPPING, MultiJoinType, cascade_tree
from dovetail.joins.multiway.graph import JoinAttribute, JoinGraph
from dovetail.joins.multiway.output import MultiOutput
from dovetail.joins.multiway.pair_conditions import PairCondition, RenamedPair, TimeDistance
from dovetail.joins.multiway.planner import MultiwayPlan, PlanNode, leaves_of
from dovetail.joins.multiway.spec import MJoinSpec, mjoin_spec
from dovetail.joins.multiway.windows import Distances, TimeBound, TimeWindow, furthest_apart

__all__ = ["TreeNode", "final_columns", "graph_of_node", "internal_names", "tree_nodes"]


@dataclass(frozen=True)
class TreeNode:
    """One join of a tree."""

    number: int  # lower than its parent's
    spec: MJoinSpec  # with this node's part of the budget
    leaves: tuple[str, ...]  # all inputs below it, in the order of the plan
    lower: Mapping[str, "TreeNode"]  # the nodes whose results it joins, by their name in `spec`
    columns: Mapping[str, str]  # result columns passed on to the parent, each with an input that has it
    times: tuple[str, ...]  # the event-time columns among them; empty without a window
    carried: tuple[str, ...]  # the leaves whose columns are in its results

    @property
    def name(self) -> str:
        """The name of its results in the parent."""
        return f"~join {self.number}"

    @property
    def ends(self) -> tuple[str, str]:
        """The columns with the earliest and the latest time of its results."""
        return f"~low {self.number}", f"~high {self.number}"

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the whole join that it reads directly."""
        return tuple(name for name in self.spec.names if name not in self.lower)


def tree_nodes(
    spec: MJoinSpec,
    plan: MultiwayPlan,
    hidden: Collection[str] = (),
    mark: Callable[[str], str] | None = None,
) -> tuple[TreeNode, ...]:
    """The joins of a plan, children before parents; the last emits the result.

    `hidden` are input columns that are not passed on. `mark` is given if nodes also report finished join values: it
    names the column that marks such rows in the results of a node.

    Examples
    --------
    >>> from dovetail.joins.multiway.planner import plan_multiway
    >>> schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "abc"}
    >>> spec = mjoin_spec(schemas, on="k", budget="1MB")
    >>> first, last = tree_nodes(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]))
    >>> first.spec.names, last.spec.names, last.spec.schemas["~join 0"].names
    (('a', 'b'), ('~join 0', 'c'), ['~key k 0', 'a', 'b'])
    """
    if plan.graph.as_dict() != spec.graph.as_dict():
        raise PlanError("The plan belongs to another join graph.", hint="Plan with spec.graph.")
    count = len(list(plan.root.nodes()))
    if spec.cascade:
        _check_cascade(spec, plan)
    if count == 1:
        return (TreeNode(0, spec, spec.names, {}, {}, (), spec.carried),)
    if not spec.cascade and spec.how != "inner":
        _refuse_outer(spec, count)
    builder = _Builder(spec, frozenset(hidden), mark, Budget(max(1, spec.budget.total_bytes // count)))
    builder.add(plan.root)
    if spec.cascade:
        _check_ends(builder.nodes)
    return tuple(builder.nodes)


def _check_cascade(spec: MJoinSpec, plan: MultiwayPlan) -> None:
    """Refuse another order than that of the inputs, and conditions on columns that are gone."""
    expected = cascade_tree(spec.graph, spec.cascade)
    if plan.root.as_nested() != expected:
        raise PlanError(
            f"plan={plan.root.as_nested()!r}: outer joins are not joined in another order than that of the inputs, "
            f"which is {expected!r}.",
            hint="Leave plan= out.",
        )
    bounds = spec.window.bounds if isinstance(spec.window, TimeWindow) else ()
    conditions: list[PairCondition | TimeBound] = [*spec.conditions, *bounds]
    for each in conditions:
        first, second = sorted((each.left, each.right), key=spec.names.index)
        if spec.cascade[spec.names.index(first)] in DROPPING:
            raise PlanError(
                f"The condition {each.describe()!r} compares {second!r} with {first!r}, whose columns are gone after "
                "its semi or anti join.",
                hint=f"Join {second!r} before {first!r}, or leave the condition out.",
            )


def _check_ends(nodes: Sequence["TreeNode"]) -> None:
    """Refuse joins whose rows without a match would wait for ever, or whose results may come at any time."""
    for node in nodes:
        spec = node.spec
        is_last = node is nodes[-1]
        for name, is_kept, reach in zip(spec.names, spec.preserved, spec.reaches, strict=True):
            if spec.window is None or reach is not None or not is_kept or (is_last and not spec.gives_unmatched):
                continue
            other = next(other for other in spec.names if other != name)
            ours, theirs = (
                ", ".join(node.lower[part].leaves) if part in node.lower else part for part in (name, other)
            )
            raise PlanError(
                f"The {spec.how} join of {theirs} with {ours} keeps rows of {ours}, but no bound says how much later a "
                "match may be: a row without one would wait for ever.",
                hint="Add an upper bound between their event times to the conditions, or a window.",
            )


def _refuse_outer(spec: MJoinSpec, count: int) -> None:
    if spec.is_star:
        raise PlanError(
            f"how={spec.how!r} needs one MJoin of all inputs, but this plan has {count} joins.",
            hint='All inputs share a join key: pass plan="single", or leave plan= out.',
        )
    raise PlanError(
        f"how={spec.how!r} needs one MJoin, with join columns that all inputs share; this plan has {count} joins.",
        hint="Use how='inner', or join on columns that all inputs have.",
    )


def final_columns(spec: MJoinSpec) -> dict[str, str]:
    """Maps the columns of the result to their internal names."""
    internal = internal_names(spec.graph)
    keys = {
        column: internal[attribute.inputs[0], column]
        for attribute in spec.attributes
        for column in attribute.columns[attribute.inputs[0]]
    }
    return {column: keys.get(column, column) for column in MultiOutput(spec).schema.names}


class _Builder:
    """Builds the nodes of a tree, children before parents."""

    def __init__(
        self, spec: MJoinSpec, hidden: frozenset[str], mark: Callable[[str], str] | None, budget: Budget
    ) -> None:
        self._spec, self._hidden, self._mark, self._budget = spec, hidden, mark, budget
        self._internal = internal_names(spec.graph)
        self.nodes: list[TreeNode] = []

    def add(self, plan: PlanNode) -> TreeNode:
        schemas: dict[str, pa.Schema] = {}
        times: dict[str, str | tuple[str, str]] = {}
        lower: dict[str, TreeNode] = {}
        for child in plan.children:
            if isinstance(child, str):
                schemas[child], times[child] = self._leaf_schema(child), self._leaf_time(child)
                continue
            below = self.add(child)
            schemas[below.name], times[below.name] = self._result_schema(below), below.ends
            lower[below.name] = below
        spec = mjoin_spec(
            schemas,
            graph_of_node(self._spec.graph, plan, list(schemas)),
            how=self._join_type(plan),
            window=self._window(plan, times, lower),
            budget=self._budget,
            spill_directory=self._spec.spill_directory,
            partitions=self._spec.partitions,
            flushing=self._spec.flushing,
            seed=self._spec.seed,
            max_delay=self._spec.max_delay,
            conditions=self._conditions(plan, list(schemas)),
        )
        carried = tuple(leaf for name in spec.carried for leaf in (lower[name].carried if name in lower else (name,)))
        of_leaves = () if self._spec.window is None else tuple(map(self._leaf_time, carried))
        columns = self._columns({name: schemas[name] for name in spec.carried}, lower)
        made = TreeNode(len(self.nodes), spec, plan.inputs, lower, columns, tuple(dict.fromkeys(of_leaves)), carried)
        self.nodes.append(made)
        return made

    def _join_type(self, plan: PlanNode) -> MultiJoinType:
        last = plan.children[-1]
        return self._spec.cascade[self._spec.names.index(leaves_of(last)[-1])] if self._spec.cascade else "inner"

    def _window(
        self, plan: PlanNode, times: Mapping[str, str | tuple[str, str]], lower: Mapping[str, TreeNode]
    ) -> TimeWindow | None:
        window = self._spec.window
        if isinstance(window, TimeWindow):
            if not window.bounds:
                return TimeWindow(window.width, times, window.lateness, window.late)
            carried = [lower[name].carried if name in lower else (name,) for name in times]
            bounds = self._bounds(dict(zip(times, carried, strict=True)))
            return TimeWindow(None, times, window.lateness, window.late, bounds)
        # A tuple window becomes a window over places, which the tree counts.
        return None if window is None else TimeWindow(window.width, times)

    def _bounds(self, parts: Mapping[str, Sequence[str]]) -> list[TimeBound]:
        """What the bounds of all inputs say of the earliest and latest times of a node's parts."""
        names, furthest = self._known_distances([leaf for leaves in parts.values() for leaf in leaves])
        places = {name: [names.index(leaf) for leaf in leaves] for name, leaves in parts.items()}
        bounds = []
        for left, right in combinations(parts, 2):
            after = _most(furthest[x][y] for x in places[left] for y in places[right])
            before = _most(furthest[y][x] for x in places[left] for y in places[right])
            if after is not None or before is not None:
                bounds.append(TimeBound(left, right, None if before is None else -before, after))
        return bounds

    def _known_distances(self, leaves: Sequence[str]) -> tuple[Sequence[str], Distances]:
        """How far apart the event times of a node's inputs may be, and these inputs."""
        window = self._spec.window
        if not self._spec.cascade:
            assert self._spec.furthest is not None
            return self._spec.names, self._spec.furthest
        assert isinstance(window, TimeWindow)
        bounds = [bound for bound in window.bounds if {bound.left, bound.right} <= set(leaves)]
        furthest = furthest_apart(leaves, TimeWindow(window.width, window.columns, bounds=bounds))
        assert furthest is not None
        return leaves, furthest

    def _conditions(self, plan: PlanNode, names: Sequence[str]) -> list[PairCondition]:
        """The conditions between inputs of two different parts of a node, on the node's columns."""
        holder = {leaf: name for name, child in zip(names, plan.children, strict=True) for leaf in leaves_of(child)}
        bounds = self._spec.window.bounds if isinstance(self._spec.window, TimeWindow) else ()
        # Between two inputs themselves the node's window is exact.
        coarse = [b for b in bounds if holder.get(b.left) != b.left or holder.get(b.right) != b.right]
        found = []
        for each in (*self._spec.conditions, *map(self._distance, coarse)):
            left, right = holder.get(each.left), holder.get(each.right)
            if left is not None and right is not None and left != right:
                renamed = RenamedPair(each.condition, self._written(each.left), self._written(each.right))
                found.append(PairCondition(left, right, renamed))
        return found

    def _distance(self, bound: TimeBound) -> PairCondition:
        assert isinstance(self._spec.window, TimeWindow)
        left, right = (self._spec.window.columns_of(name)[0] for name in (bound.left, bound.right))
        return PairCondition(bound.left, bound.right, TimeDistance(left, right, bound.low, bound.high))

    def _written(self, leaf: str) -> tuple[tuple[str, str], ...]:
        """The columns of an input that are passed on: the user's names and the internal ones."""
        names = [name for name in self._spec.schemas[leaf].names if name not in self._hidden]
        return tuple((name, self._internal.get((leaf, name), name)) for name in names)

    def _leaf_time(self, name: str) -> str:
        if not isinstance(self._spec.window, TimeWindow):
            return f"~place {name}"
        column = self._spec.window.columns_of(name)[0]
        return self._internal.get((name, column), column)

    def _leaf_schema(self, name: str) -> pa.Schema:
        fields = [f.with_name(self._internal.get((name, f.name), f.name)) for f in self._spec.schemas[name]]
        if self._spec.window is not None and not isinstance(self._spec.window, TimeWindow):
            fields.append(pa.field(self._leaf_time(name), pa.int64()))
        return pa.schema(fields)

    def _columns(self, schemas: Mapping[str, pa.Schema], lower: Mapping[str, TreeNode]) -> dict[str, str]:
        """The columns passed on, each once, without hidden ones."""
        columns: dict[str, str] = {}
        for name, schema in schemas.items():
            origins = lower[name].columns if name in lower else dict.fromkeys(schema.names, name)
            for column, leaf in origins.items():
                if column not in self._hidden:
                    columns.setdefault(column, leaf)
        return columns

    def _result_schema(self, node: TreeNode) -> pa.Schema:
        leaves = {leaf: self._leaf_schema(leaf) for leaf in node.leaves}
        fields = [leaves[leaf].field(column) for column, leaf in node.columns.items()]
        if self._spec.cascade:
            fields = [field.with_nullable(True) for field in fields]
        if node.times:
            kinds = [leaves[leaf].field(self._leaf_time(leaf)).type for leaf in node.carried]
            fields += [pa.field(end, _common_time(kinds)) for end in node.ends]
        if self._mark is not None:
            # A row that reports a finished value is NULL in all columns but the join's.
            fields = [field.with_nullable(True) for field in fields]
            fields.append(pa.field(self._mark(node.name), pa.int8()))
        return pa.schema(fields)


def _most(distances: Iterable[int | None]) -> int | None:
    """The greatest of several bounds; None if one of them is none."""
    known = list(distances)
    return None if None in known else max(distance for distance in known if distance is not None)


def _common_time(kinds: Sequence[pa.DataType]) -> pa.DataType:
    """The type of the earliest and latest of several times; int64 for integers of different widths."""
    is_number = pa.types.is_signed_integer(kinds[0])
    return pa.int64() if is_number and len(set(kinds)) > 1 else kinds[0]


def internal_names(graph: JoinGraph) -> dict[tuple[str, str], str]:
    """The internal name of each join column (input, column); the same for all columns of an attribute.

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
    """The join graph of a node, with its children called `names`, over internal column names.

    It has the attributes that children share; attributes shared by the same children become one.
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
