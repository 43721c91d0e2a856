"""A multi-way join, or one of a tree of them, as a step of the commit protocol."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.memory import Budget
from dovetail.model.multiway import MultiwayPlan
from dovetail.operators.mjoin import MJoin, MJoinSpec, TimeWindow
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.spark.codes import quoted, shard_column
from dovetail.spark.late_rows import LateOutput
from dovetail.spark.multi_join_task import MultiJoinTask
from dovetail.spark.payload import decoded_columns, encoded_schema
from dovetail.spark.routing import is_sortable
from dovetail.spark.steps import BatchClock, Step, StepExplanation, StepRecord
from dovetail.spark.tagged_inputs import INPUT_COLUMN, Member, SlotLayout, code_names, tagged

__all__ = ["EventTime", "LowerJoin", "MultiJoinStep"]

_CODE_BITS = 56  # of a code in the number that rows are sorted by first; those above are the input's


@dataclass(frozen=True)
class EventTime:
    """How far event time has come, for all joins of a tree.

    Attributes
    ----------
    window
        What the joins' windows have in common.
    steps
        For each input, the step that it goes into.
    lower
        Steps whose results go into another one.
    """

    window: TimeWindow
    steps: Mapping[str, str]
    lower: tuple[str, ...] = ()

    def watermark(self, previous: Mapping[str, StepRecord]) -> int | None:
        """What the next micro-batch goes by: the slowest input counts, and it never goes back.

        Results that a lower join still owes meet tuples that must not be purged before, so these hold it back.
        """
        before = [previous[step].reports[0]["watermark"] for step in self.steps.values()]
        latest = [
            max((report["latest"][name] for report in previous[step].reports if name in report["latest"]), default=None)
            for name, step in self.steps.items()
        ]
        reached = [time - self.window.lateness for time in latest if time is not None]
        reached += [
            report["pending_low"]
            for step in self.lower
            for report in previous[step].reports
            if report["pending_low"] is not None
        ]
        known = [watermark for watermark in before if watermark is not None]
        return max([*known, *([] if None in latest else [min(reached)])], default=None)


@dataclass(frozen=True)
class LowerJoin:
    """A step whose results this one joins.

    Attributes
    ----------
    step
        Its name.
    member
        Its results as a member of this join.
    columns
        Which columns of the results go on.
    times
        The event times in them, of which the earliest and the latest go on as two columns more.
    """

    step: str
    member: Member
    columns: tuple[str, ...]
    times: tuple[str, ...]

    def rows(self, results: DataFrame) -> DataFrame:
        """Its results, as this join takes them."""
        columns = [F.col(quoted(name)) for name in self.columns]
        times = [F.col(quoted(name)) for name in self.times]
        if times:
            ends = (F.least(*times), F.greatest(*times)) if len(times) > 1 else (times[0], times[0])
            names = self.member.schema.names[-2:]
            columns += [end.alias(name) for end, name in zip(ends, names, strict=True)]
        return results.select(*columns)


class MultiJoinStep(Step):
    """A join of several streams, or of streams with the results of other joins, that share a join attribute.

    Rows are tagged with the number of their input.

    Parameters
    ----------
    name
        The step's name.
    spec
        The join, with the budget of all shards together.
    members
        What is joined, by the names that the spec has for it.
    layout
        How all inputs of the flow, and the results of lower joins, travel as one.
    shards
        How many slices the state has.
    parallelism
        How many tasks run at once.
    time
        What the watermark goes by; None without a window.
    lower
        The joins whose results are joined here, by the spec's names; None where the join is not part of a tree.
    final
        Of the last join of a tree: for each column of the result, what it is called inside the tree.
    late
        Where late rows go; None: nowhere.
    plan
        Of the only or last join: the plan of all, for `explanation`.
    """

    has_tags = True

    def __init__(
        self,
        name: str,
        spec: MJoinSpec,
        members: Mapping[str, Member],
        layout: SlotLayout,
        shards: int,
        parallelism: int,
        time: EventTime | None,
        lower: Mapping[str, LowerJoin] | None = None,
        final: Mapping[str, str] | None = None,
        late: LateOutput | None = None,
        plan: MultiwayPlan | None = None,
    ) -> None:
        self._late, self._plan = late, plan
        self.name, self.spec, self.shards = name, spec, shards
        self.layout, self._parallelism, self._time, self._lower = layout, parallelism, time, lower
        self.takes = None if lower is None else tuple(join.step for join in lower.values())
        self._members = dict(members)
        shard_budget = Budget(spec.budget.total_bytes // shards)
        self._shard_spec = replace(spec, budget=shard_budget)
        # Refused here, before any data moves, if the budget is too small.
        result = MJoin(self._shard_spec).output_schema
        schemas = {member: about.schema for member, about in members.items()}
        joined = T.StructType([_spark_field(spec, schemas, f.name, f.nullable) for f in result])
        self._put_out_as(joined, final or {name: name for name in joined.names})
        self._codes = code_names(max(len(member.keys) for member in members.values()))
        # A tree's layout has slots for members of other joins, too, which do not travel here.
        used = {slot for member in members.values() for slot in layout.places[member.number]}
        self._slots = sorted(slot for slot in used if slot >= 0)
        sortable = [layout.names[slot] for slot in self._slots if is_sortable(layout.types[slot])]
        self.sort_by = [SHARD_COLUMN, *self._codes, *sortable]
        # By input and then, but for the highest bits, by code.
        code = f"coalesce({CODE_COLUMN} & {2**_CODE_BITS - 1}L, 0L)"
        self.sort_first = f"shiftleft({SHARD_COLUMN} DIV {shards}, {_CODE_BITS}) + {code}"
        self._owner = uuid.uuid4().hex

    def _put_out_as(self, joined: T.StructType, wanted: Mapping[str, str]) -> None:
        """Tell what tasks put out, and which of these columns go on, under which names."""
        self._joined = joined
        carried = [T.StructField(f"c{n}", f.dataType, f.nullable, f.metadata) for n, f in enumerate(joined)]
        self.mapped_schema = encoded_schema(T.StructType(carried))
        places = [joined.names.index(inside) for inside in wanted.values()]
        fields = [(name, joined[place]) for name, place in zip(wanted, places, strict=True)]
        self.output = T.StructType([T.StructField(n, f.dataType, f.nullable, f.metadata) for n, f in fields])
        # Described to the JVM once, not in every micro-batch.
        self._columns = decoded_columns(T.StructType([carried[place] for place in places]), list(wanted))

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
        about = self.spec.fingerprint()
        return {
            "name": self.name,
            "kind": "multi_join",
            "shards": self.shards,
            "hash": "pmod(xxhash64(code, 42), shards)",
            "input": [f"{name}: {columns}" for name, columns in about["schemas"].items()],
            "output": [f"{field.name} {field.dataType.simpleString()}" for field in self.output],
            "on": [f"{a['name']}: {a['columns']}" for a in about["graph"]["attributes"]],
            "how": self.spec.how,
            "window": about["window"],
            "partitions": self.spec.partitions,
        }

    def explanation(self) -> StepExplanation:
        """What it joins and holds; the last join of a tree tells the plan of all."""
        window = self.spec.window
        facts: dict[str, Any] = {
            "kind": "multi_join",
            "joins": list(self.spec.names),
            "on": [attribute.name for attribute in self.spec.attributes],
            "how": self.spec.how,
            "window_ms": window.width // 1000 if isinstance(window, TimeWindow) else None,
            "lateness_ms": window.lateness // 1000 if isinstance(window, TimeWindow) else None,
            "shards": self.shards,
            "budget_bytes": self.spec.budget.total_bytes,
            "max_delay_ms": self.spec.max_delay,
        }
        if self._plan is None:
            return StepExplanation(self.name, facts)
        return StepExplanation(self.name, facts, self._plan.as_dict(), self._plan.text())

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The tagged rows of all inputs, each with its shard."""
        rows, *results = inputs
        columns = [*self._codes, *(self.layout.names[slot] for slot in self._slots)]
        if self._lower is not None:
            own = [member.number for name, member in self._members.items() if name not in self._lower]
            rows = rows.where(F.col(INPUT_COLUMN).isin(own))
        rows = rows.select(INPUT_COLUMN, *columns)
        for join, result in zip((self._lower or {}).values(), results, strict=True):
            part = tagged(join.rows(result), join.member, self.layout, len(self._codes))
            rows = rows.union(part.select(INPUT_COLUMN, *columns))
        number = F.col(INPUT_COLUMN) * self.shards + shard_column(F.col(CODE_COLUMN), self.shards)
        return rows.select(number.alias(SHARD_COLUMN), *columns)

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The time, the watermark that all shards judge by, and whether anything may wait."""
        return {
            "time_ms": clock.time_ms,
            "drain": clock.is_draining or self.spec.max_delay is None,
            "watermark": None if previous is None or self._time is None else self._time.watermark(previous),
        }

    def publish(self, record: StepRecord, state_root: Path, batch: int) -> None:
        """Make the late rows visible."""
        if self._late is not None:
            self._late.publish(record, state_root, batch)

    def needs_order(self, is_last: bool) -> bool:
        """Whatever arrives first, the results of a micro-batch and those that are still to come are the same."""
        return not is_last

    def task(self, is_last: bool) -> MultiJoinTask:
        """The join of one shard."""
        budget_bytes = self._shard_spec.budget.total_bytes
        # Together, the workers keep no more alive than the budget.
        alive_bytes = max(budget_bytes, self.spec.budget.total_bytes // self._parallelism)
        # Two runs of a task must give the same rows where another shuffle follows. Where nothing may wait they do
        # whatever the join holds where; otherwise what is owed depends on that, so only what is stored may count.
        may_live = is_last or self.spec.max_delay is None
        position = {slot: place for place, slot in enumerate(self._slots)}
        members = [self._members[name] for name in self.spec.names]
        return MultiJoinTask(
            spec=self._shard_spec,
            numbers=tuple(member.number for member in members),
            codes=len(self._codes),
            places=tuple(tuple(position.get(slot, slot) for slot in self.layout.places[m.number]) for m in members),
            output_names=tuple(self.mapped_schema.names),
            owner=self._owner,
            alive_bytes=alive_bytes if may_live else 0,
        )

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The join columns once, then each input's others."""
        return mapped.select(*self._columns)


def _spark_field(spec: MJoinSpec, schemas: Mapping[str, T.StructType], column: str, is_nullable: bool) -> T.StructField:
    """A column of the result as Spark knows it: a join column is the first input's."""
    owners = [a.inputs[0] for a in spec.attributes if column in a.columns[a.inputs[0]]]
    key_columns = {(n, c) for a in spec.attributes for n, columns in a.columns.items() for c in columns}
    owners += [name for name in spec.names if column in schemas[name].names and (name, column) not in key_columns]
    field = schemas[owners[0]][column]
    return T.StructField(column, field.dataType, is_nullable, field.metadata)
