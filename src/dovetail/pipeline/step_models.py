"""The steps of a pipeline file."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import DovetailError
from dovetail.core.memory import Budget

__all__ = [
    "STEP_KINDS",
    "BudgetText",
    "Columns",
    "DeduplicateModel",
    "DetectChangesModel",
    "Duration",
    "EnrichModel",
    "FollowModel",
    "HistoryModel",
    "MultiJoinModel",
    "PunctuationModel",
    "SideOutput",
    "StatisticsModel",
    "Step",
    "Strict",
    "SurrogateKeyModel",
    "UpsertModel",
    "WaitForModel",
    "duration",
]


class Strict(BaseModel):
    """A mapping that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


def duration(value: str) -> str:
    """Validate a duration and return it unchanged."""
    try:
        parse_duration_ms("value", value)
    except DovetailError as error:
        raise ValueError(f"{value!r} is not a duration. {error.hint}") from None
    return value


def _budget(value: str | int) -> str | int:
    try:
        Budget.parse(value)
    except DovetailError as error:
        raise ValueError(str(error).replace("budget=", "")) from None
    return value


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Duration = Annotated[str, AfterValidator(duration)]
BudgetText = Annotated[str | int, AfterValidator(_budget)]
Columns = Annotated[list[str], BeforeValidator(_names), Field(min_length=1)]


class SideOutput(Strict):
    """The output for rows that leave the flow early."""

    path: str = Field(description="A directory of Parquet files.")


class EnrichModel(Strict):
    """Join with a relation; see `dt.stream(...).enrich`."""

    relation: str = Field(description="One of `relations`.")
    on: str | list[str] | dict[str, str] | None = Field(
        None,
        description="The key: common names, or `{stream column: relation column}`. Default: the relation's key. `[]`: "
        "none, `condition` decides.",
    )
    how: Literal["inner", "left", "semi", "anti"] = Field("inner", description="The join type.")
    columns: Columns | None = Field(None, alias="select", description="The relation's columns to add. Default: all.")
    condition: str | None = Field(
        None, description="Comparisons joined by AND, such as `valid_from <= ts AND ts < valid_to`."
    )
    strategy: Literal["auto", "mesh", "hybrid", "balanced", "index_nested_loop", "lookup"] = Field(
        "auto", description="The operator; `auto` chooses by the cost model, `lookup` looks every row up at once."
    )
    objective: Literal["rate", "memory"] = Field("rate", description="Maximise the rate, or minimise the memory.")
    rate: float | None = Field(
        None,
        gt=0,
        description="With `objective: memory`: rows per second to serve with the least memory. Default: as observed.",
    )
    budget: BudgetText = Field("256MB", description="Maximum memory, all shards together.")
    max_delay: Duration | None = Field(
        None, description="How long a row may wait for the disk. By default it leaves with its micro-batch."
    )
    refresh: Literal["query", "batch"] = Field(
        "query", description="When to use a new version of the relation: at the next start, or in the next micro-batch."
    )
    shed: Literal["random", "oldest", "least_joined"] | None = Field(
        None, description="Which rows to drop when more arrive than may wait. By default none is dropped."
    )
    shed_to: SideOutput | None = Field(None, description="Write the rows that are dropped there, as they arrived.")


class StatisticsModel(Strict):
    """What is known of the inputs, for `plan: auto`."""

    rates: dict[str, float] = Field(default_factory=dict, description="Rows per second, per input.")
    distinct: dict[str, float] = Field(default_factory=dict, description="Number of values, per join column.")
    horizon: Duration | None = Field(None, description="How long rows are kept. Default: the window, or a minute.")


class PunctuationModel(Strict):
    """Rows that end their join value."""

    where: str = Field(description="A SQL condition on the rows of the input.")
    data: bool = Field(True, description="Whether such a row is also a row of the input.")


_JoinType = Literal["inner", "left", "right", "full", "semi", "anti"]


class MultiJoinModel(Strict):
    """Join streams with each other. Must be the first step. See `dt.multi_join`."""

    inputs: Columns = Field(min_length=2, description="Two or more of `sources`.")
    on: str | list[str] | list[list[str]] | dict[str, str | list[str]] = Field(
        description="Common join columns; or one per input: `{orders: order_id, payments: oid}`; or equalities: "
        "`[[orders.id, payments.order_id], [payments.account, accounts.id]]`."
    )
    how: _JoinType | dict[str, _JoinType] = Field(
        "inner",
        description="The join type; or that of each input after the first, as SQL cascades joins: "
        "`{payments: left, shipments: full}`.",
    )
    window: Duration | None = Field(None, description="Join rows whose event times are at most this far apart.")
    time: str | dict[str, str] | None = Field(None, description="The event-time column, or one per input.")
    lateness: Duration | None = Field(None, description="How late a row may be. Default: the window.")
    idle_after: Duration | None = Field(
        None, description="How long an input without rows holds event time back. Default: for good."
    )
    late: SideOutput | None = Field(None, description="Write late rows there. By default they are only counted.")
    condition: str | Columns | None = Field(
        None,
        description="Comparisons between columns of two inputs, joined by AND, or a list of them: "
        "`payments.paid BETWEEN orders.ordered AND orders.ordered + INTERVAL 1 HOUR`. Those of event times bound the "
        "state.",
    )
    budget: BudgetText = Field("1GB", description="Maximum memory, all shards together.")
    max_delay: Duration | None = Field(None, description="How long results of spilled rows may take.")
    plan: str | list[Any] = Field(
        "auto", description="`auto`, `single`, `binary`, or a tree of inputs: `[[orders, payments], accounts]`."
    )
    statistics: StatisticsModel | None = Field(None, description="Rates and numbers of values for `plan: auto`.")
    keys: Columns | None = Field(None, description="Inputs in which no join value comes twice.")
    punctuations: dict[str, str | PunctuationModel] | None = Field(
        None, description="Per input, which rows end their join value: a SQL condition, or `{where: ..., data: false}`."
    )
    clustered: Columns | None = Field(None, description="Inputs whose rows of one join value come together.")
    ordered: dict[str, Literal["ascending", "descending"]] | None = Field(
        None, description="Inputs that are ordered by the join column."
    )
    on_broken_promise: Literal["error", "quarantine", "count"] = Field(
        "error", description="What to do with a row that its input had promised not to send."
    )
    quarantine: SideOutput | None = Field(None, description="Write quarantined rows there.")
    notices: str | None = Field(None, description="A column that tells closed join values from joined rows.")
    spill_directory: str | None = Field(
        None, description="Where state goes that does not fit in memory. Default: Spark's local directory."
    )
    shards: int | None = Field(
        None, ge=1, description="Shards of the state. Default: the checkpoint's, or the number of parallel tasks."
    )


class _Kept(Strict):
    relation: str = Field(description="One of `relations`, kept by the flow; created if it does not exist.")
    on: str | list[str] | dict[str, str] = Field(description="The key: columns, or `{stream column: relation column}`.")
    budget: BudgetText = Field("64MB", description="How large changes may grow before they go into a new version.")
    shards: int | None = Field(None, ge=1, description="Shards of a new relation. Default: number of parallel tasks.")
    fold_every: Duration = Field("10 seconds", description="How soon others see changes in the relation.")


class SurrogateKeyModel(_Kept):
    """Assign a permanent warehouse key to every source key."""

    column: str = Field(description="The column to add.")


class DeduplicateModel(_Kept):
    """Pass only the first row of each key."""

    order_by: Columns | None = Field(None, description="Order of a key's rows in a micro-batch; the first passes.")
    mark: str | None = Field(None, description="Keep duplicates and mark them in a column of this name.")


class DetectChangesModel(_Kept):
    """Detect for each row whether its key is new or its columns have changed."""

    compare: Columns | None = Field(None, description="The columns to compare. Default: all but the key.")
    order_by: Columns | None = Field(None, description="The order of a key's rows in a micro-batch.")
    column: str = Field("change", description="The column to add: `inserted`, `changed` or `unchanged`.")
    emit: list[Literal["inserted", "changed", "unchanged"]] | None = Field(
        None, min_length=1, description="Which of these to emit. Default: all."
    )


class UpsertModel(_Kept):
    """Keep the last row of each key: a type 1 dimension."""

    columns: Columns | None = Field(None, description="The columns to keep besides the key. Default: all.")
    order_by: Columns | None = Field(None, description="The order of a key's rows in a micro-batch.")
    column: str = Field("change", description="The column to add: `inserted`, `changed` or `unchanged`.")
    emit: list[Literal["inserted", "changed", "unchanged"]] | None = Field(
        None, min_length=1, description="Which of these to emit. Default: all."
    )


class HistoryModel(_Kept):
    """Keep every version of each key's row: a type 2 dimension. Emits the versions that change."""

    time: str = Field(description="The column with the time of a change, a timestamp.")
    columns: Columns | None = Field(None, description="The columns of a version. Default: all but key and time.")
    valid_from: str = Field("valid_from", description="The column with the start of a version.")
    valid_to: str = Field("valid_to", description="The column with its end.")


class FollowModel(_Kept):
    """Keep a relation current with a table, from the table's changes; see `dt.follow`."""

    on: Columns = Field(alias="keys", description="The key: a column or several.")
    sequence_by: str | None = Field(
        None, description="A column or SQL expression that orders the changes of a key. Default: the source's own."
    )
    apply_as_deletes: str | None = Field(
        None, description="SQL: which changes delete their key, as `op = 'd'`. Default: the source's own."
    )
    columns: Columns | None = Field(None, description="The columns to keep besides. Default: the relation's, or all.")
    keep_tombstones: Duration = Field("2 days", description="How long a deleted key is remembered.")


class WaitForModel(Strict):
    """Join with a relation whose rows may arrive after the tuples that need them."""

    relation: str = Field(description="One of `relations`.")
    on: str | list[str] | dict[str, str] | None = Field(
        None, description="The key: common names, or `{stream column: relation column}`. Default: the relation's key."
    )
    deadline: Duration = Field(description="The maximum time that a row waits.")
    how: Literal["left", "inner"] = Field("left", description="After the deadline: `left` adds NULLs, `inner` drops.")
    expired: SideOutput | None = Field(None, description="Write rows that expire there instead, with NULLs.")
    columns: Columns | None = Field(None, alias="select", description="The relation's columns to add. Default: all.")
    condition: str | None = Field(None, description="Comparisons joined by AND.")


class Step(Strict):
    """One step: exactly one of the kinds below."""

    name: str | None = Field(None, description="A name, for messages and for `from` of another step.")
    source: str | None = Field(
        None, alias="from", description="Its input: a source or an earlier step. Default: the previous step."
    )
    enrich: EnrichModel | None = Field(None, description="Join with a relation.")
    multi_join: MultiJoinModel | None = Field(None, description="Join sources with each other.")
    surrogate_key: SurrogateKeyModel | None = Field(None, description="Assign warehouse keys to source keys.")
    deduplicate: DeduplicateModel | None = Field(None, description="Pass only the first row of each key.")
    detect_changes: DetectChangesModel | None = Field(None, description="Mark rows as new, changed or unchanged.")
    upsert: UpsertModel | None = Field(None, description="A type 1 dimension.")
    history: HistoryModel | None = Field(None, description="A type 2 dimension.")
    follow: FollowModel | None = Field(None, description="A relation that follows a table by its changes.")
    wait_for: WaitForModel | None = Field(None, description="Early facts: join, and wait for rows that arrive late.")
    columns: Columns | None = Field(
        None, alias="select", description="Keep these columns, or SQL expressions (`expression AS name`)."
    )
    where: str | None = Field(None, description="Keep the rows for which this SQL condition is true.")
    with_columns: dict[str, str] | None = Field(
        None, alias="with", min_length=1, description="Add or replace columns: `{name: SQL expression}`."
    )
    drop: Columns | None = Field(None, description="Drop these columns.")
    rename: dict[str, str] | None = Field(None, min_length=1, description="Rename columns: `{old: new}`.")

    @model_validator(mode="after")
    def _one_kind(self) -> "Step":
        given = [kind for kind, field in STEP_KINDS.items() if getattr(self, field) is not None]
        if len(given) != 1:
            kinds = ", ".join(STEP_KINDS)
            told = "no kind" if not given else f"two kinds: {' and '.join(given[:2])}"
            raise ValueError(f"A step must have exactly one of {kinds}; this one has {told}.")
        return self

    @property
    def kept_relation(self) -> str | None:
        """The relation that the step keeps, and creates if necessary."""
        return self.body.relation if isinstance(self.body, _Kept) else None

    @property
    def kind(self) -> str:
        """Its kind, by the name in the file."""
        return next(kind for kind, field in STEP_KINDS.items() if getattr(self, field) is not None)

    @property
    def body(self) -> Any:
        return getattr(self, STEP_KINDS[self.kind])


STEP_KINDS: dict[str, str] = {
    field.alias or name: name for name, field in Step.model_fields.items() if name not in ("name", "source")
}
"""The kinds of steps by their names in a file, with the names of the model's fields."""
