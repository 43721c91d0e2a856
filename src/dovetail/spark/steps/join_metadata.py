"""What `multi_join` is told about its inputs: promises, and where punctuations come from.

A punctuation in the data takes effect after the data of its micro-batch, since a shuffle keeps no order within it. One
from a second stream carries an event time and takes effect once the watermark has passed it. Both name the join columns
and go to the shard of their value, as rows of their input do: the source of punctuations is part of the input's own
rows, marked by a hidden column. Where a stream does not name the whole join key, its rows go to every shard. What a
callable gives is written into the micro-batch's intent; values of the join key concern their own shard, all else every
shard.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dovetail.errors import PlanError
from dovetail.operators.metadata import REASON_COLUMN, Metadata, Order, Punctuation
from dovetail.operators.metadata.punctuation import BoundPunctuation, Marked
from dovetail.operators.mjoin import MJoinSpec, TimeWindow
from dovetail.spark.codes import quoted
from dovetail.spark.determinism import require_deterministic
from dovetail.spark.late_rows import QuarantineOutput
from dovetail.spark.steps import BatchClock
from dovetail.state.store import local_path

__all__ = ["JoinMetadata", "PunctuationSource", "mark_column"]

PunctuationSource: TypeAlias = str | Column | Marked | DataFrame | Callable[[BatchClock], Iterable[Punctuation]]
"""A condition on rows of the input; a stream of punctuations; or a function that gives some for every micro-batch."""

ENDS, IS_DATA_TOO, IS_PATTERN = 1, 2, 3
"""What a mark says: the row ends its join value; it does, and is a row of the input as well; it is a punctuation on the
columns that are not NULL, for every shard. No mark: it is only a row."""


def mark_column(name: str) -> str:
    """The hidden column that says of an input's rows whether they end their join value."""
    return f"~ends {name}"


@dataclass(frozen=True)
class JoinMetadata:
    """Promises of a join's inputs, checked.

    Attributes
    ----------
    metadata
        For the operator.
    marked
        Inputs whose rows are marked; those in `timed` take effect when the watermark has passed their event time.
    timed
        Inputs that have a stream of punctuations.
    patterns
        Of those whose stream does not name the whole join key, the columns that it names.
    callables
        Functions that give punctuations, by input.
    notices
        The column of the result that says what a row is; None: neither punctuations nor quarantined rows come out.
    quarantine
        Where rows that broke a promise go; None: into the column of notices.
    described
        What state depends on.
    """

    metadata: Metadata
    marked: frozenset[str] = frozenset()
    timed: frozenset[str] = frozenset()
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    callables: Mapping[str, Callable[[BatchClock], Iterable[Punctuation]]] = field(default_factory=dict)
    notices: str | None = None
    quarantine: QuarantineOutput | None = None
    described: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, DataFrame],
        keys: Collection[str] | None,
        punctuations: Mapping[str, PunctuationSource] | None,
        clustered: Collection[str] | None,
        ordered: Mapping[str, Order | str] | None,
        on_broken_promise: Any,
        notices: str | None,
        quarantine_path: str | os.PathLike[str] | None = None,
    ) -> "JoinMetadata | None":
        """Check what was asked for; None where nothing was."""
        if keys is None and punctuations is None and clustered is None and ordered is None:
            if notices is not None:
                raise PlanError("notices= tells of punctuations and broken promises, and nothing is promised.")
            if quarantine_path is not None:
                raise PlanError("quarantine_path= is for rows that break a promise, and nothing is promised.")
            return None
        if on_broken_promise == "quarantine" and notices is None and quarantine_path is None:
            raise PlanError(
                'on_broken_promise="quarantine" needs a place for the rows that are not joined.',
                hint='Pass quarantine_path="a/directory"; or notices="notice", to have them among the results.',
            )
        if quarantine_path is not None and on_broken_promise != "quarantine":
            raise PlanError(
                f"quarantine_path= and on_broken_promise={on_broken_promise!r} do not go together.",
                hint='Pass on_broken_promise="quarantine", or leave the path out.',
            )
        if quarantine_path is not None:
            for name, df in inputs.items():
                if REASON_COLUMN in df.columns:
                    raise PlanError(
                        f"Input {name!r} has a column {REASON_COLUMN!r}, the name of the reason.", hint="Rename it."
                    )
        if notices is not None and any(notices in df.columns for df in inputs.values()):
            raise PlanError(f"notices={notices!r} is the name of an input's column.", hint="Choose another name.")
        sources = dict(punctuations or {})
        for name, source in sources.items():
            if name not in inputs:
                raise PlanError(f"punctuations= names {name!r}; the inputs are {', '.join(inputs)}.")
            if not isinstance(source, str | Column | Marked | DataFrame) and not callable(source):
                raise PlanError(
                    f"punctuations= for {name!r} is {source!r}.",
                    hint="Give a condition, a streaming DataFrame, or a function.",
                )
        metadata = Metadata(
            keys=keys or (),
            clustered=clustered or (),
            ordered=ordered or {},
            on_broken_promise=on_broken_promise,
            propagate=notices is not None,
            is_batchwise=True,
        )
        streams = {name for name, source in sources.items() if isinstance(source, DataFrame)}
        functions = {
            name: source
            for name, source in sources.items()
            if not isinstance(source, str | Column | Marked | DataFrame)
        }
        described = {
            name: "stream" if name in streams else "callable" if name in functions else str(source)
            for name, source in sources.items()
        }
        return cls(
            metadata,
            frozenset(set(sources) - set(functions)),
            frozenset(streams),
            {},
            functions,
            notices,
            None
            if quarantine_path is None
            else QuarantineOutput(
                local_path(quarantine_path, "quarantine_path"), {name: df.columns for name, df in inputs.items()}
            ),
            {**metadata.fingerprint(), "punctuations": described, "notices": notices},
        )

    def marked_inputs(
        self, inputs: Mapping[str, DataFrame], punctuations: Mapping[str, PunctuationSource] | None, spec: MJoinSpec
    ) -> "tuple[JoinMetadata, dict[str, DataFrame]]":
        """The inputs with their hidden columns, and with the punctuations that come as streams among their rows; and
        what is known of these streams besides."""
        found = dict(inputs)
        patterns: dict[str, tuple[str, ...]] = {}
        for name in self.marked:
            source = (punctuations or {})[name]
            df, mark = inputs[name], mark_column(name)
            if isinstance(source, DataFrame):
                named = self._named(name, df, source, spec)
                if not set(spec.attributes[0].columns[name]) <= set(named):
                    patterns[name] = named
                found[name] = self._with_stream(name, df, source, named, spec)
                continue
            marked = source if isinstance(source, Marked) else Marked(source)
            condition = F.expr(marked.where) if isinstance(marked.where, str) else marked.where
            kind = IS_DATA_TOO if marked.is_data else ENDS
            found[name] = df.withColumn(mark, F.when(condition, F.lit(kind)).cast("byte"))
            require_deterministic(found[name], f"the condition that ends a value of {name!r}")
        named_too = {f"stream of {name}": list(columns) for name, columns in patterns.items()}
        return replace(self, patterns=patterns, described={**self.described, **named_too}), found

    def _named(self, name: str, df: DataFrame, source: DataFrame, spec: MJoinSpec) -> tuple[str, ...]:
        """The columns that a stream of punctuations speaks of: the join columns or, where it has not all of them, those
        of the input that it has."""
        if not source.isStreaming:
            raise PlanError(f"punctuations= for {name!r} is not a streaming DataFrame.")
        if not isinstance(spec.window, TimeWindow):
            raise PlanError(
                f"punctuations= for {name!r}: a stream of punctuations takes effect by event time, and there is none.",
                hint="Pass window= and time=.",
            )
        key, time = spec.attributes[0].columns[name], spec.window.columns_of(name)[0]
        known = tuple(column for column in df.columns if column in source.columns and column != time)
        named = tuple(key) if set(key) <= set(known) else known
        for column, is_there in ((time, time in source.columns), (key[0], bool(named))):
            if not is_there:
                raise PlanError(
                    f"The stream of punctuations of {name!r} has no column {column!r}.",
                    hint=f"It needs {time}, and {', '.join(key)} or other columns of the input.",
                )
        return named

    def _with_stream(
        self, name: str, df: DataFrame, source: DataFrame, named: tuple[str, ...], spec: MJoinSpec
    ) -> DataFrame:
        assert isinstance(spec.window, TimeWindow)
        taken = [*named, spec.window.columns_of(name)[0]]
        values = [
            F.col(quoted(f.name)).cast(f.dataType).alias(f.name)
            if f.name in taken
            else F.lit(None).cast(f.dataType).alias(f.name)
            for f in df.schema
        ]
        mark = mark_column(name)
        rows = df.withColumn(mark, F.lit(None).cast("byte"))
        kind = ENDS if set(spec.attributes[0].columns[name]) <= set(named) else IS_PATTERN
        return rows.union(source.select(*values, F.lit(kind).cast("byte").alias(mark)))

    def given(self, spec: MJoinSpec, clock: BatchClock) -> dict[str, list[dict[str, Any]]]:
        """What the functions give for a micro-batch, ready for its intent."""
        given: dict[str, list[dict[str, Any]]] = {}
        for name, function in self.callables.items():
            found = function(clock)
            if isinstance(found, Punctuation) or not isinstance(found, Iterable):
                raise PlanError(
                    f"The function of punctuations= for {name!r} gave {found!r}.",
                    hint="Let it give a list of punctuations; an empty one where there are none.",
                )
            given[name] = [BoundPunctuation.of(each, name, spec.schemas[name]).as_dict() for each in found]
        return given
