"""From a join graph and a plan to steps: one for a join of all inputs, or one for each join of a tree.

Inside a tree the join columns go by names of their own, the same for all inputs, since two inputs may use one name for
different attributes; the last join gives the columns that one join of all inputs would give. Rows of an input are
shuffled once, to the join that they go into; results of a lower join are shuffled once more, by the upper join's
attribute. All joins of a tree are steps of one flow, so one commit names the state of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.errors import PlanError
from dovetail.memory import Budget
from dovetail.model.multiway import MultiwayPlan, PlanNode, common_attributes
from dovetail.operators.mjoin import MJoinSpec, TimeWindow, mjoin_spec
from dovetail.operators.mjoin.output import MultiOutput
from dovetail.operators.mjoin.tree import graph_of_node, internal_names
from dovetail.relation.keys import code_kind
from dovetail.spark.join_metadata import JoinMetadata
from dovetail.spark.late_rows import LateOutput
from dovetail.spark.metadata_join import MetadataJoinStep
from dovetail.spark.multi_join_step import EventTime, LowerJoin, MultiJoinStep
from dovetail.spark.payload import encoded_schema
from dovetail.spark.tagged_inputs import Member, SlotLayout, tagged_union

__all__ = ["JoinLayout", "arrow_schema", "plan_steps"]


@dataclass(frozen=True)
class JoinLayout:
    """In how many slices a join runs, how many of them at once, and where late rows go."""

    shards: int
    parallelism: int
    late: LateOutput | None = None


def arrow_schema(schema: T.StructType) -> Any:
    """The columns as they travel to Python."""
    return to_arrow_schema(encoded_schema(schema), timezone="UTC")


def plan_steps(
    inputs: Mapping[str, DataFrame],
    spec: MJoinSpec,
    plan: MultiwayPlan,
    layout: JoinLayout,
    promised: JoinMetadata | None = None,
) -> tuple[DataFrame, tuple[MultiJoinStep, ...]]:
    """The flow's input, and its steps.

    Parameters
    ----------
    inputs
        The streams, join columns in the type that they are compared in.
    spec
        The join of all of them, with the budget of all shards and joins together.
    plan
        Its tree.
    layout
        Shards and parallelism of each join.
    promised
        What is known of the inputs, of a join that they share the columns of.
    """
    if promised is not None:
        promised.metadata.check(spec)
    for node in plan.root.nodes():
        if not common_attributes(plan.graph, node):
            raise PlanError(
                f"plan={node.as_nested()!r}: its parts have no join attribute in common to be shuffled by.",
                hint='Use plan="auto", or a tree of joins that each have a common attribute.',
            )
    if len(list(plan.root.nodes())) == 1:
        return _single(inputs, spec, plan, layout, promised)
    if spec.how != "inner":
        raise PlanError(
            f"how={spec.how!r} needs join columns that all inputs share; these inputs take {plan.shuffles} joins.",
            hint="Use how='inner', or join on columns that all of them have.",
        )
    return _Tree(inputs, spec, plan, layout).steps()


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
    time = EventTime(spec.window, dict.fromkeys(inputs, name)) if isinstance(spec.window, TimeWindow) else None
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


@dataclass
class _Node:
    """A join of the tree, before its step is made."""

    number: int
    spec: MJoinSpec
    schemas: dict[str, T.StructType]
    lower: dict[str, "_Node"]
    leaves: tuple[str, ...]

    @property
    def step_name(self) -> str:
        return f"{self.number + 1}-multi_join"


class _Tree:
    """Makes the steps of a tree, children before parents."""

    def __init__(
        self, inputs: Mapping[str, DataFrame], spec: MJoinSpec, plan: MultiwayPlan, layout: JoinLayout
    ) -> None:
        self._spec, self._plan, self._layout = spec, plan, layout
        self._internal = internal_names(spec.graph)
        self._inputs = {name: self._renamed(name, df) for name, df in inputs.items()}
        self._times: dict[str, str] = {}
        if isinstance(spec.window, TimeWindow):
            for name in inputs:
                column = spec.window.columns_of(name)[0]
                self._times[name] = self._internal.get((name, column), column)
            self._check_times()
        self._nodes: list[_Node] = []
        self._budget = Budget(max(1, spec.budget.total_bytes // plan.shuffles))
        self._build(plan.root)

    def steps(self) -> tuple[DataFrame, tuple[MultiJoinStep, ...]]:
        """The flow's input, and the steps."""
        # Inputs are numbered first, then what the joins below the last one give.
        names = [*self._inputs, *(_result_name(node) for node in self._nodes[:-1])]
        numbers = {name: number for number, name in enumerate(names)}
        members = {
            node.number: {n: _member(numbers[n], node.spec, n, s) for n, s in node.schemas.items()}
            for node in self._nodes
        }
        slots = SlotLayout.of(sorted((m for mine in members.values() for m in mine.values()), key=lambda m: m.number))
        time = None
        if isinstance(self._spec.window, TimeWindow):
            homes = {leaf: node.step_name for node in self._nodes for leaf in node.schemas if leaf in self._inputs}
            time = EventTime(self._spec.window, homes, tuple(node.step_name for node in self._nodes[:-1]))
        steps = []
        for node in self._nodes:
            mine = members[node.number]
            lower = {n: self._lower_join(below, mine[n]) for n, below in node.lower.items()}
            final = self._final() if node is self._nodes[-1] else None
            layout = self._layout
            plan = None if final is None else self._plan
            where = (layout.shards, layout.parallelism)
            steps.append(
                MultiJoinStep(node.step_name, node.spec, mine, slots, *where, time, lower, final, layout.late, plan)
            )
        of_inputs = {n: m for mine in members.values() for n, m in mine.items() if n in self._inputs}
        codes = max(_codes(mine) for mine in members.values())
        source = tagged_union(self._inputs, of_inputs, slots, codes)
        return source, tuple(steps)

    def _build(self, node: PlanNode) -> _Node:
        schemas: dict[str, T.StructType] = {}
        times: dict[str, str | tuple[str, str]] = {}
        lower: dict[str, _Node] = {}
        for child in node.children:
            if isinstance(child, str):
                schemas[child] = self._inputs[child].schema
                times[child] = self._times.get(child, "")
                continue
            below = self._build(child)
            name = _result_name(below)
            schemas[name], lower[name] = self._result_schema(below), below
            times[name] = _ends(below)
        window = self._spec.window
        if isinstance(window, TimeWindow):
            window = TimeWindow(window.width, times, window.lateness, window.late)
        spec = mjoin_spec(
            {name: arrow_schema(schema) for name, schema in schemas.items()},
            graph_of_node(self._spec.graph, node, list(schemas)),
            window=window,
            budget=self._budget,
            max_delay=self._spec.max_delay,
            spill_directory=self._spec.spill_directory,
        )
        made = _Node(len(self._nodes), spec, schemas, lower, node.inputs)
        self._nodes.append(made)
        return made

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

    def _columns(self, node: _Node) -> list[T.StructField]:
        """The columns of a join's results that go on, each once; not those that only lower joins' windows needed."""
        fields: dict[str, T.StructField] = {}
        ends = {end for below in node.lower.values() for end in _ends(below)}
        for schema in node.schemas.values():
            for field in schema:
                if field.name not in ends:
                    fields.setdefault(field.name, field)
        return list(fields.values())

    def _result_schema(self, node: _Node) -> T.StructType:
        fields = self._columns(node)
        if self._times:
            kind = self._inputs[node.leaves[0]].schema[self._times[node.leaves[0]]].dataType
            fields += [T.StructField(end, kind) for end in _ends(node)]
        return T.StructType(fields)

    def _lower_join(self, below: _Node, member: Member) -> LowerJoin:
        columns = tuple(field.name for field in self._columns(below))
        times = tuple(dict.fromkeys(self._times[leaf] for leaf in below.leaves)) if self._times else ()
        return LowerJoin(below.step_name, member, columns, times)

    def _final(self) -> dict[str, str]:
        """Columns of the result by the user's names, and what they are called here."""
        keys = {
            column: self._internal[attribute.inputs[0], column]
            for attribute in self._spec.attributes
            for column in attribute.columns[attribute.inputs[0]]
        }
        return {column: keys.get(column, column) for column in MultiOutput(self._spec).schema.names}


def _result_name(node: _Node) -> str:
    return f"~join {node.number}"


def _ends(node: _Node) -> tuple[str, str]:
    """The columns of the earliest and of the latest event time of a join's results."""
    return f"~low {node.number}", f"~high {node.number}"
