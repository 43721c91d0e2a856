"""`multi_join`: several streams joined with each other, in a declared amount of memory, exactly once."""

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.errors import PlanError
from dovetail.memory import Budget
from dovetail.model.multiway import ForcedPlan, MultiwayStatistics, plan_multiway
from dovetail.model.multiway_graph import JoinGraph, OnClause
from dovetail.operators.metadata import Order
from dovetail.operators.metadata.spec import BrokenPromisePolicy
from dovetail.operators.mjoin import MJoinSpec, TimeWindow, mjoin_spec
from dovetail.operators.mjoin.spec import LatePolicy, MultiJoinType
from dovetail.spark.codes import check_key_columns, quoted
from dovetail.spark.determinism import require_deterministic
from dovetail.spark.durations import parse_duration_ms
from dovetail.spark.flow import Flow, require_flow_name
from dovetail.spark.join_metadata import JoinMetadata, PunctuationSource
from dovetail.spark.late_rows import LateOutput
from dovetail.spark.multi_join_plan import JoinLayout, arrow_schema, plan_steps
from dovetail.state.store import local_path

__all__ = ["multi_join"]

_WATERMARK = "spark.watermarkDelayMs"
_MOMENTS = (T.TimestampType, T.TimestampNTZType)


def multi_join(
    inputs: Mapping[str, DataFrame],
    *,
    on: OnClause,
    how: MultiJoinType = "inner",
    window: str | None = None,
    time: str | Mapping[str, str] | None = None,
    lateness: str | None = None,
    late: LatePolicy = "drop",
    late_path: str | os.PathLike[str] | None = None,
    budget: str | int | Budget = "1GB",
    max_delay: str | None = None,
    plan: ForcedPlan = "auto",
    statistics: MultiwayStatistics | None = None,
    keys: Collection[str] | None = None,
    punctuations: Mapping[str, PunctuationSource] | None = None,
    clustered: Collection[str] | None = None,
    ordered: Mapping[str, Order | str] | None = None,
    on_broken_promise: BrokenPromisePolicy = "error",
    notices: str | None = None,
    quarantine_path: str | os.PathLike[str] | None = None,
    spill_directory: str | os.PathLike[str] | None = None,
    shards: int | None = None,
    name: str = "multi_join",
) -> Flow:
    """Join several streams with each other.

    Parameters
    ----------
    inputs
        Streaming DataFrames by name; at least two.
    on
        The join columns: a name or names that all inputs have; for each input, its own name or names; or, where inputs
        are joined on different columns, equalities such as ``[("a.x", "b.x"), ("b.y", "c.y")]``.
    how
        ``"inner"``, the only one for inputs that do not all share the join columns; ``"left"``, which keeps the rows of
        the first input; for two inputs also ``"right"``, ``"full"``, ``"semi"`` and ``"anti"``. A row without a match
        comes out when the watermark has passed its window.
    window
        Rows join whose event times are at most this far apart, pairwise, such as ``"2 seconds"``; state that no later
        row can match goes. None: everything is kept.
    time
        The event-time column: one name for all inputs, or a name for each.
    lateness
        How far behind the latest event time of its input a row may be. None: the delay of ``withWatermark`` where an
        input declares one, else the window. Rows that are later are counted.
    late, late_path
        What becomes of them besides: ``"drop"``: nothing. ``"side"``: they are written as Parquet files below the
        directory `late_path`, those of each input in one of its name, exactly once.
    budget
        The most bytes of state in memory, all shards together; what does not fit is kept on disk.
    max_delay
        How long results may take whose rows are on disk. None: they leave with their micro-batch.
    plan
        ``"auto"``: the tree of joins with the least expected work; one join of all inputs where they share the join
        columns. ``"single"``, ``"binary"``, or a tree as nested lists of names: that one. Each join of a tree is a
        shuffle, and an equal part of the budget.
    statistics
        Rates of the inputs and numbers of join values for ``plan="auto"`` to go by.
    keys, clustered, ordered
        Inputs in which no join value comes twice; whose rows of a value come together; that are ordered by the join
        column (by name: ``"ascending"``, ``"descending"`` or an `Order`). Orders are judged by micro-batches.
    punctuations
        For an input, what ends its join values: a condition on its rows (``"status = 'closed'"``, a column, or
        `Punctuation.where`), a stream with the join columns and the event time, or a function of the micro-batch's
        clock that gives punctuations. See ``docs/metadata.md``.
    on_broken_promise
        What becomes of a row that its input had promised not to send: ``"error"``, ``"quarantine"`` or ``"count"``.
    notices
        The name of a column that tells closed join values from joined rows; and quarantined rows, where they have no
        place of their own.
    quarantine_path
        A directory in which quarantined rows are written as Parquet files, those of each input in one of its name, with
        the reason in a column ``__reason``; exactly once.
    spill_directory
        Where a worker puts what does not fit in memory until its micro-batch is committed. None: Spark's own local
        directory.
    shards
        How many slices the state of each join has; it stays so for the life of the checkpoint. None: as many as tasks
        run at once.
    name
        The flow's name, to which its checkpoint belongs.

    Returns
    -------
    Flow
        To be written to a sink, or continued; its columns are the join columns once, then each input's others.

    Raises
    ------
    PlanError
        Naming the input, column or option at fault and what would work.
    """
    _check_inputs(inputs)
    require_flow_name(name)
    spark = next(iter(inputs.values())).sparkSession
    graph = JoinGraph.of({n: df.columns for n, df in inputs.items()}, on)
    aligned = dict(inputs)
    for attribute in graph.attributes:
        aligned = _aligned(spark, aligned, attribute.columns)
    promised = JoinMetadata.of(
        inputs, keys, punctuations, clustered, ordered, on_broken_promise, notices, quarantine_path
    )
    if promised is not None:
        plain = mjoin_spec(
            {n: arrow_schema(df.schema) for n, df in aligned.items()},
            graph,
            how=how,
            window=_window(window, time, lateness, late, {n: df.schema for n, df in aligned.items()}),
        )
        promised, aligned = promised.marked_inputs(aligned, punctuations, plain)
    schemas = {n: df.schema for n, df in aligned.items()}
    for attribute in graph.attributes:
        for n, columns in attribute.columns.items():
            check_key_columns(schemas[n], columns)
    spec = mjoin_spec(
        {n: arrow_schema(schema) for n, schema in schemas.items()},
        graph,
        how=how,
        window=_window(window, time, lateness, late, schemas),
        budget=budget,
        max_delay=None if max_delay is None else parse_duration_ms("max_delay", max_delay),
        spill_directory=None if spill_directory is None else local_path(spill_directory, "spill_directory"),
    )
    chosen = plan_multiway(graph, _statistics(statistics, spec), force=plan)
    parallelism = max(1, spark.sparkContext.defaultParallelism)
    side = _late_output(late, late_path, window, inputs)
    layout = JoinLayout(_shards(shards, parallelism), parallelism, side)
    source, steps = plan_steps(aligned, spec, chosen, layout, promised)
    return Flow(name, source, steps)


def _late_output(
    late: LatePolicy,
    path: str | os.PathLike[str] | None,
    window: str | None,
    inputs: Mapping[str, DataFrame],
) -> LateOutput | None:
    if (late == "side") != (path is not None):
        raise PlanError(
            f"late={late!r} and late_path={path!r} do not go together.",
            hint='Pass late="side" and late_path="a/directory", or neither.',
        )
    if path is None:
        return None
    if window is None:
        raise PlanError('late="side" needs a window: without one no row is late.', hint="Leave it out.")
    return LateOutput(local_path(path, "late_path"), {name: df.columns for name, df in inputs.items()})


def _statistics(given: MultiwayStatistics | None, spec: MJoinSpec) -> MultiwayStatistics | None:
    """What the plan goes by; where nothing is known, at least how long tuples are kept."""
    if given is not None or not isinstance(spec.window, TimeWindow):
        return given
    return MultiwayStatistics(horizon_s=max(1, spec.window.width) / 1e6)


# -------------------------------------------------------------------- what was asked for


def _check_inputs(inputs: Mapping[str, DataFrame]) -> None:
    if not isinstance(inputs, Mapping) or len(inputs) < 2:
        raise PlanError("A multi-way join has at least two inputs.", hint='Pass {"a": a, "b": b, ...}.')
    for name, df in inputs.items():
        if not isinstance(df, DataFrame) or not df.isStreaming:
            raise PlanError(
                f"Input {name!r} is not a streaming DataFrame.",
                hint="Join a table that does not change with dovetail.enrich; a batch of rows with Spark's own join.",
            )
        repeated = sorted({column for column in df.columns if df.columns.count(column) > 1})
        if repeated:
            raise PlanError(f"Input {name!r} has two columns {repeated[0]!r}.", hint="Rename one of the two.")
        require_deterministic(df, f"input {name!r}")


def _shards(shards: int | None, parallelism: int) -> int:
    if shards is None:
        return parallelism
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise PlanError(f"shards={shards!r}: the number of shards is a whole number from 1 upwards.")
    return shards


def _window(
    window: str | None,
    time: str | Mapping[str, str] | None,
    lateness: str | None,
    late: LatePolicy,
    schemas: Mapping[str, T.StructType],
) -> TimeWindow | None:
    if window is None:
        if lateness is not None:
            raise PlanError("lateness= needs a window.", hint='Pass window="2 seconds" and time="ts" as well.')
        return None
    if isinstance(window, int):
        raise PlanError(
            f"window={window!r}: a window by number of rows needs an order of arrival, which no shuffle keeps.",
            hint='Use a window of event time, such as window="2 seconds" with time="ts".',
        )
    if time is None:
        raise PlanError(f"window={window!r} needs the event-time column.", hint='Pass time="ts", or a name per input.')
    columns = {name: time if isinstance(time, str) else time.get(name) for name in schemas}
    for name, column in columns.items():
        if column is None:
            raise PlanError(f"time= names no column of input {name!r}.", hint="Name one for every input.")
        if column not in schemas[name].names:
            raise PlanError(
                f"Input {name!r} has no column {column!r}.", hint=f"Its columns are {', '.join(schemas[name].names)}."
            )
        if not isinstance(schemas[name][column].dataType, _MOMENTS):
            raise PlanError(
                f"{name}.{column} is {schemas[name][column].dataType.simpleString()}; an event time is a timestamp.",
                hint="Cast it to timestamp.",
            )
    width_ms = parse_duration_ms("window", window)
    declared = [schemas[name][column].metadata.get(_WATERMARK) for name, column in columns.items() if column]
    delays = [int(delay) for delay in declared if delay is not None]
    lateness_ms = max(delays, default=width_ms) if lateness is None else parse_duration_ms("lateness", lateness)
    named = {name: column for name, column in columns.items() if column is not None}
    return TimeWindow(timedelta(milliseconds=width_ms), named, timedelta(milliseconds=lateness_ms), late)


# -------------------------------------------------------------------- keys of several types


def _aligned(
    spark: SparkSession, inputs: Mapping[str, DataFrame], keys: Mapping[str, Sequence[str]]
) -> dict[str, DataFrame]:
    """The inputs with the columns of one join attribute in the type that all of them fit."""
    aligned = dict(inputs)
    for columns in zip(*keys.values(), strict=True):
        fields = [inputs[name].schema[column] for name, column in zip(keys, columns, strict=True)]
        if len({field.dataType for field in fields}) == 1:
            continue
        if not all(isinstance(field.dataType, T.NumericType) for field in fields):
            told = ", ".join(f"{n}.{f.name} is {f.dataType.simpleString()}" for n, f in zip(keys, fields, strict=True))
            raise PlanError(
                f"The join columns have types that are not compared as they are: {told}.", hint="Cast them."
            )
        nothing = [F.lit(None).cast(field.dataType) for field in fields]
        common = spark.range(0).select(F.coalesce(*nothing).alias("common")).schema["common"].dataType
        for name, field in zip(keys, fields, strict=True):
            aligned[name] = aligned[name].withColumn(field.name, F.col(quoted(field.name)).cast(common))
    return aligned
