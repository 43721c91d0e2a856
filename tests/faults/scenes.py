"""Flows whose processes are killed: what each is fed, and what must have come out, however often it was.

Every scene is a directory with feeds, the program that runs the flow, and an oracle that knows nothing of Dovetail.
"""

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.relation import Relation
from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.flows import Feed, commits_of, published_rows, state_bytes, unnamed_state_files
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

__all__ = ["SCENES", "ClosedGroups", "Enrich", "History", "Keys", "MultiJoin", "Scene"]

HERE = Path(__file__).parent


class Scene(ABC):
    """A flow to be killed."""

    victim: ClassVar[ModuleType]
    points: ClassVar[Sequence[str]]
    """Where a test that has time for few kills begins."""
    files_before: ClassVar[int] = 0

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "victim.log"
        root.mkdir(parents=True, exist_ok=True)

    @property
    def command(self) -> list[str]:
        """The driver."""
        return [sys.executable, str(self.victim.__file__), str(self.root)]

    def run(self, point: str | None = None, kill_after_s: float | None = None) -> int:
        """Run the driver; gives its exit code, or minus the signal that ended it. Whatever is left of it is killed."""
        return run_driver(self.command, self.log, point, kill_after_s)

    def said(self) -> str:
        """The end of the driver's log."""
        return self.log.read_bytes()[-3000:].decode(errors="replace") if self.log.exists() else ""

    @abstractmethod
    def add(self, files: int) -> None:
        """Give the flow more to do: a micro-batch per file."""

    @abstractmethod
    def check_so_far(self) -> None:
        """After a kill: what is published is right, as far as it goes."""

    @abstractmethod
    def check_end(self) -> None:
        """After a run to the end: exactly the oracle's rows, and no file left that no commit names."""

    def _check_checkpoint(self) -> list[dict[str, Any]]:
        checkpoint = self.root / "checkpoint"
        assert unnamed_state_files(checkpoint) == set()
        commits = commits_of(checkpoint)
        assert len(commits) <= 3
        return commits


class Enrich(Scene):
    """Four joins one after the other; in two of them tuples wait."""

    victim = load_program(HERE / "flow_victim.py")
    points = (
        "flow.commit.linked",
        "sink.parquet.renamed",
        "flow.job.after",
        "flow.batch.before",
        "flow.intent.before",
        "flow.intent.linked",
        "flow.intent.after",
        "flow.job.before",
        "flow.task.output",
        "flow.task.before_state",
        "state.file.before",
        "state.file.begun",
        "state.file.written",
        "state.file.after",
        "flow.task.trailer",
        "sink.parquet.written",
        "flow.commit.before",
        "flow.commit.after",
        "flow.publish.before",
        "sink.parquet.published",
        "flow.publish.after",
        "sink.parquet.forget",
        "flow.cleanup.document",
        "flow.cleanup.file",
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feed = Feed(root / "feed")
        self.victim.relations(root)

    def add(self, files: int) -> None:
        for _ in range(files):
            self.feed.add(self.victim.orders(len(self.feed.files())))

    def check_so_far(self) -> None:
        _require_once(self.root / "out", ["n"])

    def check_end(self) -> None:
        tables = [(self.victim.AREA_OF, "k"), (self.victim.CITY_OF, "k")]
        tables += [(self.victim.MAYOR_OF, "city"), (self.victim.PARTY_OF, "mayor")]
        rows = self.feed.rows()
        for table, key in tables:
            rows = join_oracle(rows, table, on=[key], how="left")
        assert_same_rows(published_rows(self.root / "out"), rows, "after kills")
        self._check_checkpoint()


class Keys(Scene):
    """Surrogate keys, and a dimension that is kept of them."""

    victim = load_program(HERE / "kept_victim.py")
    points = (
        "kept.fold.after",
        "flow.commit.linked",
        "relation.manifest.linked",
        "kept.fold.part",
        "kept.fold.before",
        "flow.intent.linked",
        "flow.job.after",
        "state.file.written",
        "flow.commit.after",
        "flow.task.trailer",
        "flow.publish.after",
        "flow.cleanup.file",
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feed = Feed(root / "feed")

    def add(self, files: int) -> None:
        for _ in range(files):
            self.feed.add(self.victim.changes(len(self.feed.files())))

    def check_so_far(self) -> None:
        _require_once(self.root / "out", ["n"])
        numbers_of(published_rows(self.root / "out"))

    def check_end(self) -> None:
        given, rows = self.feed.rows(), published_rows(self.root / "out")
        assert sorted(row["n"] for row in rows) == sorted(row["n"] for row in given)
        numbers = numbers_of(rows)
        assert set(numbers) == {(row["source"], row["id"]) for row in given}
        last: dict[int, str] = {}
        change = {}
        for row in sorted(rows, key=lambda row: row["n"]):
            known = row["sk"] in last
            change[row["n"]] = "inserted" if not known else "unchanged" if last[row["sk"]] == row["city"] else "changed"
            last[row["sk"]] = row["city"]
        assert {row["n"]: row["change"] for row in rows} == change
        keys = Relation.open(self.root / "keys").to_arrow().to_pylist()
        assert {(row["source"], row["id"]): row["sk"] for row in keys} == numbers, "a run ended and left some out"
        assert len(keys) == len(numbers)
        dimension = Relation.open(self.root / "dim").to_arrow().to_pylist()
        assert {row["sk"]: row["city"] for row in dimension} == last
        assert len(dimension) == len(last)
        self._check_checkpoint()


class History(Scene):
    """A slowly changing dimension of type 2."""

    victim = load_program(HERE / "history_victim.py")
    points = (
        "kept.fold.after",
        "relation.manifest.linked",
        "flow.task.before_state",
        "relation.segment.durable",
        "relation.vacuum.file",
        "flow.commit.linked",
        "relation.manifest.after",
        "flow.publish.before",
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feed = Feed(root / "feed")

    def add(self, files: int) -> None:
        for _ in range(files):
            self.feed.add(self.victim.changes(len(self.feed.files())))

    def check_so_far(self) -> None:
        _require_once(self.root / "out", ["id", "valid_from", "valid_to"])

    def check_end(self) -> None:
        kept: dict[int, list[tuple[Any, str]]] = {}  # of each id, when which city began
        said: Counter[tuple[Any, ...]] = Counter()
        before: set[tuple[Any, ...]] = set()
        for file in self.feed.files():
            for row in pq.read_table(file).sort_by("ts").to_pylist():
                versions = kept.setdefault(row["id"], [])
                if not versions or versions[-1][1] != row["city"]:
                    versions.append((row["ts"].replace(tzinfo=UTC), row["city"]))
            now = {
                (key, city, begun, versions[place + 1][0] if place + 1 < len(versions) else None)
                for key, versions in kept.items()
                for place, (begun, city) in enumerate(versions)
            }
            said.update(now - before)
            before = now
        # Spark writes timestamps as 96 bits, which Arrow takes for nanoseconds: they do not reach to the year 9999.
        found = _published(
            self.root / "out", ["id", "city", "valid_from", "valid_to"], coerce_int96_timestamp_unit="us"
        )
        assert Counter(map(self._version, found.to_pylist())) == said
        dimension = Relation.open(self.root / "dim").to_arrow().to_pylist()
        assert Counter(map(self._version, dimension)) == Counter(before)
        self._check_checkpoint()

    @staticmethod
    def _version(row: dict[str, Any]) -> tuple[Any, ...]:
        begin, end = row["valid_from"].replace(tzinfo=UTC), row["valid_to"].replace(tzinfo=UTC)
        return row["id"], row["city"], begin, None if end.year == 9999 else end


class MultiJoin(Scene):
    """Three streams whose state is far above its budget."""

    victim = load_program(HERE / "multi_join_victim.py")
    points = (
        "mjoin.spill.written",
        "flow.commit.linked",
        "state.file.after",
        "flow.job.after",
        "flow.batch.before",
        "flow.intent.before",
        "flow.intent.linked",
        "flow.intent.after",
        "flow.job.before",
        "flow.task.output",
        "mjoin.spill.begun",
        "mjoin.compacted",
        "flow.task.before_state",
        "state.file.before",
        "state.file.begun",
        "state.file.written",
        "flow.task.trailer",
        "sink.parquet.written",
        "flow.commit.before",
        "flow.commit.after",
        "flow.publish.before",
        "sink.parquet.renamed",
        "sink.parquet.published",
        "flow.publish.after",
        "sink.parquet.forget",
        "flow.cleanup.document",
        "flow.cleanup.file",
    )
    files_before = 12

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feeds = {name: Feed(root / name) for name in self.victim.NAMES}

    def add(self, files: int) -> None:
        for _ in range(files):
            for name, feed in self.feeds.items():
                feed.add(self.victim.rows_of(name, len(feed.files())))

    def check_so_far(self) -> None:
        _require_once(self.root / "out", ["na", "nb", "nc"])

    def check_end(self) -> None:
        engine = duckdb.connect()
        for name in self.victim.NAMES:
            numbers = range(len(self.feeds[name].files()))
            rows = [self.victim.rows_of(name, number).drop_columns([f"v{name}"]) for number in numbers]
            engine.register(name, pa.concat_tables(rows))
        span = f"interval {self.victim.WINDOW_FILES} seconds"
        near = " and ".join(
            f"{x} - {y} between -{span} and {span}" for x, y in (("ta", "tb"), ("ta", "tc"), ("tb", "tc"))
        )
        expected = engine.sql(f"select na, nb, nc from a join b using (k) join c using (k) where {near}")
        engine.register("found", _published(self.root / "out", ["na", "nb", "nc"]))
        missing = engine.sql("select * from expected except all select na, nb, nc from found").fetchall()
        more = engine.sql("select na, nb, nc from found except all select * from expected").fetchall()
        assert (missing, more) == ([], []), f"{len(missing)} rows are missing, {len(more)} are too many"
        assert expected.shape[0] > 1_000
        self._check_spilled(self._check_checkpoint())

    def _check_spilled(self, commits: list[dict[str, Any]]) -> None:
        """It did spill, and no more is kept than twice the live state."""
        reports = [shard["report"] for shard in commits[-1]["operators"]["1-multi_join"]]
        assert all(report["counters"]["flushed_rows"] > 0 for report in reports)
        directory, live = state_bytes(self.root / "checkpoint")
        held = sum(rows for report in reports for rows in report["state_rows"].values())
        print(f"{directory} bytes in the state directory, {live} live, {held} rows held")
        assert live > 2 * self.victim.BUDGET_BYTES
        assert directory <= 2 * live


class ClosedGroups(Scene):
    """A join with promises, whose closed groups are counted; rows that break a promise go aside."""

    victim = load_program(HERE / "closed_groups_victim.py")
    points = (
        "flow.commit.after",
        "state.file.after",
        "flow.publish.before",
        "flow.commit.before",
        "flow.task.output",
        "flow.intent.after",
        "flow.task.before_state",
        "flow.task.trailer",
        "sink.parquet.written",
        "flow.commit.linked",
        "sink.parquet.renamed",
        "sink.parquet.published",
        "flow.publish.after",
        "flow.cleanup.document",
    )
    files_before = 2

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.feeds = [Feed(root / name) for name in ("news", "access")]

    @property
    def files(self) -> int:
        """Of each feed."""
        return len(self.feeds[1].files())

    def add(self, files: int) -> None:
        for _ in range(files):
            for feed, table in zip(self.feeds, self.victim.rows_of(self.files), strict=True):
                feed.add(table)

    def check_so_far(self) -> None:
        _require_once(self.root / "out", ["sno"])

    def check_end(self) -> None:
        expected, broken = self._expected()
        found = [(row["sno"], row["accesses"], row["total"]) for row in published_rows(self.root / "out")]
        assert len(found) == len({sno for sno, _, _ in found})
        assert {sno: (count, total) for sno, count, total in found} == expected
        assert len(expected) >= 10 * self.files
        files = sorted((self.root / "aside").glob("*/*.parquet"))
        aside = [row for file in files for row in pq.read_table(file).to_pylist()]
        assert sorted((row["sno"], row["n"]) for row in aside) == sorted(broken)
        assert {row["__reason"] for row in aside} == {"it matches an earlier punctuation of its input"}
        # Only what is open is held: the latest ten items, by the join and by the count.
        shards = self._check_checkpoint()[-1]["operators"]
        assert sum(shard["report"]["state_rows"]["news"] for shard in shards["1-multi_join"]) <= 20
        assert sum(shard["report"]["state_rows"]["open"] for shard in shards["2-aggregate_closed"]) <= 20

    def _expected(self) -> tuple[dict[int, tuple[int, int | None]], list[tuple[int, int]]]:
        """Each closed item's records, counted from the files; and the rows that came after their item was over."""
        counts: Counter[int] = Counter()
        sums: Counter[int] = Counter()
        over: set[int] = set()
        broken: list[tuple[int, int]] = []
        for number in range(self.files):
            rows = self.victim.rows_of(number)[1].to_pylist()
            for row in rows:
                if row["over"]:
                    continue
                if row["sno"] in over:
                    broken.append((row["sno"], row["n"]))
                else:
                    counts[row["sno"]] += 1
                    sums[row["sno"]] += row["n"]
            over |= {row["sno"] for row in rows if row["over"]}
        return {sno: (counts[sno], sums[sno] if counts[sno] else None) for sno in over}, broken


SCENES: tuple[type[Scene], ...] = (Enrich, Keys, History, MultiJoin, ClosedGroups)


def numbers_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """The surrogate key of each source key; fails if one has two, or two have one."""
    found: dict[tuple[str, int], int] = {}
    for row in rows:
        assert found.setdefault((row["source"], row["id"]), row["sk"]) == row["sk"], "a source key has two numbers"
    assert len(set(found.values())) == len(found), "a number was given twice"
    return found


def _published(directory: Path, columns: list[str], **reading: Any) -> pa.Table:
    files = sorted(path for path in directory.glob("*.parquet") if path.name[0] not in "._")
    tables = [pq.read_table(file, columns=columns, **reading) for file in files]
    return pa.concat_tables(tables) if tables else pa.table({name: pa.array([], pa.int64()) for name in columns})


def _require_once(directory: Path, columns: list[str]) -> None:
    """No two published rows are the same in these columns."""
    found = _published(directory, columns)
    counted = found.group_by(columns).aggregate([([], "count_all")])
    repeated = counted.filter(pa.compute.greater(counted["count_all"], 1))
    assert repeated.num_rows == 0, f"repeated: {repeated.slice(0, 3).to_pylist()}"
