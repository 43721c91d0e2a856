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
    "Duration",
    "EnrichModel",
    "MultiJoinModel",
    "Step",
    "Strict",
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


class Step(Strict):
    """One step: exactly one of the kinds below."""

    name: str | None = Field(None, description="A name for messages, and for `from` of another step.")
    source: str | None = Field(
        None, alias="from", description="Whose rows it takes: a source or an earlier step; by default the step before."
    )
    enrich: EnrichModel | None = Field(None, description="Join with a relation.")
    multi_join: MultiJoinModel | None = Field(None, description="Join sources with each other.")
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
