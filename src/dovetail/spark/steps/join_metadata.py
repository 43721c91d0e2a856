"""What `multi_join` knows about its inputs: promises, and where punctuations come from.

A punctuation in the data takes effect after the data of its micro-batch, because a shuffle keeps no order within it.
One from a second stream has an event time and takes effect once the watermark has passed it. Both name the join columns
and go to the shard of their value, like rows of their input: they are rows of the input, marked by a hidden column. If
a stream does not name the whole join key, its rows go to every shard. Punctuations returned by a function are written
into the micro-batch's intent; those of the join key concern their own shard, all others every shard.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dovetail.core.errors import PlanError
from dovetail.joins.multiway import MJoinSpec, TimeWindow
from dovetail.joins.multiway.tree_nodes import TreeNode, internal_names
from dovetail.joins.promises import REASON_COLUMN, Metadata, Order, Punctuation
from dovetail.joins.promises.punctuation import BoundPunctuation, Marked
from dovetail.joins.promises.tree import node_metadata, written_names
from dovetail.runtime.late_rows import QUARANTINE_PREFIX
from dovetail.runtime.promises import ENDS, IS_DATA_TOO, IS_PATTERN, mark_column
from dovetail.spark.flow.late_rows import SideFiles
from dovetail.spark.flow.step import BatchClock
from dovetail.spark.flow.store import local_path
from dovetail.spark.plan.codes import quoted
from dovetail.spark.plan.determinism import require_deterministic

__all__ = ["CLOSED_COLUMN", "JoinMetadata", "PunctuationSource"]

CLOSED_COLUMN = "~closed"
"""In the results of a lower join of a tree: marks rows that report their join value as closed."""

PunctuationSource: TypeAlias = str | Column | Marked | DataFrame | Callable[[BatchClock], Iterable[Punctuation]]
"""A condition on rows of the input; a stream of punctuations; or a function that returns some per micro-batch."""


@dataclass(frozen=True)
class JoinMetadata:
    """The promises of a join's inputs, validated."""

    metadata: Metadata  # for the operator
    marked: frozenset[str] = frozenset()  # inputs with a hidden column that marks punctuations
    timed: frozenset[str] = frozenset()  # those with a stream of punctuations, which take effect by the watermark
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # its columns, if not the whole join key
    callables: Mapping[str, Callable[[BatchClock], Iterable[Punctuation]]] = field(default_factory=dict)
    notices: str | None = None  # the result's column that says what a row is; None: only results are emitted
    quarantine: SideFiles | None = None  # for rows that broke a promise; None: the column of notices
    described: Mapping[str, Any] = field(default_factory=dict)  # what state depends on
    trusted: frozenset[str] = frozenset()  # inputs that are results of lower joins of a tree
    written: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # in a tree: the user's names, by input

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
        """Validate the options of `multi_join`; None if nothing is promised."""
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
            else SideFiles(
                local_path(quarantine_path, "quarantine_path"),
                {name: df.columns for name, df in inputs.items()},
                QUARANTINE_PREFIX,
            ),
            {**metadata.fingerprint(), "punctuations": described, "notices": notices},
        )

    def marked_inputs(
        self, inputs: Mapping[str, DataFrame], punctuations: Mapping[str, PunctuationSource] | None, spec: MJoinSpec
    ) -> "tuple[JoinMetadata, dict[str, DataFrame]]":
        """The inputs with their hidden columns and the rows of their streams of punctuations, and the metadata with the
        patterns of these streams.
        """
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
        """The columns that a stream of punctuations names: the join columns or, if it lacks some, all that it shares
        with the input.
        """
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

    def check_tree(self) -> None:
        """Refuse what a tree of joins cannot do."""
        if self.metadata.on_broken_promise == "quarantine" and self.quarantine is None:
            raise PlanError(
                'on_broken_promise="quarantine" without quarantine_path= puts rows among the results, which a tree of '
                "joins cannot do: the joins above would take them for results of those below.",
                hint='Pass quarantine_path="a/directory", or plan="single".',
            )

    def of_node(self, node: TreeNode, spec: MJoinSpec, is_last: bool) -> "JoinMetadata":
        """The part that concerns one join of a tree. All but the last report closed values to the next join."""
        mine, internal = set(node.inputs), internal_names(spec.graph)
        metadata = node_metadata(self.metadata, node, is_last)
        notices = self.notices if is_last else CLOSED_COLUMN
        patterns = {
            name: tuple(internal.get((name, column), column) for column in columns)
            for name, columns in self.patterns.items()
            if name in mine
        }
        about = dict(self.described)
        about |= {**metadata.fingerprint(), "notices": notices}
        about["punctuations"] = {n: of for n, of in self.described["punctuations"].items() if n in mine}
        return replace(
            self,
            metadata=metadata,
            marked=frozenset((self.marked & mine) | set(node.lower)),
            timed=self.timed & mine,
            patterns=patterns,
            callables={name: function for name, function in self.callables.items() if name in mine},
            notices=notices,
            described=about,
            trusted=frozenset(node.lower),
            written=written_names(spec, node),
        )

    def given(self, spec: MJoinSpec, clock: BatchClock) -> dict[str, list[dict[str, Any]]]:
        """What the functions return for a micro-batch, ready for its intent."""
        given: dict[str, list[dict[str, Any]]] = {}
        for name, function in self.callables.items():
            found = function(clock)
            if isinstance(found, Punctuation) or not isinstance(found, Iterable):
                raise PlanError(
                    f"The function of punctuations= for {name!r} returned {found!r}.",
                    hint="Return a list of punctuations, empty if there are none.",
                )
            written = self.written.get(name, {})
            names = {written.get(column, column): column for column in spec.schemas[name].names}
            schema = pa.schema([f.with_name(written.get(f.name, f.name)) for f in spec.schemas[name]])
            bound = [BoundPunctuation.of(each, name, schema).renamed(names) for each in found]
            given[name] = [each.as_dict() for each in bound]
        return given
