"""From a join graph and a plan to steps: one for a join of all inputs, or one per join of a tree.

`tree_nodes` defines the inputs and outputs of each join of a tree, also for trees in one process; here they become
steps. Rows of an input are shuffled once, to their join; results of a lower join are shuffled again, by the upper
join's attribute. All joins of a tree are steps of one flow, so one commit names the state of all.

Every join of a tree uses the promises of the inputs: a lower join reports closed values among its results, marked by a
hidden column, and they end those values in the join above after the data of the micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import PlanError
from dovetail.joins.multiway import MJoinSpec, TimeWindow
from dovetail.joins.multiway.planner import MultiwayPlan, common_attributes
from dovetail.joins.multiway.tree_nodes import TreeNode, final_columns, internal_names, tree_nodes
from dovetail.relation.keys import code_kind
from dovetail.runtime.promises import mark_column
from dovetail.spark.flow.late_rows import SideFiles
from dovetail.spark.plan.payload import encoded_schema
from dovetail.spark.steps.event_time import EventTime
from dovetail.spark.steps.join_metadata import CLOSED_COLUMN, JoinMetadata
from dovetail.spark.steps.multi_join_step import LowerJoin, MultiJoinStep
from dovetail.spark.steps.promises import MetadataJoinStep
from dovetail.spark.steps.tagged_inputs import Member, SlotLayout, tagged_union

__all__ = ["JoinLayout", "arrow_schema", "plan_steps"]


@dataclass(frozen=True)
class JoinLayout:
    """The number of slices of a join, how many run at once, where late rows go, and when an input is idle."""

    shards: int
    parallelism: int
    late: SideFiles | None = None
    idle_after_ms: int | None = None


def arrow_schema(schema: T.StructType) -> Any:
    """The columns as encoded for Python."""
    return to_arrow_schema(encoded_schema(schema), timezone="UTC")


def plan_steps(
    inputs: Mapping[str, DataFrame],
    spec: MJoinSpec,
    plan: MultiwayPlan,
    layout: JoinLayout,
    promised: JoinMetadata | None = None,
) -> tuple[DataFrame, tuple[MultiJoinStep, ...]]:
    """The flow's input, and its steps.

    The join columns of ``inputs`` have the type in which they are compared. The budget of ``spec`` is for all shards
    and joins together. With ``promised``, all inputs share the join columns.
    """
    if promised is not None:
        promised.metadata.check(spec)
    for node in plan.root.nodes():
        if not common_attributes(plan.graph, node):
            raise PlanError(
                f"plan={node.as_nested()!r}: its parts have no join attribute in common to be shuffled by.",
                hint='Use plan="auto", or a tree of joins that each have a common attribute.',
            )
    if promised is None:
        nodes = tree_nodes(spec, plan)
    else:
        nodes = tree_nodes(spec, plan, [mark_column(name) for name in promised.marked], mark_column)
    if len(nodes) == 1:
        return _single(inputs, spec, plan, layout, promised)
    if promised is not None:
        promised.check_tree()
    return _Tree(inputs, spec, plan, layout, nodes, promised).steps()


def _single(
    inputs: Mapping[str, DataFrame],
    spec: MJoinSpec,
    plan: MultiwayPlan,
    layout: JoinLayout,
    promised: JoinMetadata | None,
) -> tuple[DataFrame, tuple[MultiJoinStep, ...]]:
    members = {name: _member(n, spec, name, df.schema) for n, (name, df) in enumerate(inputs.items())}
    slots = SlotLayout.of(list(members.values()))
    name = "1-multi_join"
    time = None
    if isinstance(spec.window, TimeWindow):
        time = EventTime(spec.window, dict.fromkeys(inputs, name), idle_after_ms=layout.idle_after_ms)
    about = (name, spec, members, slots, layout.shards, layout.parallelism, time)
    if promised is None:
        step = MultiJoinStep(*about, late=layout.late, plan=plan)
    else:
        step = MetadataJoinStep(promised, *about, late=layout.late, plan=plan)
    return tagged_union(inputs, members, slots, _codes(members)), (step,)


def _member(number: int, spec: MJoinSpec, name: str, schema: T.StructType) -> Member:
    keys = []
    for k in spec.input_attributes[spec.names.index(name)]:
        columns = spec.attributes[k].columns
        first = spec.attributes[k].inputs[0]
        keys.append((tuple(columns[name]), code_kind(spec.schemas[first], columns[first])))
    return Member(number, schema, tuple(keys))


def _codes(members: Mapping[str, Member]) -> int:
    return max(len(member.keys) for member in members.values())


class _Tree:
    """Makes the steps of a tree, children before parents."""

    def __init__(
        self,
        inputs: Mapping[str, DataFrame],
        spec: MJoinSpec,
        plan: MultiwayPlan,
        layout: JoinLayout,
        nodes: tuple[TreeNode, ...],
        promised: JoinMetadata | None,
    ) -> None:
        self._spec, self._plan, self._layout, self._nodes, self._promised = spec, plan, layout, nodes, promised
        self._internal = internal_names(spec.graph)
        self._inputs = {name: self._renamed(name, df) for name, df in inputs.items()}
        self._times: dict[str, str] = {}
        if isinstance(spec.window, TimeWindow):
            for name in inputs:
                column = spec.window.columns_of(name)[0]
                self._times[name] = self._internal.get((name, column), column)
            self._check_times()

    def steps(self) -> tuple[DataFrame, tuple[MultiJoinStep, ...]]:
        # Inputs are numbered first, then the results of all joins but the last.
        names = [*self._inputs, *(node.name for node in self._nodes[:-1])]
        numbers = {name: number for number, name in enumerate(names)}
        members = {
            node.number: {n: _member(numbers[n], node.spec, n, self._schema(node, n)) for n in node.spec.names}
            for node in self._nodes
        }
        slots = SlotLayout.of(sorted((m for mine in members.values() for m in mine.values()), key=lambda m: m.number))
        steps = tuple(self._step(node, members[node.number], slots) for node in self._nodes)
        of_inputs = {n: m for mine in members.values() for n, m in mine.items() if n in self._inputs}
        codes = max(_codes(mine) for mine in members.values())
        return tagged_union(self._inputs, of_inputs, slots, codes), steps

    def _step(self, node: TreeNode, members: Mapping[str, Member], slots: SlotLayout) -> MultiJoinStep:
        is_last, layout = node is self._nodes[-1], self._layout
        lower = {name: self._lower_join(below, members[name]) for name, below in node.lower.items()}
        final = self._final() if is_last else None
        plan = self._plan if is_last else None
        where = (layout.shards, layout.parallelism, self._time())
        about = (_step_name(node), node.spec, members, slots, *where, lower, final, layout.late, plan)
        if self._promised is None:
            return MultiJoinStep(*about, is_cascade=bool(self._spec.cascade))
        return MetadataJoinStep(self._promised.of_node(node, self._spec, is_last), *about)

    def _time(self) -> EventTime | None:
        if not isinstance(self._spec.window, TimeWindow):
            return None
        homes = {name: _step_name(node) for node in self._nodes for name in node.inputs}
        lower = tuple(_step_name(node) for node in self._nodes[:-1])
        return EventTime(self._spec.window, homes, lower, self._layout.idle_after_ms)

    def _renamed(self, name: str, df: DataFrame) -> DataFrame:
        return df.toDF(*(self._internal.get((name, column), column) for column in df.columns))

    def _check_times(self) -> None:
        kinds = {name: self._inputs[name].schema[column].dataType for name, column in self._times.items()}
        first, kind = next(iter(kinds.items()))
        for name, other in kinds.items():
            if other != kind:
                raise PlanError(
                    f"The event time of {first!r} is {kind.simpleString()}, that of {name!r} {other.simpleString()}.",
                    hint="Cast one of them: joins on several attributes compare event times in Spark.",
                )

    def _schema(self, node: TreeNode, name: str) -> T.StructType:
        """The columns of an input of a join, in Spark's types."""
        if name in self._inputs:
            return self._inputs[name].schema
        below = node.lower[name]
        fields = [self._inputs[leaf].schema[column] for column, leaf in below.columns.items()]
        if self._times:
            first = below.leaves[0]
            kind = self._inputs[first].schema[self._times[first]].dataType
            fields += [T.StructField(end, kind) for end in below.ends]
        if self._promised is not None or self._spec.cascade:
            # Rows that report closed values, and those that lack an input, are NULL there.
            fields = [T.StructField(f.name, f.dataType, True, f.metadata) for f in fields]
        if self._promised is not None:
            fields.append(T.StructField(mark_column(name), T.ByteType()))
        return T.StructType(fields)

    def _lower_join(self, below: TreeNode, member: Member) -> LowerJoin:
        ends = below.ends if below.times else ()
        marks = None if self._promised is None else (CLOSED_COLUMN, mark_column(below.name))
        return LowerJoin(_step_name(below), member, tuple(below.columns), below.times, ends, marks)

    def _final(self) -> dict[str, str]:
        """The result's columns: the user's name and the internal one; without hidden columns."""
        hidden = set() if self._promised is None else {mark_column(name) for name in self._promised.marked}
        return {name: inside for name, inside in final_columns(self._spec).items() if name not in hidden}


def _step_name(node: TreeNode) -> str:
    return f"{node.number + 1}-multi_join"
