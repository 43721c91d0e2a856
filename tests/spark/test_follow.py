"""Relations that follow a table: equal to a replay of its changes, in whatever order and how often they come."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.core.errors import DovetailError, PlanError, SchemaError, StateError
from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.runner import plan_pipeline
from dovetail.relation import Relation
from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed, commits_of, published_rows

DRILLING = load_program(Path(__file__).parents[1] / "drills" / "drilling.py")

Change = dict[str, Any]
Table = dict[int, tuple[Any, ...]]

SCHEMA = "id bigint, city string, size int"


def change_log(seed: int, length: int, keys: int) -> list[Change]:
    """What happened to a table, in order: its rows written and deleted, with a growing number."""
    chosen, present, log = random.Random(seed), set[int](), []
    for number in range(1, length + 1):
        key = min(int(chosen.paretovariate(0.7)), keys)
        if key in present and chosen.random() < 0.25:
            present.discard(key)
            log.append({"op": "d", "id": key, "city": None, "size": None, "lsn": number})
        else:
            op = "u" if key in present else "c"
            present.add(key)
            size = None if chosen.random() < 0.1 else number
            log.append({"op": op, "id": key, "city": f"city {number % 11}", "size": size, "lsn": number})
    return log


def replayed(log: Sequence[Change]) -> Table:
    """The table after its changes, by plain Python."""
    table: Table = {}
    for change in sorted(log, key=lambda change: change["lsn"]):
        if change["op"] == "d":
            table.pop(change["id"], None)
        else:
            table[change["id"]] = (change["city"], change["size"])
    return table


def envelope(change: Change, form: str) -> str:
    """The change as Debezium writes it."""
    row = {name: change[name] for name in ("id", "city", "size")}
    before = {**row, "city": None} if change["op"] == "d" else None
    after = None if change["op"] == "d" else row
    source = {"connector": "postgresql", "lsn": change["lsn"], "ts_ms": 1_700_000_000_000 + (change["lsn"] or 0)}
    body: dict[str, Any] = {"before": before, "after": after, "op": change["op"], "source": source, "ts_ms": 1}
    if form == "with schema":
        body = {"schema": {"type": "struct", "fields": [], "name": "shop.customers.Envelope"}, "payload": body}
    return json.dumps(body)


def shuffled(log: Sequence[Change], seed: int) -> list[Change]:
    """The changes out of order, a third of them twice."""
    chosen = random.Random(seed)
    every = [*log, *chosen.sample(list(log), len(log) // 3)]
    chosen.shuffle(every)
    return every


def give(root: Path, number: int, lines: Sequence[str]) -> None:
    (root / "topic").mkdir(exist_ok=True)
    draft = root / f"draft-{number}"
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.rename(root / "topic" / f"{number:04d}.json")


def follow(spark: SparkSession, root: Path, **options: Any) -> Any:
    feed = dt.sources.debezium(root / "topic", schema=SCHEMA, options={"maxFilesPerTrigger": "1"}, spark=spark)
    chosen = {"keys": "id", "shards": 2, "checkpoint": root / "checkpoint", "trigger": "available-now", **options}
    return dt.follow(root / "customers", feed, **chosen)


def run(spark: SparkSession, root: Path, **options: Any) -> Any:
    query = follow(spark, root, **options)
    query.awaitTermination()
    return query


def in_relation(root: Path) -> Table:
    rows = Relation.open(root / "customers").to_arrow().to_pylist()
    found = {row["id"]: (row["city"], row["size"]) for row in rows}
    assert len(found) == len(rows), "a key has two rows"
    return found


@pytest.mark.parametrize(("seed", "fold_every"), [(1, "1 hour"), (2, "1 millisecond")])
def test_shuffled_and_repeated_envelopes_give_the_relation_of_sorted_ones(
    spark: SparkSession, tmp_path: Path, seed: int, fold_every: str
) -> None:
    log = change_log(seed, 600, 40)
    chosen = random.Random(seed + 100)
    lines = [envelope(change, chosen.choice(["plain", "with schema"])) for change in shuffled(log, seed)]
    for number in range(4):
        part = lines[number::4]
        # After a delete, Kafka has a tombstone; a file has an empty line or a null.
        part.insert(chosen.randrange(len(part)), chosen.choice(["", "null"]))
        give(tmp_path, number, part)
    query = run(spark, tmp_path, fold_every=fold_every)
    assert in_relation(tmp_path) == replayed(log), f"seed {seed}"
    details = query.progress.operators[0].details
    counted = sum(details[name] for name in ("late", "superseded", "written", "deleted"))
    assert counted == len(lines)
    assert details["late"] > 0
    origin = Relation.open(tmp_path / "customers").origin
    assert origin is not None
    assert '"logOffset"' in origin["offsets"][0]


def test_every_stop_and_start_continues_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    log = change_log(3, 300, 25)
    for number, first in enumerate(range(0, 300, 75)):
        give(tmp_path, number, [envelope(change, "plain") for change in log[first : first + 75]])
        run(spark, tmp_path)
        assert in_relation(tmp_path) == replayed(log[: first + 75])


POINTS = ["flow.job.after", "flow.commit.after", "kept.fold.part", "flow.publish.after", "follow.claim.after"]


@pytest.mark.parametrize("point", POINTS)
def test_crashed_follower_repeats_and_skips_nothing(spark: SparkSession, tmp_path: Path, point: str) -> None:
    log = change_log(4, 200, 20)
    for number, first in enumerate(range(0, 200, 100)):
        give(tmp_path, number, [envelope(change, "plain") for change in shuffled(log[first : first + 100], number)])
    with DRILLING.crash_at(point):
        run(spark, tmp_path, fold_every="1 millisecond")
    run(spark, tmp_path, fold_every="1 millisecond")
    assert in_relation(tmp_path) == replayed(log)


def test_old_change_does_not_bring_a_deleted_key_back_until_its_tombstone_has_gone(
    spark: SparkSession, tmp_path: Path
) -> None:
    made, deleted, older = (
        {"op": op, "id": 1, "city": "Rome", "size": 1, "lsn": lsn} for op, lsn in (("c", 1), ("d", 5), ("u", 3))
    )
    give(tmp_path, 0, [envelope(made, "plain"), envelope({**made, "id": 2}, "plain")])
    give(tmp_path, 1, [envelope(deleted, "plain")])
    run(spark, tmp_path)  # folded: the relation does not know the key any more
    assert in_relation(tmp_path) == {2: ("Rome", 1)}
    give(tmp_path, 2, [envelope(older, "plain")])
    query = run(spark, tmp_path)
    assert in_relation(tmp_path) == {2: ("Rome", 1)}
    assert query.progress.operators[0].state_rows["tombstones"] == 1
    # Another fold, much later for a follower that keeps tombstones for a moment only.
    give(tmp_path, 3, [envelope({**made, "id": 3, "lsn": 9}, "plain")])
    run(spark, tmp_path, keep_tombstones="1 millisecond")
    give(tmp_path, 4, [envelope({**older, "lsn": 4}, "plain")])
    query = run(spark, tmp_path, keep_tombstones="1 millisecond")
    assert query.progress.operators[0].state_rows["tombstones"] == 0
    assert sorted(in_relation(tmp_path)) == [1, 2, 3], "nothing remembers the deletion"


def changes_of(spark: SparkSession, root: Path, rows: Sequence[tuple[Any, ...]], types: str) -> Any:
    """A streaming DataFrame of changes."""
    names = [column.split()[0] for column in types.split(", ")]
    df = spark.createDataFrame(list(rows), types)
    Feed(root / "feed").add(pa.Table.from_pylist([row.asDict() for row in df.collect()]).select(names))
    return spark.readStream.schema(types).parquet(str(root / "feed"))


TYPES = "id long, city string, op string, at timestamp"


def test_dataframe_with_an_operation_column_keeps_an_existing_relation_current(
    spark: SparkSession, tmp_path: Path
) -> None:
    from datetime import UTC, datetime

    Relation.build(
        pa.table({"id": [1, 2, 3], "city": ["a", "b", "c"], "row_sequence": pa.array([None, 5, 10**16], pa.int64())}),
        tmp_path / "customers", on="id", shards=2, unique=True,
    )  # fmt: skip
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [(1, "A", "upsert", moment), (2, None, "DELETE", moment), (3, "late", "upsert", moment)]
    changes = changes_of(spark, tmp_path, rows, TYPES)
    query = Relation.open(tmp_path / "customers").follow(
        changes, sequence_by="at", apply_as_deletes="upper(op) = 'DELETE'", checkpoint=tmp_path / "checkpoint",
        trigger="available-now",
    )  # fmt: skip
    query.awaitTermination()
    found = {row["id"]: row["city"] for row in Relation.open(tmp_path / "customers").to_arrow().to_pylist()}
    assert found == {1: "A", 3: "c"}


def test_second_follower_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    give(tmp_path, 0, [envelope(change, "plain") for change in change_log(5, 20, 5)])
    run(spark, tmp_path)
    before = Relation.open(tmp_path / "customers").version
    with pytest.raises(StateError, match=r"is followed by another flow, with the checkpoint .*/checkpoint"):
        run(spark, tmp_path, checkpoint=tmp_path / "other")
    assert Relation.open(tmp_path / "customers").version == before


GOOD = {"op": "c", "id": 1, "city": "Rome", "size": 1, "lsn": 1}
BAD_LINES = [
    ("{]", "a record that is no envelope of Debezium: {]"),
    ('{"id": 1}', "no envelope of Debezium"),
    (envelope({**GOOD, "op": "t"}, "plain"), "an unknown operation 't'"),
    (envelope({**GOOD, "id": None}, "plain"), "a change whose key has a NULL"),
    (envelope({**GOOD, "size": "large"}, "plain"), "a change that is not of the schema"),
    (envelope({**GOOD, "lsn": None}, "plain"), "a change without source.lsn"),
    (envelope({**GOOD, "city": "__debezium_unavailable_value"}, "plain"), "set REPLICA IDENTITY FULL"),
    (json.dumps({"op": "u", "before": None, "after": None, "source": {"lsn": 1}}), "a change without its row"),
]


@pytest.mark.parametrize(("line", "text"), BAD_LINES, ids=[text for _, text in BAD_LINES])
def test_line_that_is_no_change_is_an_error_before_anything_is_committed(
    spark: SparkSession, tmp_path: Path, line: str, text: str
) -> None:
    give(tmp_path, 0, [envelope({**GOOD, "id": 7, "lsn": 2}, "with schema"), line])
    with pytest.raises(StateError, match="was not committed") as refused:
        run(spark, tmp_path)
    assert text in str(refused.value)
    assert commits_of(tmp_path / "checkpoint") == []


BAD_OPTIONS: list[tuple[dict[str, Any], type[DovetailError], str]] = [
    ({"keys": "nr"}, PlanError, "no column 'nr'"),
    ({"columns": ["town"]}, PlanError, "The source has no column 'town'"),
    ({"columns": ["id"]}, PlanError, "has a column of the key"),
    ({"sequence_by": "city"}, PlanError, "is string"),
    ({"sequence_by": "size +"}, PlanError, "is not understood"),
    ({"apply_as_deletes": "city"}, PlanError, "is no condition"),
    ({"keep_tombstones": "soon"}, PlanError, "soon"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD_OPTIONS, ids=[str(row[0]) for row in BAD_OPTIONS])
def test_bad_options_are_refused_before_anything_is_made(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], error: type[DovetailError], text: str
) -> None:
    (tmp_path / "topic").mkdir()
    with pytest.raises(error) as refused:
        follow(spark, tmp_path, **options)
    assert text in str(refused.value)
    assert not (tmp_path / "customers").exists()


def test_relation_that_does_not_fit_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "topic").mkdir()
    rows = {"id": [1], "city": ["a"], "size": pa.array([1], pa.int64()), "row_sequence": [1]}
    Relation.build(pa.table(rows), tmp_path / "customers", on="id", shards=2)
    with pytest.raises(SchemaError, match="Column 'size' is int32 here"):
        follow(spark, tmp_path, shards=None)
    with pytest.raises(SchemaError, match="has a column 'size', which the follower would not fill"):
        follow(spark, tmp_path, shards=None, columns=["city"])


def test_pipeline_file_follows_and_says_what_it_lacks(spark: SparkSession, tmp_path: Path) -> None:
    log = change_log(6, 100, 10)
    give(tmp_path, 0, [envelope(change, "plain") for change in log])
    document = {
        "name": "customers",
        "checkpoint": "checkpoint",
        "trigger": "available-now",
        "sources": {"changes": {"format": "debezium", "path": "topic", "schema": SCHEMA}},
        "relations": {"customers": {"path": "customers"}},
        "steps": [{"follow": {"relation": "customers", "keys": "id", "shards": 2}}],
        "sink": {"format": "parquet", "path": "applied"},
    }
    (tmp_path / "p.yaml").write_text(json.dumps(document))
    plan_pipeline(spark, check_pipeline(*parse_pipeline(tmp_path / "p.yaml"))).start().awaitTermination()
    assert in_relation(tmp_path) == replayed(log)
    applied = published_rows(tmp_path / "applied")
    assert sorted(row["id"] for row in applied) == sorted({change["id"] for change in log})
    assert set(applied[0]) == {"id", "city", "size", "_operation", "_sequence", "_problem"}
    document["steps"] = [{"follow": {"relation": "customers", "keys": "nr", "columns": ["town"]}}]
    (tmp_path / "p.yaml").write_text(json.dumps(document))
    with pytest.raises(PipelineError) as refused:
        check_pipeline(*parse_pipeline(tmp_path / "p.yaml"))
    assert {problem.message for problem in refused.value.problems} >= {
        "There is no column 'nr'.",
        "There is no column 'town'.",
    }


def test_erased_key_stays_away_and_the_follower_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    log = change_log(7, 150, 12)
    give(tmp_path, 0, [envelope(change, "plain") for change in log])
    run(spark, tmp_path)
    present = sorted(in_relation(tmp_path))
    report = Relation.open(tmp_path / "customers").erase([present[0]])
    assert any(str(tmp_path / "checkpoint") in place for place in report.not_erased)
    more = [{**change, "lsn": change["lsn"] + 1000} for change in change_log(8, 60, 12)]
    more = [change for change in more if change["id"] != present[0]]
    give(tmp_path, 1, [envelope(change, "plain") for change in more])
    run(spark, tmp_path)
    expected = replayed([*log, *more])
    del expected[present[0]]
    assert in_relation(tmp_path) == expected
