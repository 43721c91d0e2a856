"""The steps of a pipeline file."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dovetail.errors import DovetailError
from dovetail.memory import Budget
from dovetail.spark.durations import parse_duration_ms

__all__ = [
    "STEP_KINDS",
    "BudgetText",
    "Columns",
    "DeduplicateModel",
    "DetectChangesModel",
    "Duration",
    "EnrichModel",
    "HistoryModel",
    "MultiJoinModel",
    "SideOutput",
    "Step",
    "Strict",
    "SurrogateKeyModel",
    "UpsertModel",
    "WaitForModel",
    "duration",
]


class Strict(BaseModel):
    """A mapping whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


def duration(value: str) -> str:
    """A span of time, as it was written, or a `ValueError`."""
    try:
        parse_duration_ms("value", value)
    except DovetailError as error:
        raise ValueError(f"{value!r} is not a span of time. {error.hint}") from None
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


class EnrichModel(Strict):
    """Join with a relation; see `dt.stream(...).enrich`."""

    relation: str = Field(description="One of `relations`.")
    on: str | list[str] | dict[str, str] | None = Field(
        None, description="The key: names that both have, or `{stream column: relation column}`. The relation's key."
    )
    how: Literal["inner", "left", "semi", "anti"] = Field("inner", description="The join type.")
    columns: Columns | None = Field(None, alias="select", description="The relation's columns to add; all.")
    condition: str | None = Field(
        None, description="Comparisons joined by AND, such as `valid_from <= ts AND ts < valid_to`."
    )
    strategy: Literal["auto", "mesh", "hybrid", "balanced", "index_nested_loop"] = Field(
        "auto", description="The operator; `auto` chooses by the cost model."
    )
    objective: Literal["rate", "memory"] = Field("rate", description="What to do with memory.")
    budget: BudgetText = Field("256MB", description="The most memory, all shards together.")
    max_delay: Duration | None = Field(
        None, description="How long a row may wait for the disk; by default it leaves with its micro-batch."
    )
    refresh: Literal["query", "batch"] = Field(
        "query", description="When a new version of the relation counts: at the next start, or in the next micro-batch."
    )


class MultiJoinModel(Strict):
    """Join streams with each other; the first step. See `dt.multi_join`."""

    inputs: Columns = Field(min_length=2, description="Two or more of `sources`.")
    on: str | list[str] | dict[str, str | list[str]] = Field(
        description="Join columns that all have, or each input's own: `{orders: order_id, payments: oid}`."
    )
    how: Literal["inner", "left", "right", "full", "semi", "anti"] = Field("inner", description="The join type.")
    window: Duration | None = Field(None, description="Rows join whose event times are at most this far apart.")
    time: str | dict[str, str] | None = Field(None, description="The event-time column, or one for each input.")
    lateness: Duration | None = Field(None, description="How late a row may be; by default the window.")
    budget: BudgetText = Field("1GB", description="The most memory, all shards together.")
    max_delay: Duration | None = Field(None, description="How long results may take whose rows are on disk.")
    shards: int | None = Field(None, ge=1, description="Slices of the state; by default as many as tasks run at once.")


class _Kept(Strict):
    relation: str = Field(description="One of `relations`, which the flow keeps; made if there is none.")
    on: str | list[str] | dict[str, str] = Field(description="The key: columns, or `{stream column: relation column}`.")
    budget: BudgetText = Field("64MB", description="How large changes may grow before they go into a new version.")
    shards: int | None = Field(None, ge=1, description="Slices of a new relation; as many as tasks run at once.")


class SurrogateKeyModel(_Kept):
    """Give every source key a warehouse key, the same for ever."""

    column: str = Field(description="The column to add.")


class DeduplicateModel(_Kept):
    """Let only the first row of each key pass."""

    order_by: Columns | None = Field(None, description="Which row of a key is first in a micro-batch.")
    mark: str | None = Field(None, description="Keep duplicates, and mark them in a column of this name.")


class DetectChangesModel(_Kept):
    """Tell of each row whether its key is new or its columns have changed."""

    compare: Columns | None = Field(None, description="The columns that count; all but the key.")
    order_by: Columns | None = Field(None, description="The order of a key's rows in a micro-batch.")
    column: str = Field("change", description="The column to add: `inserted`, `changed` or `unchanged`.")
    emit: list[Literal["inserted", "changed", "unchanged"]] | None = Field(
        None, min_length=1, description="Which of these to put out; all."
    )


class UpsertModel(_Kept):
    """Keep the last row of each key: a dimension of type 1."""

    columns: Columns | None = Field(None, description="The columns to keep besides the key; all others.")
    order_by: Columns | None = Field(None, description="The order of a key's rows in a micro-batch.")
    column: str = Field("change", description="The column to add: `inserted`, `changed` or `unchanged`.")
    emit: list[Literal["inserted", "changed", "unchanged"]] | None = Field(
        None, min_length=1, description="Which of these to put out; all."
    )


class HistoryModel(_Kept):
    """Keep every version of each key's row: a dimension of type 2. The versions that change go on."""

    time: str = Field(description="The column with the time of a change, a timestamp.")
    columns: Columns | None = Field(None, description="The columns that make a version; all but key and time.")
    valid_from: str = Field("valid_from", description="The column with the begin of a version.")
    valid_to: str = Field("valid_to", description="The column with its end.")


class SideOutput(Strict):
    """Where rows go that leave the flow before its end."""

    path: str = Field(description="A directory of Parquet files.")


class WaitForModel(Strict):
    """Join with a relation whose rows may come later than the tuples that need them."""

    relation: str = Field(description="One of `relations`.")
    on: str | list[str] | dict[str, str] | None = Field(
        None, description="The key: names that both have, or `{stream column: relation column}`. The relation's key."
    )
    deadline: Duration = Field(description="How long a row waits at most.")
    how: Literal["left", "inner"] = Field("left", description="Then: NULLs, or the row is dropped.")
    expired: SideOutput | None = Field(None, description="Then, instead: it goes there, with NULLs.")
    columns: Columns | None = Field(None, alias="select", description="The relation's columns to add; all.")
    condition: str | None = Field(None, description="Comparisons joined by AND.")


class Step(Strict):
    """One step: exactly one of the kinds below."""

    name: str | None = Field(None, description="A name for messages, and for `from` of another step.")
    source: str | None = Field(
        None, alias="from", description="Whose rows it takes: a source or an earlier step; by default the step before."
    )
    enrich: EnrichModel | None = Field(None, description="Join with a relation.")
    multi_join: MultiJoinModel | None = Field(None, description="Join sources with each other.")
    surrogate_key: SurrogateKeyModel | None = Field(None, description="Warehouse keys for source keys.")
    deduplicate: DeduplicateModel | None = Field(None, description="Only the first row of each key.")
    detect_changes: DetectChangesModel | None = Field(None, description="What is new, changed, unchanged.")
    upsert: UpsertModel | None = Field(None, description="A dimension of type 1.")
    history: HistoryModel | None = Field(None, description="A dimension of type 2.")
    wait_for: WaitForModel | None = Field(None, description="Early facts: join, and wait for rows that come late.")
    columns: Columns | None = Field(
        None, alias="select", description="Keep these columns, or SQL expressions (`expression AS name`)."
    )
    where: str | None = Field(None, description="Keep the rows for which this SQL condition holds.")
    with_columns: dict[str, str] | None = Field(
        None, alias="with", min_length=1, description="Add or replace columns: `{name: SQL expression}`."
    )
    drop: Columns | None = Field(None, description="Leave these columns out.")
    rename: dict[str, str] | None = Field(None, min_length=1, description="Rename columns: `{old: new}`.")

    @model_validator(mode="after")
    def _one_kind(self) -> "Step":
        given = [kind for kind, field in STEP_KINDS.items() if getattr(self, field) is not None]
        if len(given) != 1:
            kinds = ", ".join(STEP_KINDS)
            told = "no kind" if not given else f"two kinds: {' and '.join(given[:2])}"
            raise ValueError(f"A step is exactly one of {kinds}; this one has {told}.")
        return self

    @property
    def kept_relation(self) -> str | None:
        """The relation that the step keeps itself, and makes if need be."""
        return self.body.relation if isinstance(self.body, _Kept) else None

    @property
    def kind(self) -> str:
        """What it does, by its name in the file."""
        return next(kind for kind, field in STEP_KINDS.items() if getattr(self, field) is not None)

    @property
    def body(self) -> Any:
        """What its kind says."""
        return getattr(self, STEP_KINDS[self.kind])


STEP_KINDS: dict[str, str] = {
    field.alias or name: name for name, field in Step.model_fields.items() if name not in ("name", "source")
}
"""The kinds of steps by their names in a file, with the names of the model's fields."""
