"""A multi-way join, or one of a tree of them, as a step of the commit protocol."""

import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.memory import Budget
from dovetail.joins.multiway import MJoin, MJoinSpec, TimeWindow
from dovetail.joins.multiway.planner import MultiwayPlan
from dovetail.joins.promises.join import CLOSED_ROW
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.runtime.multi_join import MultiJoinTask
from dovetail.runtime.promises import ENDS
from dovetail.spark.flow.late_rows import SideFiles
from dovetail.spark.flow.routing import is_sortable
from dovetail.spark.flow.step import BatchClock, Step, StepExplanation, StepRecord
from dovetail.spark.plan.codes import quoted, shard_column
from dovetail.spark.plan.payload import decoded_columns, encoded_schema
from dovetail.spark.steps.event_time import EventTime
from dovetail.spark.steps.tagged_inputs import INPUT_COLUMN, Member, SlotLayout, code_names, tagged

__all__ = ["LowerJoin", "MultiJoinStep"]

_CODE_BITS = 56  # of a code in the number that rows are sorted by first; those above are the input's


@dataclass(frozen=True)
class LowerJoin:
    """A step whose results this one joins."""

    step: str
    member: Member  # its results, as a member of this join
    columns: tuple[str, ...]  # of its results that this join takes
    times: tuple[str, ...] = ()  # the event times in its results
    ends: tuple[str, ...] = ()  # two more columns here: the earliest and the latest of these times
    marks: tuple[str, str] | None = None  # its column that reports closed values, and the one that marks them here

    def rows(self, results: DataFrame) -> DataFrame:
        """Its results, as this join takes them."""
        columns = [F.col(quoted(name)) for name in self.columns]
        times = [F.col(quoted(name)) for name in self.times]
        if times:
            ends = (F.least(*times), F.greatest(*times)) if len(times) > 1 else (times[0], times[0])
            columns += [end.alias(name) for end, name in zip(ends, self.ends, strict=True)]
        if self.marks is not None:
            told, mark = self.marks
            columns.append(F.when(F.col(quoted(told)) == CLOSED_ROW, F.lit(ENDS)).cast("byte").alias(mark))
        return results.select(*columns)


class MultiJoinStep(Step):
    """A join of several streams, or of streams with the results of other joins, that share a join attribute.

    Rows are tagged with the number of their input. The budget of ``spec`` is for all shards. ``layout`` holds all
    inputs of the flow and the results of lower joins. In a tree, ``lower`` are the joins whose results are joined here,
    by the spec's names, and the last join has ``final``: the internal name of each output column. ``plan`` is that of
    all joins. ``is_cascade`` if the tree is of outer joins, whose watermarks differ.
    """

    has_tags = True
    may_take_shards = False
    """Whether the number of shards is this host's default, so that a checkpoint's number takes precedence."""

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
        late: SideFiles | None = None,
        plan: MultiwayPlan | None = None,
        is_cascade: bool = False,
    ) -> None:
        self.side_files, self._plan = () if late is None else (late,), plan
        self.name, self.spec, self.is_cascade = name, spec, is_cascade
        self.layout, self._parallelism, self._time, self._lower = layout, parallelism, time, lower
        self.takes = None if lower is None else tuple(join.step for join in lower.values())
        self._members = dict(members)
        self._cut(shards)
        result = MJoin(self._shard_spec).output_schema
        schemas = {member: about.schema for member, about in members.items()}
        joined = T.StructType([_spark_field(spec, schemas, f.name, f.nullable) for f in result])
        self._final = dict(final or {name: name for name in joined.names})
        self._set_output(joined, self._final)
        self._codes = code_names(max(len(member.keys) for member in members.values()))
        # A tree's layout has slots for members of other joins, too, which do not travel here.
        used = {slot for member in members.values() for slot in layout.places[member.number]}
        self._slots = sorted(slot for slot in used if slot >= 0)
        sortable = [layout.names[slot] for slot in self._slots if is_sortable(layout.types[slot])]
        self.sort_by = [SHARD_COLUMN, *self._codes, *sortable]
        self._owner = uuid.uuid4().hex

    def _cut(self, shards: int) -> None:
        """Set what depends on the number of shards; refuse, before any data moves, a budget that is too small."""
        self.shards = shards
        self._shard_spec = replace(self.spec, budget=Budget(self.spec.budget.total_bytes // shards))
        MJoin(self._shard_spec)
        # By input and then, but for the highest bits, by code.
        code = f"coalesce({CODE_COLUMN} & {2**_CODE_BITS - 1}L, 0L)"
        self.sort_first = f"shiftleft({SHARD_COLUMN} DIV {shards}, {_CODE_BITS}) + {code}"

    def as_saved(self, saved: Mapping[str, Any]) -> "MultiJoinStep":
        """With the checkpoint's number of shards, unless the user has set it."""
        if not self.may_take_shards or saved["shards"] == self.shards:
            return self
        taken_up = copy(self)
        taken_up._cut(saved["shards"])
        taken_up._owner = uuid.uuid4().hex
        return taken_up

    def _set_output(self, joined: T.StructType, wanted: Mapping[str, str]) -> None:
        """Set the columns that tasks emit, and which of them are output, under which names."""
        self._joined = joined
        carried = [T.StructField(f"c{n}", f.dataType, f.nullable, f.metadata) for n, f in enumerate(joined)]
        self.mapped_schema = encoded_schema(T.StructType(carried))
        places = [joined.names.index(inside) for inside in wanted.values()]
        fields = [(name, joined[place]) for name, place in zip(wanted, places, strict=True)]
        self.output = T.StructType([T.StructField(n, f.dataType, f.nullable, f.metadata) for n, f in fields])
        # Described to the JVM once, not in every micro-batch.
        self._columns = decoded_columns(T.StructType([carried[place] for place in places]), list(wanted))

    def fingerprint(self) -> dict[str, Any]:
        about = self.spec.fingerprint()
        found = {
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
        if "conditions" in about:
            # Left out otherwise: so it is in checkpoints from before there were any.
            found["conditions"] = about["conditions"]
        return found

    def explanation(self) -> StepExplanation:
        """The last join of a tree has the plan of all."""
        window = self.spec.window
        facts: dict[str, Any] = {
            "kind": "multi_join",
            "joins": list(self.spec.names),
            "on": [attribute.name for attribute in self.spec.attributes],
            "how": self.spec.how,
            "window_ms": window.width // 1000 if isinstance(window, TimeWindow) and window.width is not None else None,
            "bounds": [bound.describe() for bound in window.bounds] if isinstance(window, TimeWindow) else [],
            "conditions": [each.describe() for each in self.spec.conditions],
            "lateness_ms": window.lateness // 1000 if isinstance(window, TimeWindow) else None,
            "idle_after_ms": None if self._time is None else self._time.idle_after_ms,
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
        """The time, the watermark for all shards, and whether anything may wait."""
        decided = {"time_ms": clock.time_ms, "drain": clock.is_draining or self.spec.max_delay is None}
        if self._time is None:
            return {**decided, "watermark": None}
        below = (self.takes or ()) if self.is_cascade else ()
        return {**decided, **self._time.decide(previous, clock, self.name, below)}

    def needs_order(self, is_last: bool) -> bool:
        """Whatever arrives first, the results of a micro-batch and those still to come are the same."""
        return not is_last

    def task(self, is_last: bool) -> MultiJoinTask:
        budget_bytes = self._shard_spec.budget.total_bytes
        # All workers together keep at most the budget alive.
        alive_bytes = max(budget_bytes, self.spec.budget.total_bytes // self._parallelism)
        # If another shuffle follows, two runs of a task must emit the same rows. If nothing may wait, they do, wherever
        # the join holds its rows. Otherwise delayed results depend on that, so only stored state may be used.
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
    """A column of the result as a Spark field: a join column is that of the first input."""
    owners = [a.inputs[0] for a in spec.attributes if column in a.columns[a.inputs[0]]]
    key_columns = {(n, c) for a in spec.attributes for n, columns in a.columns.items() for c in columns}
    owners += [name for name in spec.names if column in schemas[name].names and (name, column) not in key_columns]
    field = schemas[owners[0]][column]
    return T.StructField(column, field.dataType, is_nullable, field.metadata)
