"""Checks of a pipeline before Spark starts: names, order, columns, files, secrets.

Nothing is written and no query is started. Errors that only Spark can find, such as an invalid SQL expression, are
reported when the pipeline is planned, still before any row is processed.
"""

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import DovetailError
from dovetail.core.table_formats import table_format_of
from dovetail.joins.options import FlowOptions, JoinOptions
from dovetail.pipeline.chain import Chain, chain_of
from dovetail.pipeline.columns import KnownColumns, parse_schema, selected_names
from dovetail.pipeline.documents import Document, Location
from dovetail.pipeline.join_checks import condition_problems, dropped_inputs
from dovetail.pipeline.models import (
    BurstySource,
    DebeziumSource,
    DeltaSink,
    DeltaSource,
    FileSource,
    IcebergSource,
    JdbcTable,
    KafkaSource,
    ParquetSink,
    Pipeline,
    PostgresSink,
    RateSource,
    TableFiles,
)
from dovetail.pipeline.problems import PipelineError, Problem, one_of
from dovetail.pipeline.secrets import Secret
from dovetail.pipeline.step_models import EnrichModel, MultiJoinModel, Step
from dovetail.spark.plan.feed_columns import FEED_COLUMNS

if TYPE_CHECKING:
    from dovetail.relation import Relation

__all__ = ["CheckedPipeline", "check_pipeline", "local_path"]

KnownRelation = tuple[KnownColumns, tuple[str, ...] | None]
"""Columns and key of a relation, as far as they are known without Spark."""


@dataclass(frozen=True)
class CheckedPipeline:
    """A pipeline that can be planned."""

    pipeline: Pipeline
    document: Document
    chain: Chain
    columns: KnownColumns  # the columns of the sink, if known without Spark

    def path(self, text: str) -> str:
        """Resolve a path relative to the directory of the file."""
        return local_path(text, self.document)

    def outline(self) -> str:
        """The chain as one line: sources, steps, sink."""
        steps = [self.pipeline.steps[number].kind for number in self.chain.steps]
        return " -> ".join([", ".join(self.chain.inputs), *steps, self.pipeline.sink.format])

    def has_relation(self, name: str) -> bool:
        """Whether the relation already exists, so that it need not be built."""
        from dovetail.core.errors import RelationNotFound
        from dovetail.relation import Relation

        try:
            return bool(Relation.open(self.path(self.pipeline.relations[name].path)))
        except RelationNotFound:
            return False


def local_path(text: str, document: Document) -> str:
    """Resolve a path relative to the directory of the file; URIs are returned unchanged."""
    if "://" in text:
        return text
    return os.path.normpath(document.path.absolute().parent / Path(text).expanduser())


def check_pipeline(pipeline: Pipeline, document: Document) -> CheckedPipeline:
    """Check what pydantic cannot: references, order, columns, files on disk, secrets. The error has all problems."""
    return _Checker(pipeline, document).run()


class _Checker:
    def __init__(self, pipeline: Pipeline, document: Document) -> None:
        self.pipeline, self.document = pipeline, document
        self.problems: list[Problem] = []

    def run(self) -> CheckedPipeline:
        sources = {name: self._source(name) for name in self.pipeline.sources}
        relations = {name: self._relation(name) for name in self.pipeline.relations}
        self._places()
        self._secrets(self.pipeline, ())
        chain, wrong = chain_of(self.pipeline, self.document)
        self.problems += wrong
        columns: KnownColumns = None
        if not wrong:
            columns = self._along(chain, sources, relations)
            self._sink(columns)
        if self.problems:
            raise PipelineError(self.document.path, self.problems)
        return CheckedPipeline(self.pipeline, self.document, chain, columns)

    def _wrong(self, at: Location, message: str, hint: str = "") -> None:
        self.problems.append(self.document.problem(at, message, hint))

    def _path(self, text: str) -> str:
        return local_path(text, self.document)

    # ---------------------------------------------------------------- sources

    def _source(self, name: str) -> KnownColumns:
        source, at = self.pipeline.sources[name], ("sources", name)
        columns: KnownColumns = {"timestamp": "timestamp", "value": "bigint"}
        if isinstance(source, FileSource):
            found = self._files((*at, "path"), source.path, needs_files=source.columns is None)
            columns = self._schema((*at, "schema"), source.columns)
            if source.columns is None:
                columns = _schema_of_parquet(found) if source.format == "parquet" else None
        elif isinstance(source, KafkaSource):
            columns = self._schema((*at, "schema"), source.columns)
        elif isinstance(source, BurstySource):
            columns = {"k": "bigint", "v": "bigint", "ts": "timestamp"}
        elif not isinstance(source, RateSource):
            columns = self._feed(at, source)
        if source.watermark is not None and columns is not None:
            self._has_columns((*at, "watermark", "column"), [source.watermark.column], columns)
        if source.select is not None and columns is not None:
            columns = self._selected((*at, "select"), source.select, columns)
        return columns

    def _feed(self, at: Location, source: DebeziumSource | DeltaSource | IcebergSource) -> KnownColumns:
        """The columns of a table's changes, as far as known."""
        if isinstance(source, DebeziumSource):
            if source.path is not None:
                self._files((*at, "path"), source.path, needs_files=False)
            columns = self._schema((*at, "schema"), source.columns)
            return None if columns is None else {**columns, **dict.fromkeys(FEED_COLUMNS, "")}
        if isinstance(source, DeltaSource):
            path = self._path(source.path)
            if "://" not in path and table_format_of(path) != "Delta":
                self._wrong((*at, "path"), f"{path} is no Delta table.", _neighbour(path))
        return None

    def _schema(self, at: Location, text: str | None) -> KnownColumns:
        if text is None:
            return None
        try:
            return parse_schema(text)
        except ValueError as error:
            self._wrong(at, str(error))
            return None

    def _files(self, at: Location, text: str, needs_files: bool) -> list[str]:
        """The files at a path; reports a path that does not exist."""
        path = self._path(text)
        if "://" in path:
            return []
        if glob.has_magic(path):
            found = sorted(glob.glob(path))
            if not found and needs_files:
                self._wrong(at, f"No file matches {path}.")
            return found
        if not os.path.exists(path):
            self._wrong(at, f"{path} does not exist.", _neighbour(path))
            return []
        if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
            self._wrong(at, f"{path} cannot be read: permission denied.", "Give this user read permission.")
            return []
        if not os.path.isdir(path):
            return [path]
        table = table_format_of(path)
        if table is not None:
            self._wrong(
                at,
                f"{path} is a {table} table: its Parquet files also hold rows that were deleted or replaced.",
                "Export the table's rows as Parquet, and name that directory.",
            )
            return []
        found = sorted(os.path.join(path, name) for name in os.listdir(path) if name[0] not in "._")
        if needs_files and not found:
            self._wrong(at, f"{path} has no files, so its columns are unknown.", "Add schema:.")
        return found

    # ---------------------------------------------------------------- relations

    def _relation(self, name: str) -> KnownRelation:
        """Columns and key of a relation, as far as known."""
        entry, at = self.pipeline.relations[name], ("relations", name)
        owners = [step for step in self.pipeline.steps if step.kept_relation == name]
        if len(owners) > 1:
            self._wrong(at, "Two steps write this relation, but it can have one writer.", "Use a relation for each.")
        relation = self._opened((*at, "path"), entry.path, is_made=entry.build is not None or bool(owners))
        if relation is not None:
            return dict.fromkeys(relation.schema.names, ""), relation.key
        if entry.build is None:
            return None, None
        build, columns = entry.build, None
        if isinstance(build, TableFiles):
            found = self._files((*at, "build", "path"), build.path, needs_files=True)
            columns = self._schema((*at, "build", "schema"), build.columns)
            if columns is None and build.format == "parquet":
                columns = _schema_of_parquet(found)
        elif isinstance(build, JdbcTable):
            self._address((*at, "build", "url"), build.url)
        if columns is not None:
            self._has_columns((*at, "build", "on"), build.on, columns)
        return columns, tuple(build.on)

    def _opened(self, at: Location, text: str, is_made: bool) -> "Relation | None":
        from dovetail.core.errors import RelationNotFound
        from dovetail.relation import Relation

        path = self._path(text)
        try:
            return Relation.open(path)
        except RelationNotFound:
            if not is_made:
                self._wrong(
                    at,
                    f"There is no relation at {path}.",
                    _neighbour(path) or "Build it with dovetail relation build, or add build: with its source.",
                )
        except DovetailError as error:
            self._wrong(at, str(error))
        return None

    def _address(self, at: Location, url: str) -> None:
        if not url.startswith("jdbc:"):
            self._wrong(at, f"{url!r} is not a JDBC URL.", "Write jdbc:postgresql://host:5432/database.")
        elif "@" in url or "password=" in url.lower():
            self._wrong(at, "The URL contains a user or a password.", "Use user: and password: instead.")

    # ---------------------------------------------------------------- steps

    def _along(
        self, chain: Chain, sources: Mapping[str, KnownColumns], relations: Mapping[str, KnownRelation]
    ) -> KnownColumns:
        columns = None if len(chain.inputs) > 1 else sources[chain.inputs[0]]
        for number in chain.steps:
            step, at = self.pipeline.steps[number], ("steps", number)
            known = len(self.problems)
            if step.multi_join is not None:
                columns = self._joined((*at, "multi_join"), step, sources)
            else:
                columns = self._after(at, step, columns, relations)
            if len(self.problems) > known:
                columns = None  # do not report errors that follow from this one
        return columns

    def _joined(self, at: Location, step: Step, sources: Mapping[str, KnownColumns]) -> KnownColumns:
        join = step.multi_join
        assert join is not None
        self._known_inputs(at, join)
        on = self._join_columns(at, join)
        for name in on:
            if name not in join.inputs:
                self._wrong((*at, "on"), f"{name!r} is not one of the inputs.", one_of(name, join.inputs))
        result: KnownColumns = {}
        dropped, wrong_type = dropped_inputs(join)
        if wrong_type is not None:
            self._wrong((*at, "how"), *wrong_type)
        for name in join.inputs:
            columns, keys = sources[name], on.get(name)
            if keys is None:
                self._wrong((*at, "on"), f"There are no join columns for input {name!r}.")
                continue
            if columns is None:
                result = None
                continue
            self._has_columns((*at, "on"), [keys] if isinstance(keys, str) else keys, columns, f"source {name!r}")
            time = join.time.get(name) if isinstance(join.time, dict) else join.time
            if time is not None:
                self._has_columns((*at, "time"), [time], columns, f"source {name!r}")
            if result is not None and name not in dropped:
                result |= columns
        for message, hint in condition_problems(join, sources):
            self._wrong((*at, "condition"), message, hint)
        if join.window is not None and join.time is None:
            self._wrong((*at, "window"), "A window needs the event-time column.", "Add time:.")
        if result is not None and join.notices is not None:
            result[join.notices] = "string"
        return result

    def _known_inputs(self, at: Location, join: MultiJoinModel) -> None:
        """Whatever names inputs names those of the join."""
        named = {
            "keys": join.keys,
            "clustered": join.clustered,
            "ordered": join.ordered,
            "punctuations": join.punctuations,
        }
        for option, names in named.items():
            for name in names or ():
                if name not in join.inputs:
                    self._wrong((*at, option), f"{name!r} is not one of the inputs.", one_of(name, join.inputs))

    def _join_columns(self, at: Location, join: MultiJoinModel) -> dict[str, str | list[str]]:
        """The join columns of each input."""
        if isinstance(join.on, dict):
            return join.on
        plain = [one for one in join.on if isinstance(one, str)] if isinstance(join.on, list) else [join.on]
        if not isinstance(join.on, list) or len(plain) == len(join.on):
            return dict.fromkeys(join.inputs, plain)
        found: dict[str, str | list[str]] = {}
        for pair in join.on:
            for side in pair if isinstance(pair, list) else [pair]:
                name, _, column = side.partition(".")
                if not column:
                    self._wrong((*at, "on"), f"{side!r} names no input.", "Write input.column on both sides.")
                    continue
                known = found.setdefault(name, [])
                assert isinstance(known, list)
                known.append(column)
        return found

    def _after(
        self, at: Location, step: Step, columns: KnownColumns, relations: Mapping[str, KnownRelation]
    ) -> KnownColumns:
        """The columns after a step."""
        if step.enrich is not None:
            self._options((*at, "enrich"), step.enrich)
            return self._enriched((*at, "enrich"), step.enrich, columns, relations)
        if step.wait_for is not None:
            if step.wait_for.on == []:
                self._wrong((*at, "wait_for", "on"), "wait_for joins on equal keys.", "Name the key.")
                return None
            return self._enriched((*at, "wait_for"), step.wait_for, columns, relations)
        if step.kept_relation is not None:
            return self._kept((*at, step.kind), step, columns, relations)
        if columns is None:
            return None
        if step.columns is not None:
            return self._selected((*at, "select"), step.columns, columns)
        if step.with_columns is not None:
            return {**columns, **dict.fromkeys(step.with_columns, "")}
        if step.drop is not None:
            self._has_columns((*at, "drop"), step.drop, columns)
            return {name: kind for name, kind in columns.items() if name not in step.drop}
        if step.rename is not None:
            self._has_columns((*at, "rename"), list(step.rename), columns)
            renamed = {step.rename.get(name, name): kind for name, kind in columns.items()}
            if len(renamed) < len(columns):
                self._wrong((*at, "rename"), "Two columns would have the same name.")
            return renamed
        return columns

    def _options(self, at: Location, enrich: EnrichModel) -> None:
        """Check options that depend on others."""
        problem = JoinOptions(
            strategy=enrich.strategy,
            objective=enrich.objective,
            rate=enrich.rate,
            how=enrich.how,
            has_equality=enrich.on != [],
            has_condition=enrich.condition is not None,
            flow=FlowOptions(enrich.max_delay, enrich.shed, enrich.shed_to is not None),
        ).problem()
        if problem is not None:
            self._wrong((*at, problem.option), problem.message, problem.hint)

    def _known_relation(self, at: Location, name: str) -> bool:
        if name in self.pipeline.relations:
            return True
        self._wrong((*at, "relation"), f"There is no relation {name!r}.", one_of(name, list(self.pipeline.relations)))
        return False

    def _enriched(
        self, at: Location, enrich: Any, columns: KnownColumns, relations: Mapping[str, KnownRelation]
    ) -> KnownColumns:
        if not self._known_relation(at, enrich.relation):
            return None
        theirs, key = relations[enrich.relation]
        on = enrich.on if enrich.on is not None else list(key or ())
        mine = [on] if isinstance(on, str) else list(on)
        if columns is not None:
            self._has_columns((*at, "on"), mine, columns)
        if isinstance(on, dict) and theirs is not None:
            self._has_columns((*at, "on"), list(on.values()), theirs, f"relation {enrich.relation!r}")
        if key is not None and mine and len(mine) != len(key):
            self._wrong(
                (*at, "on"),
                f"The key of relation {enrich.relation!r} is {', '.join(key)}, but {len(mine)} columns are named.",
            )
        if enrich.columns is not None and theirs is not None:
            self._has_columns((*at, "select"), enrich.columns, theirs, f"relation {enrich.relation!r}")
        if columns is None or theirs is None or key is None:
            return None
        if enrich.how in ("semi", "anti"):
            return columns
        # Without equal keys the relation's key is a column like any other.
        added = [name for name in (enrich.columns or theirs) if name not in key or not mine]
        both = [name for name in added if name in columns]
        if both:
            self._wrong(
                at,
                f"The stream and the relation both have a column {both[0]!r}.",
                "Rename the stream's column first, or leave the relation's out with select:.",
            )
        return {**columns, **dict.fromkeys(added, "")}

    def _kept(
        self, at: Location, step: Step, columns: KnownColumns, relations: Mapping[str, KnownRelation]
    ) -> KnownColumns:
        """The columns after a step that keeps a relation."""
        body: Any = step.body
        if not self._known_relation(at, body.relation) or columns is None:
            return None
        on = [body.on] if isinstance(body.on, str) else list(body.on)
        theirs = list(body.on.values()) if isinstance(body.on, dict) else on
        self._has_columns((*at, "on"), on, columns)
        for name in ("compare", "columns", "order_by"):
            self._has_columns((*at, name), getattr(body, name, None) or [], columns)
        key = relations[body.relation][1]
        if key is not None and list(key) != theirs:
            self._wrong(
                (*at, "on"), f"The key of relation {body.relation!r} is {', '.join(key)}, not {', '.join(theirs)}."
            )
        if step.follow is not None:
            return columns
        if step.history is not None:
            self._has_columns((*at, "time"), [step.history.time], columns)
            attributes = body.columns or [name for name in columns if name not in on and name != body.time]
            return dict.fromkeys([*theirs, *attributes, body.valid_from, body.valid_to], "")
        added = body.mark if step.deduplicate is not None else body.column
        if added in columns:
            self._wrong(at, f"There is already a column {added!r}.", "Choose another name for the new one.")
        return columns if added is None else {**columns, added: ""}

    def _selected(self, at: Location, expressions: list[str], columns: dict[str, str]) -> KnownColumns:
        left, missing = selected_names(expressions, columns)
        if missing:
            self._has_columns(at, missing, columns)
        return left

    def _has_columns(self, at: Location, names: list[str], columns: Mapping[str, str], owner: str = "") -> None:
        folded = {name.casefold() for name in columns}
        for name in names:
            if name.casefold() not in folded:
                whose = f" in {owner}" if owner else ""
                self._wrong(at, f"There is no column {name!r}{whose}.", one_of(name, list(columns)))

    # ---------------------------------------------------------------- sink, places, secrets

    def _sink(self, columns: KnownColumns) -> None:
        sink = self.pipeline.sink
        for option in ("key", "partition_by"):
            names = getattr(sink, option, None)
            if names is not None and columns is not None:
                self._has_columns(("sink", option), names, columns)
        if isinstance(sink, PostgresSink) and ("@" in sink.host or "/" in sink.host.lstrip("/")):
            self._wrong(("sink", "host"), f"{sink.host!r} is not a host name.")

    def _places(self) -> None:
        """Check the directories that the flow will write to: none is a file, and no two are the same."""
        places: dict[str, Location] = {}
        wanted: list[tuple[Location, str]] = [(("checkpoint",), self.pipeline.checkpoint)]
        if isinstance(self.pipeline.sink, ParquetSink | DeltaSink):
            wanted.append((("sink", "path"), self.pipeline.sink.path))
        for name, source in self.pipeline.sources.items():
            if isinstance(source, FileSource):
                wanted.append((("sources", name, "path"), source.path))
            letters = getattr(source, "dead_letter", None)
            if letters is not None:
                wanted.append((("sources", name, "dead_letter", "path"), letters.path))
        for number, step in enumerate(self.pipeline.steps):
            if step.enrich is not None and step.enrich.shed_to is not None:
                wanted.append((("steps", number, "enrich", "shed_to", "path"), step.enrich.shed_to.path))
            join = step.multi_join
            for option in ("late", "quarantine"):
                side = None if join is None else getattr(join, option)
                if side is not None:
                    wanted.append((("steps", number, "multi_join", option, "path"), side.path))
            if step.wait_for is not None and step.wait_for.expired is not None:
                wanted.append((("steps", number, "wait_for", "expired", "path"), step.wait_for.expired.path))
        for at, text in wanted:
            path = self._path(text)
            if at[0] != "sources" or at[-2] == "dead_letter":
                self._writable(at, path)
            if path in places:
                self._wrong(at, f"{path} is also {'.'.join(map(str, places[path]))}.", "Give each its own directory.")
            places[path] = at

    def _writable(self, at: Location, path: str) -> None:
        if "://" in path:
            self._wrong(at, f"{path} is not on a disk.", "Use a local directory, or one that all nodes mount.")
            return
        here = Path(path)
        if here.exists() and not here.is_dir():
            self._wrong(at, f"{path} is a file.", "Name a directory.")
            return
        while not here.exists():
            here = here.parent
        if not here.is_dir():
            self._wrong(at, f"{here} is a file, so {path} cannot be created.")
        elif not os.access(here, os.W_OK | os.X_OK):
            self._wrong(at, f"{path} cannot be written: permission denied.", "Give this user write permission.")

    def _secrets(self, value: Any, at: Location) -> None:
        """Check that every secret exists, without revealing its value."""
        if isinstance(value, Secret):
            try:
                value.read()
            except DovetailError as error:
                self._wrong(at, error.message, error.hint or "")
            return
        if isinstance(value, dict):
            for name, inner in value.items():
                self._secrets(inner, (*at, name))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                self._secrets(inner, (*at, number))
        elif hasattr(type(value), "model_fields"):
            for name, field in type(value).model_fields.items():
                self._secrets(getattr(value, name), (*at, field.alias or name))


def _schema_of_parquet(files: list[str]) -> KnownColumns:
    """The columns of the first Parquet file, if it can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        if os.path.isfile(file):
            try:
                return dict.fromkeys(pq.read_schema(file).names, "")
            except (OSError, pa.ArrowException):
                return None
    return None


def _neighbour(path: str) -> str:
    """A hint: an existing path with a similar name."""
    parent, name = os.path.split(path)
    if not os.path.isdir(parent):
        return f"Its directory {parent} does not exist either."
    hint = one_of(name, [entry for entry in os.listdir(parent) if entry[0] != "."])
    return hint if hint.startswith("Did") else ""
