"""Conditions between two inputs of a multi-way join, besides equal join columns and event times.

They use the conditions of the semi-stream joins: the left input takes the place of the stream, the right one that of
the relation. They are checked on candidates that agree in everything else, many at once, as soon as both inputs are
bound. In an outer join they belong to the join: a row whose matches all fail them is a row without a match.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import PlanError
from dovetail.joins.conditions import Condition
from dovetail.joins.multiway.integers import integers_of

__all__ = ["PairCondition", "RenamedPair", "TimeDistance", "check_conditions", "visible_columns"]

_HIDDEN = "~"
"""Columns that a runtime adds begin with it."""


@dataclass(frozen=True)
class PairCondition:
    """A condition on rows of two inputs: `Comparison`, `Range`, `BatchPredicate`, `AllOf` or `TimeDistance`.

    Examples
    --------
    >>> from dovetail.joins.conditions import Comparison
    >>> PairCondition("orders", "payments", Comparison("amount", "<=", "paid")).describe()
    'orders, payments: stream.amount <= relation.paid'
    """

    left: str
    right: str
    condition: Condition

    def describe(self) -> str:
        """The condition as text; snapshots are matched by it."""
        return f"{self.left}, {self.right}: {self.condition.describe()}"


@dataclass(frozen=True)
class TimeDistance:
    """The right column is from `low` to `high` after the left one, both included, in their units; None for no bound.

    The columns are timestamps in microseconds, dates or integers. For the event times of a window use `TimeBound`,
    which also bounds the state.

    Examples
    --------
    >>> left, right = pa.record_batch({"due": [10, 10, None]}), pa.record_batch({"done": [12, 16, 10]})
    >>> TimeDistance("due", "done", None, 5).mask(left, right).tolist()
    [True, False, False]
    """

    left_column: str
    right_column: str
    low: int | None
    high: int | None

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        kinds = []
        for schema, name in ((stream, self.left_column), (relation, self.right_column)):
            if name not in schema.names:
                raise PlanError(
                    f"{self.describe()}: there is no column {name!r}.", hint=f"There are {', '.join(schema.names)}."
                )
            kinds.append(schema.field(name).type)
        is_known = all(
            (pa.types.is_timestamp(kind) and kind.unit == "us")
            or pa.types.is_date32(kind)
            or pa.types.is_signed_integer(kind)
            for kind in kinds
        )
        is_same = kinds[0] == kinds[1] or all(map(pa.types.is_signed_integer, kinds))
        if not is_known or not is_same:
            raise PlanError(
                f"{self.describe()}: there is no distance between {kinds[0]} and {kinds[1]}.",
                hint="Cast both to timestamp.",
            )
        return [self.left_column], [self.right_column]

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`."""
        left, left_valid = integers_of(stream.column(self.left_column))
        right, right_valid = integers_of(relation.column(self.right_column))
        found: BoolArray = left_valid & right_valid
        if self.low is not None:
            found &= right >= left + self.low
        if self.high is not None:
            found &= right <= left + self.high
        return found

    def describe(self) -> str:
        """See `Condition.describe`."""
        return f"relation.{self.right_column} from {self.low} to {self.high} after stream.{self.left_column}"


@dataclass(frozen=True)
class RenamedPair:
    """A condition on the user's column names, evaluated on batches with internal names; see `tree_nodes`."""

    condition: Condition
    left: tuple[tuple[str, str], ...]  # the user's names and the internal ones
    right: tuple[tuple[str, str], ...]

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        of_left, of_right = self.condition.columns(_as_written(stream, self.left), _as_written(relation, self.right))
        left, right = dict(self.left), dict(self.right)
        return [left[name] for name in of_left], [right[name] for name in of_right]

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`."""
        return self.condition.mask(_named(stream, self.left), _named(relation, self.right))

    def describe(self) -> str:
        """See `Condition.describe`."""
        return self.condition.describe()


def _as_written(schema: pa.Schema, names: Sequence[tuple[str, str]]) -> pa.Schema:
    return pa.schema([schema.field(inside).with_name(users) for users, inside in names])


def _named(batch: pa.RecordBatch, names: Sequence[tuple[str, str]]) -> pa.RecordBatch:
    users = {inside: name for name, inside in names}
    return batch.rename_columns([users[name] for name in batch.schema.names])


def check_conditions(schemas: Mapping[str, pa.Schema], conditions: Sequence[PairCondition]) -> None:
    """Refuse a condition on an unknown input or column, or on columns that cannot be compared."""
    for each in conditions:
        if not isinstance(each, PairCondition):
            raise PlanError(
                f"{each!r} is not a condition between two inputs.",
                hint='Pass PairCondition("a", "b", Comparison("x", "<", "y")).',
            )
        if not (hasattr(each.condition, "mask") and hasattr(each.condition, "columns")):
            raise PlanError(
                f"{each.condition!r} is not a condition.",
                hint="Pass Comparison, Range, AllOf or BatchPredicate of dovetail.joins, or a TimeDistance.",
            )
        for name in (each.left, each.right):
            if name not in schemas:
                raise PlanError(
                    f"A condition names {name!r}: {each.describe()}.", hint=f"The inputs are {', '.join(schemas)}."
                )
        if each.left == each.right:
            raise PlanError(
                f"A condition compares {each.left!r} with itself: {each.describe()}.",
                hint="Filter that input before the join.",
            )
        try:
            visible_columns(each, schemas)
        except PlanError as error:
            raise PlanError(
                f"The condition between {each.left!r} (stream) and {each.right!r} (relation): {error}"
            ) from error


def visible_columns(each: PairCondition, schemas: Mapping[str, pa.Schema]) -> tuple[list[str], list[str]]:
    """The columns that a condition reads of each input; of all columns, those that a user knows of."""
    left, right = schemas[each.left], schemas[each.right]
    if not isinstance(each.condition, RenamedPair):
        left, right = (pa.schema([f for f in schema if not f.name.startswith(_HIDDEN)]) for schema in (left, right))
    return each.condition.columns(left, right)
