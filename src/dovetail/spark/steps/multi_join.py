"""`multi_join`: several streams joined with each other, in a declared amount of memory, exactly once."""

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.joins.multiway import MJoinSpec, TimeBound, TimeWindow, mjoin_spec
from dovetail.joins.multiway.cascade import UNMATCHED, JoinTypes
from dovetail.joins.multiway.graph import JoinGraph, OnClause
from dovetail.joins.multiway.planner import ForcedPlan, MultiwayStatistics, plan_multiway
from dovetail.joins.multiway.spec import LatePolicy
from dovetail.joins.promises import Order
from dovetail.joins.promises.spec import BrokenPromisePolicy
from dovetail.spark.flow.late_rows import SideFiles
from dovetail.spark.flow.store import local_path
from dovetail.spark.plan.codes import check_key_columns, quoted
from dovetail.spark.plan.determinism import require_deterministic
from dovetail.spark.plan.names import NameResolver
from dovetail.spark.steps.join_conditions import JoinCondition, JoinConditions
from dovetail.spark.steps.join_metadata import JoinMetadata, PunctuationSource
from dovetail.spark.steps.multi_join_plan import JoinLayout, arrow_schema, plan_steps
from dovetail.spark.steps.stream import Flow, require_flow_name

__all__ = ["multi_join"]

_WATERMARK = "spark.watermarkDelayMs"
_MOMENTS = (T.TimestampType, T.TimestampNTZType)


def multi_join(
    inputs: Mapping[str, DataFrame],
    *,
    on: OnClause,
    how: JoinTypes = "inner",
    window: str | None = None,
    time: str | Mapping[str, str] | None = None,
    lateness: str | None = None,
    idle_after: str | None = None,
    late: LatePolicy = "drop",
    late_path: str | os.PathLike[str] | None = None,
    condition: JoinCondition | None = None,
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
        The join columns: one or several names that all inputs have; for each input, its own; or, if inputs are joined
        on different columns, equalities such as ``[("a.x", "b.x"), ("b.y", "c.y")]``.
    how
        ``"inner"``; ``"left"``, which keeps the rows of the first input that are in no combination with all others;
        ``"right"``, ``"full"``, ``"semi"`` and ``"anti"``. Or a type for each input after the first, as SQL cascades
        joins: ``{"b": "left", "c": "full"}`` is ``a LEFT JOIN b USING (...) FULL JOIN c USING (...)``, in the order of
        `inputs`. A row without a match is emitted when the watermark has passed its window.
    window
        Rows join if their event times are at most this far apart, pairwise, such as ``"2 seconds"``. State that no
        later row can match is removed. None: everything is kept.
    time
        The event-time column: one name for all inputs, or a name for each. Needed for a `window`, and for a `condition`
        to bound the state.
    lateness
        How far a row may be behind the latest event time of its input. None: the delay of ``withWatermark`` if an input
        declares one, else the window; without one, the furthest bound of `condition`. Later rows are counted, and not
        joined.
    idle_after
        How long an input without rows holds the watermark back, by the clock, such as ``"5 minutes"``. After that the
        others go on without it; rows that it sends later may be late. None: for good. The time while the flow is
        stopped does not count.
    late, late_path
        ``"side"`` also writes late rows as Parquet files to a directory per input below `late_path`, exactly once.
        ``"drop"`` does not.
    condition
        What else rows must satisfy to be joined: comparisons between columns of two inputs, joined by AND, such as
        ``"p.paid BETWEEN o.ordered AND o.ordered + INTERVAL 1 HOUR AND p.amount >= o.amount"``; a `PairCondition`, for
        instance with a `BatchPredicate`; or a list of both. Comparisons of two event-time columns (`time`) are bounds,
        besides or instead of a `window`, and state that no later row can match by them is removed.
    budget
        The maximum bytes of state in memory, over all shards; the rest is kept on disk.
    max_delay
        How long results may take whose rows are on disk. None: they are emitted in their micro-batch.
    plan
        ``"auto"``: one join of all inputs if they share the join columns, unless a tree is less work by `statistics`;
        otherwise the tree of joins with the least expected work. ``"single"``, ``"binary"``, or a tree as nested lists
        of names. Each join of a tree is a shuffle and gets an equal part of the budget.
    statistics
        Rates of the inputs and numbers of join values, for ``plan="auto"``.
    keys, clustered, ordered
        Inputs in which each join value occurs once; whose rows of a value come together; that are ordered by the join
        column (by name: ``"ascending"``, ``"descending"`` or an `Order`). Orders are judged by micro-batches. With a
        window, a second row of a value is reported until the watermark has passed the window of the first. These and
        `punctuations` need inputs that all share the same join columns, with any `plan`.
    punctuations
        For an input, what ends its join values: a condition on its rows (``"status = 'closed'"``, a column, or
        `Punctuation.where`), a stream with the join columns and the event time, or a function of the micro-batch's
        clock that returns punctuations. See ``docs/metadata.md``.
    on_broken_promise
        What to do with a row that its input had promised not to send: ``"error"``, ``"quarantine"`` or ``"count"``. In
        a tree of joins, ``"quarantine"`` needs `quarantine_path`.
    notices
        The name of an output column that marks closed join values; and quarantined rows, without `quarantine_path`.
    quarantine_path
        A directory to which quarantined rows are written as Parquet files, in a directory per input, with the reason in
        a column ``__reason``; exactly once.
    spill_directory
        Where a worker spills until its micro-batch is committed. None: Spark's local directory.
    shards
        The number of slices of each join's state, fixed for the life of the checkpoint. None: that of the checkpoint;
        for a new one, the number of tasks that run at once.
    name
        The flow's name, to which its checkpoint belongs.

    Returns
    -------
    Flow
        Its columns are the join columns once, then each input's others.

    Raises
    ------
    PlanError
        Names the input, column or option at fault and what would work.
    """
    _check_inputs(inputs)
    require_flow_name(name)
    spark = next(iter(inputs.values())).sparkSession
    graph = JoinGraph.of({n: df.columns for n, df in inputs.items()}, on)
    aligned = dict(inputs)
    for attribute in graph.attributes:
        aligned = _aligned(spark, aligned, attribute.columns)
    conditions = JoinConditions.of(
        condition, {n: df.schema for n, df in aligned.items()}, _named_times(time, inputs), NameResolver.of(spark)
    )
    promised = JoinMetadata.of(
        inputs, keys, punctuations, clustered, ordered, on_broken_promise, notices, quarantine_path
    )
    if promised is not None:
        plain = mjoin_spec(
            {n: arrow_schema(df.schema) for n, df in aligned.items()},
            graph,
            how=how,
            window=_window(window, time, lateness, late, {n: df.schema for n, df in aligned.items()}, conditions),
            conditions=conditions.others,
        )
        # Before punctuations are put among the rows: a plan that cannot use them must not take them for data.
        promised.metadata.check(plain)
        promised, aligned = promised.marked_inputs(aligned, punctuations, plain)
    schemas = {n: df.schema for n, df in aligned.items()}
    for attribute in graph.attributes:
        for n, columns in attribute.columns.items():
            check_key_columns(schemas[n], columns)
    spec = mjoin_spec(
        {n: arrow_schema(schema) for n, schema in schemas.items()},
        graph,
        how=how,
        window=_window(window, time, lateness, late, schemas, conditions),
        conditions=conditions.others,
        budget=budget,
        max_delay=None if max_delay is None else parse_duration_ms("max_delay", max_delay),
        spill_directory=None if spill_directory is None else local_path(spill_directory, "spill_directory"),
    )
    _check_unmatched_end(spec)
    if spec.cascade and promised is not None:
        raise PlanError(
            f"how={dict(how) if isinstance(how, Mapping) else how!r} with keys=, clustered=, ordered= or punctuations= "
            "is not supported: they need one join of all inputs, or inner joins.",
            hint="Leave the promises out, or join fewer inputs at a time.",
        )
    chosen = plan_multiway(graph, _statistics(statistics, spec), force=plan, how=how)
    parallelism = max(1, spark.sparkContext.defaultParallelism)
    side = _late_output(late, late_path, spec, inputs)
    layout = JoinLayout(_shards(shards, parallelism), parallelism, side, _idle_after_ms(idle_after, spec))
    source, steps = plan_steps(aligned, spec, chosen, layout, promised)
    for step in steps:
        step.may_take_shards = shards is None
    return Flow(name, source, steps)


def _named_times(time: str | Mapping[str, str] | None, inputs: Mapping[str, DataFrame]) -> dict[str, str]:
    """The event-time columns, as far as they are named."""
    if time is None:
        return {}
    return dict.fromkeys(inputs, time) if isinstance(time, str) else dict(time)


def _check_unmatched_end(spec: MJoinSpec) -> None:
    """Refuse joins in which a row without a match would wait for ever; see `tree_nodes` for those of a cascade."""
    unmatched = next((kind for kind in (spec.how, *spec.cascade) if kind in UNMATCHED), None)
    if spec.window is None and unmatched is not None and (spec.cascade or spec.how == "full"):
        raise PlanError(
            f"how={unmatched!r} without a watermark: a row without a match could only be emitted when no match can "
            "come any more, and without event times one always can, so it would never be.",
            hint='Pass window="1 hour" and time="ts", or a condition= that bounds event times.',
        )
    if spec.cascade:
        return
    for name, is_kept, reach in zip(spec.names, spec.preserved, spec.reaches, strict=True):
        if isinstance(spec.window, TimeWindow) and spec.gives_unmatched and is_kept and reach is None:
            raise PlanError(
                f"how={spec.how!r} keeps rows of {name!r} without a match, but no bound says how much later than "
                f"{name!r} a match may be: such a row would wait for ever.",
                hint="Add an upper bound to condition=, such as 'p.paid <= o.ordered + INTERVAL 1 HOUR', or a window=.",
            )


def _idle_after_ms(idle_after: str | None, spec: MJoinSpec) -> int | None:
    if idle_after is None:
        return None
    if spec.window is None:
        raise PlanError("idle_after= needs a window: without one there is no watermark.", hint="Leave it out.")
    return parse_duration_ms("idle_after", idle_after)


def _late_output(
    late: LatePolicy,
    path: str | os.PathLike[str] | None,
    spec: MJoinSpec,
    inputs: Mapping[str, DataFrame],
) -> SideFiles | None:
    if (late == "side") != (path is not None):
        raise PlanError(
            f"late={late!r} and late_path={path!r} do not go together.",
            hint='Pass late="side" and late_path="a/directory", or neither.',
        )
    if path is None:
        return None
    if spec.window is None:
        raise PlanError('late="side" needs a window: without one no row is late.', hint="Leave it out.")
    return SideFiles(local_path(path, "late_path"), {name: df.columns for name, df in inputs.items()})


def _statistics(given: MultiwayStatistics | None, spec: MJoinSpec) -> MultiwayStatistics | None:
    """The statistics for the plan; if none are given, at least how long tuples are kept."""
    if given is not None or not isinstance(spec.window, TimeWindow):
        return given
    reaches = [reach for reach in spec.reaches if reach is not None]
    return MultiwayStatistics(horizon_s=max(1, *reaches) / 1e6) if reaches else None


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
    conditions: JoinConditions,
) -> TimeWindow | None:
    if window is None and not conditions.bounds:
        if lateness is not None:
            raise PlanError(
                "lateness= needs a window.",
                hint='Pass window="2 seconds" and time="ts" as well, or a condition= between event times.',
            )
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
    width_ms = None if window is None else parse_duration_ms("window", window)
    declared = [schemas[name][column].metadata.get(_WATERMARK) for name, column in columns.items() if column]
    delays = [int(delay) for delay in declared if delay is not None]
    if lateness is None:
        lateness_ms = max(delays, default=_furthest_ms(conditions.bounds) if width_ms is None else width_ms)
    else:
        lateness_ms = parse_duration_ms("lateness", lateness)
    named = {name: column for name, column in columns.items() if column is not None}
    width = None if width_ms is None else timedelta(milliseconds=width_ms)
    return TimeWindow(width, named, timedelta(milliseconds=lateness_ms), late, conditions.bounds)


def _furthest_ms(bounds: Sequence[TimeBound]) -> int:
    """The furthest that a bound lets two event times be apart, rounded up."""
    ends = [abs(end) for bound in bounds for end in (bound.low, bound.high) if end is not None]
    return -(-max(ends) // 1000)


# -------------------------------------------------------------------- keys of several types


def _aligned(
    spark: SparkSession, inputs: Mapping[str, DataFrame], keys: Mapping[str, Sequence[str]]
) -> dict[str, DataFrame]:
    """The inputs with the columns of one join attribute cast to a common type."""
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
