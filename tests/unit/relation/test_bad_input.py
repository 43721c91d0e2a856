"""What cannot be done is refused: with the class that says whose turn it is, and a message that names what is wrong."""

import datetime as dt
import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.core.errors import PlanError, RelationError, RelationNotFound, RelationReadOnly, SchemaError
from dovetail.relation import SimulatedDisk, compute_codes
from dovetail.storage import files
from dovetail.testing.rows import assert_same_rows

TABLE = pa.table({"k": [1, 2, 3], "name": ["a", "b", "c"]})


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(TABLE, tmp_path / "r", on="k", shards=2)


def is_unchanged(relation: Relation) -> bool:
    newest = Relation.open(relation.path)
    return newest.version == relation.version and newest.to_arrow().num_rows == relation.stats.rows


# -------------------------------------------------------------------- options


@pytest.mark.parametrize("shards", [0, -1, True, 1.5, "2", None, 65_537])
def test_shards_that_cannot_be_are_refused_before_anything_is_made(tmp_path: Path, shards: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"shards={shards!r}")):
        Relation.build(TABLE, tmp_path / "r", on="k", shards=shards)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("on", [[], "", [""], None, 5, ["k", 3], ["k", "k"]])
def test_key_that_names_no_column_is_refused(tmp_path: Path, on: Any) -> None:
    with pytest.raises(PlanError, match=r"^on="):
        Relation.build(TABLE, tmp_path / "r", on=on)
    assert not (tmp_path / "r").exists()


def test_missing_key_column_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="key column 'customer' is not in the data: its columns are k, name"):
        Relation.build(TABLE, tmp_path / "r", on=["k", "customer"])
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("mode", ["append", "", None])
def test_unknown_mode_is_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(PlanError, match="mode="):
        Relation.build(TABLE, tmp_path / "r", on="k", mode=mode)


def test_existing_relation_is_not_overwritten_by_default(relation: Relation) -> None:
    with pytest.raises(RelationError, match=r'already holds a relation \(version 1\).*mode="overwrite"'):
        Relation.build(TABLE.slice(0, 1), relation.path, on="k")
    assert is_unchanged(relation)


def test_something_that_is_not_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="a list cannot be written to a relation"):
        Relation.build([{"k": 1}], tmp_path / "r", on="k")


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_vacuum_keeps_at_least_one_version(relation: Relation, keep: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"keep={keep!r}")):
        relation.vacuum(keep=keep)


@pytest.mark.parametrize("number", [-1, 2])
def test_shard_that_does_not_exist_is_refused(relation: Relation, number: int) -> None:
    with pytest.raises(PlanError, match=f"shard {number} does not exist.*shards 0 to 1"):
        relation.shard(number)


def test_reader_options_are_checked(relation: Relation) -> None:
    with pytest.raises(SchemaError, match=r"column 'nme' is not in the relation: its columns are k, name"):
        relation.shard(0, columns=["nme"])
    with pytest.raises(PlanError, match="io='mapped' is not an I/O mode: use \"map\""):
        relation.shard(0, io="mapped")  # type: ignore[arg-type]
    shard = relation.shard(0)
    for start, rows in ((-1, 1), (0, 0), (shard.num_rows + 1, 1), (0, -3)):
        with pytest.raises(PlanError, match=f"A block of {rows} rows at {start} is not in a shard"):
            shard.read_block(start, rows)
    for rows in (0, -1):
        with pytest.raises(PlanError, match=f"block_rows={rows}: a block has"):
            list(shard.blocks(rows))


@pytest.mark.parametrize("position", [-1, 3, 2**40])
@pytest.mark.parametrize("io", ["map", "buffered"])
def test_position_outside_the_shard_is_refused_and_reads_no_memory(tmp_path: Path, position: int, io: Any) -> None:
    shard = Relation.build(TABLE, tmp_path / "r", on="k", shards=1).shard(0, io=io)
    positions = np.array([0, position])
    for read in (shard.gather, shard.codes_at, lambda p: list(shard.gather_grouped(p))):
        with pytest.raises(PlanError, match=f"Position {position} is not in a shard of 3 rows"):
            read(positions)


@pytest.mark.parametrize(("bandwidth", "seek_s"), [(0, 0.01), (-1, 0.01), (1e6, -0.1), (float("nan"), 0)])
def test_disk_that_cannot_be_is_refused(bandwidth: float, seek_s: float) -> None:
    with pytest.raises(PlanError, match="is not possible: the bandwidth must be"):
        SimulatedDisk(bandwidth, seek_s)


# -------------------------------------------------------------------- columns


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.map_(pa.string(), pa.int32()),
        pa.struct([("a", pa.int32())]),
        pa.duration("us"),
        pa.null(),
        pa.time64("ns"),
    ],
    ids=str,
)
def test_unsupported_key_type_is_named(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"k": pa.nulls(2, kind), "name": ["a", "b"]})
    for on in ("k", ["name", "k"]):
        with pytest.raises(SchemaError, match=re.escape(f"column 'k' of type {kind} cannot be a key: use an integral")):
            Relation.build(table, tmp_path / "r", on=on)
    assert not (tmp_path / "r").exists()


def test_codes_of_timestamps_in_another_unit_are_refused_rather_than_wrong() -> None:
    # The relation's own are microseconds: milliseconds would give other codes for equal moments.
    with pytest.raises(SchemaError, match=r"column 'k' of type timestamp\[ms\] cannot be a key.*microseconds"):
        compute_codes(pa.table({"k": pa.array([1], pa.timestamp("ms"))}), ["k"])


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint64(), pa.float16(), pa.month_day_nano_interval()], ids=str)
def test_payload_that_spark_has_no_type_for_is_named(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"k": [1], "p": pa.nulls(1, kind)})
    with pytest.raises(SchemaError, match=re.escape(f"column 'p' has type {kind}, for which Spark has no type")):
        Relation.build(table, tmp_path / "r", on="k")


def test_nanoseconds_that_microseconds_cannot_hold_are_refused_by_column(tmp_path: Path) -> None:
    table = pa.table({"k": [1], "at": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(SchemaError, match=r"column 'at'.*timestamp\[ns\].*timestamp\[us\]"):
        Relation.build(table, tmp_path / "r", on="k")


@pytest.mark.parametrize("name", ["__code", "__shard"])
def test_reserved_column_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SchemaError, match=f"column '{name}' has a name reserved by dovetail"):
        Relation.build(TABLE.append_column(name, [[1, 2, 3]]), tmp_path / "r", on="k")


def test_repeated_column_is_refused_everywhere(tmp_path: Path, relation: Relation) -> None:
    twice = pa.table([[1], ["a"], ["b"]], names=["k", "name", "name"])
    with pytest.raises(SchemaError, match="column 'name' appears more than once"):
        Relation.build(twice, tmp_path / "other", on="k")
    for change in (relation.append, relation.upsert):
        with pytest.raises(SchemaError, match="column 'name' appears more than once"):
            change(twice)
    with pytest.raises(SchemaError, match="column 'k' appears more than once"):
        relation.delete(pa.table([[1], [2]], names=["k", "k"]))
    assert is_unchanged(relation)


@pytest.mark.parametrize("operation", ["append", "upsert", "delete"])
def test_key_column_of_another_type_is_refused_with_both_types(relation: Relation, operation: str) -> None:
    table = pa.table({"k": ["1"], "name": ["x"]})
    with pytest.raises(SchemaError, match=f"{operation}: column 'k' has type string, but int64 in the relation"):
        getattr(relation, operation)(table)
    with pytest.raises(SchemaError, match=f"{operation}: column 'k' has type int32, but int64 in the relation"):
        getattr(relation, operation)(pa.table({"k": pa.array([1], pa.int32()), "name": ["x"]}))
    assert is_unchanged(relation)


@pytest.mark.parametrize("operation", ["append", "upsert"])
def test_missing_and_surplus_columns_are_named(relation: Relation, operation: str) -> None:
    change = getattr(relation, operation)
    with pytest.raises(SchemaError, match=f"{operation}: column 'name' is missing; the data has k, nme"):
        change(pa.table({"k": [1], "nme": ["x"]}))
    with pytest.raises(SchemaError, match=f"{operation}: column 'extra' is not in the relation"):
        change(pa.table({"k": [1], "name": ["x"], "extra": [1]}))
    with pytest.raises(SchemaError, match="delete: column 'k' is missing; the data has name"):
        relation.delete(pa.table({"name": ["x"]}))
    assert is_unchanged(relation)


def test_columns_in_another_order_are_put_in_the_relations(relation: Relation) -> None:
    changed = relation.upsert(pa.table({"name": ["B"], "k": [2]}))
    expected = [{"k": 1, "name": "a"}, {"k": 2, "name": "B"}, {"k": 3, "name": "c"}]
    assert_same_rows(changed.to_arrow().to_pylist(), expected)


def test_delete_ignores_columns_that_are_not_the_key(relation: Relation) -> None:
    assert relation.delete(pa.table({"k": [2], "reason": ["old"]})).stats.rows == 2


def test_columns_of_a_relation_can_always_be_null(tmp_path: Path) -> None:
    """As with Spark's own file sources: a source that has no NULL today must not forbid one tomorrow."""
    schema = pa.schema(
        [
            pa.field("k", pa.int64(), nullable=False),
            pa.field("p", pa.struct([pa.field("a", pa.list_(pa.field("item", pa.int32(), nullable=False)))])),
            pa.field("m", pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))),
        ]
    )
    row = {"k": 1, "p": {"a": [1]}, "m": [("x", 1)]}
    relation = Relation.build(pa.Table.from_pylist([row], schema=schema), tmp_path / "r", on="k", shards=1)
    assert all(field.nullable for field in relation.schema)
    relation.append(pa.Table.from_pylist([row], schema=schema))
    rows = [
        {"k": None, "p": None, "m": [("x", None)]},
        {"k": 2, "p": {"a": [None]}, "m": None},
        {"k": 3, "p": {"a": None}, "m": []},
    ]
    changed = relation.append(pa.Table.from_pylist(rows, schema=relation.schema))
    assert_same_rows(changed.to_arrow().to_pylist(), [row, row, *rows])


def test_null_struct_whose_fields_are_declared_without_null_is_stored(tmp_path: Path) -> None:
    """Spark writes such a struct with NULLs below it, which Arrow's own cast refuses to call the same type."""
    field = pa.field("a", pa.timestamp("us", tz="Europe/Rome"), nullable=False)
    column = pa.StructArray.from_arrays([pa.array([None, 5], field.type)], fields=[field], mask=pa.array([True, False]))
    relation = Relation.build(pa.table({"k": [1, 2], "p": column}), tmp_path / "r", on="k", shards=1)
    assert [row["p"] is None for row in relation.to_arrow().to_pylist()] == [True, False]


# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("unique", [True, False])
def test_relation_without_rows_works(tmp_path: Path, unique: bool) -> None:
    empty = Relation.build(TABLE.slice(0, 0), tmp_path / "r", on="k", shards=3, unique=unique)
    opened = Relation.open(tmp_path / "r")
    assert (opened.stats.rows, opened.stats.is_unique, opened.to_arrow()) == (0, True, TABLE.slice(0, 0))
    shard = opened.shard(1)
    assert (shard.num_rows, shard.live_rows, shard.row_bytes, list(shard.blocks(10))) == (0, 0, 0.0, [])
    assert shard.read_block(0, 5).rows.num_rows == 0
    none = np.empty(0, np.int64)
    assert [part.size for part in shard.lookup(np.array([1, 2]))] == [0, 0]
    assert [part.size for part in shard.locate(np.array([1, 2]))] == [0, 0, 0]
    assert shard.count(np.array([1, 2])).tolist() == [0, 0]
    assert (shard.gather(none).num_rows, shard.codes_at(none).size) == (0, 0)
    assert empty.delete(pa.table({"k": [1]})).stats.rows == 0
    assert empty.upsert(TABLE).stats.rows == 3
    assert_same_rows(Relation.open(tmp_path / "r").to_arrow().to_pylist(), TABLE.to_pylist())


@pytest.mark.parametrize("operation", ["append", "upsert", "delete"])
def test_change_without_rows_makes_an_equal_version(relation: Relation, operation: str) -> None:
    changed = getattr(relation, operation)(TABLE.slice(0, 0))
    assert changed.version == 2
    assert_same_rows(changed.to_arrow().to_pylist(), TABLE.to_pylist())


def test_rows_whose_keys_are_all_null_are_kept_and_match_nothing(tmp_path: Path) -> None:
    table = pa.table({"k": pa.nulls(3, pa.string()), "n": [1, 2, 3]})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=2, unique=True)
    assert (relation.stats.rows, relation.stats.null_key_rows, relation.stats.distinct_codes) == (3, 3, 0)
    assert sum(relation.shard(number).num_rows for number in range(2)) == 0
    assert_same_rows(relation.to_arrow().to_pylist(), table.to_pylist())
    assert relation.delete(table).stats.rows == 3
    with pytest.raises(RelationError, match=r"upsert: 3 or more rows have a NULL in the key \(k\).*append them"):
        relation.upsert(table)
    assert relation.append(table).stats.null_key_rows == 6


UNIQUE_KEYS: dict[str, list[Any]] = {
    "long": [1, 2],
    "date": [dt.date(1969, 1, 1), dt.date(2024, 1, 1)],
    "string": ["a", "b"],
    "double": [float("nan"), 0.0],
    "bytes": [b"", b"\xff"],
}


@pytest.mark.parametrize("kind", UNIQUE_KEYS)
def test_duplicates_of_a_unique_key_are_refused_with_an_example(tmp_path: Path, kind: str) -> None:
    one, two = UNIQUE_KEYS[kind]

    def rows(*keys: Any) -> pa.Table:
        return pa.table({"k": list(keys), "n": list(range(len(keys)))})

    with pytest.raises(RelationError, match=r"the key \(k\) was declared unique.*more than one row for \{'k': "):
        Relation.build(rows(one, two, one), tmp_path / "refused", on="k", unique=True)
    with pytest.raises(RelationNotFound, match="first build did not finish"):
        Relation.open(tmp_path / "refused")
    relation = Relation.build(rows(one), tmp_path / "r", on="k", unique=True)
    assert relation.is_unique_key
    with pytest.raises(RelationError, match="have a key that the relation already has, such as"):
        relation.append(rows(two, one))
    with pytest.raises(RelationError, match="more than one row for"):
        relation.append(rows(two, two))
    with pytest.raises(RelationError, match="more than one row for"):
        relation.upsert(rows(two, one, two))
    assert is_unchanged(relation)
    assert relation.upsert(rows(one, two)).stats.rows == 2


def test_duplicate_is_found_across_batches(tmp_path: Path) -> None:
    keys = np.arange(70_000)
    table = pa.table({"k": np.append(keys, keys[65_535])})
    with pytest.raises(RelationError, match=r"more than one row for \{'k': 65535\}"):
        Relation.build(table, tmp_path / "value", on="k", shards=1, unique=True)
    for position in (0, 40_000, 69_999):
        hashed = pa.table({"k": [f"{key}" for key in [*keys.tolist(), position]]})
        with pytest.raises(RelationError, match=rf"more than one row for \{{'k': '{position}'\}}"):
            Relation.build(hashed, tmp_path / f"hashed{position}", on="k", shards=1, unique=True)


@pytest.mark.parametrize("on", ["k", ["k", "n"]])
def test_duplicate_beyond_pythons_calendar_is_reported_too(tmp_path: Path, on: Any) -> None:
    # Spark's years reach past 9999, Python's do not.
    far = pa.array([10**17, 10**17]).cast(pa.timestamp("us", tz="UTC"))
    with pytest.raises(RelationError, match="was declared unique, but the data has more than one row for"):
        Relation.build(pa.table({"k": far, "n": [1, 1]}), tmp_path / "r", on=on, unique=True)


# -------------------------------------------------------------------- paths


def test_path_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RelationError, match="is a file, not a directory"):
        Relation.build(TABLE, tmp_path / "file", on="k")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    for mode in ("error", "overwrite"):
        with pytest.raises(RelationError, match="contains files that are not part of a relation"):
            Relation.build(TABLE, tmp_path / "other", on="k", mode=mode)
    assert os.listdir(tmp_path / "other") == ["mine.txt"]
    with pytest.raises(RelationNotFound, match="is not a relation: it contains other files"):
        Relation.open(tmp_path / "other")
    with pytest.raises(RelationNotFound, match="does not exist"):
        Relation.open(tmp_path / "nowhere")
    with pytest.raises(RelationReadOnly, match="cannot be written: Not a directory"):
        Relation.build(TABLE, tmp_path / "file" / "below", on="k")


def test_empty_directory_and_relative_path_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    relation = Relation.build(TABLE, "empty", on="k")
    monkeypatch.chdir("/")
    assert Relation.open(relation.path).stats.rows == 3


@pytest.mark.parametrize("version", [0, 2, -1, "1", 1.5])
def test_version_that_does_not_exist_is_refused_with_those_that_do(relation: Relation, version: Any) -> None:
    with pytest.raises(RelationNotFound, match=rf"has no version {version!r}: it has 1\."):
        Relation.open(relation.path, version=version)


def test_file_system_without_links_is_read_only(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*paths: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    files._PROBED.clear()  # as in a process that has not written there yet
    for change in (relation.append, relation.upsert, relation.delete):
        with pytest.raises(RelationReadOnly, match=r"cannot create a file exclusively \(Operation not permitted\)"):
            change(TABLE)
    with pytest.raises(RelationReadOnly, match="read-only there"):
        relation.vacuum()
    with pytest.raises(RelationReadOnly):
        Relation.build(TABLE, relation.path, on="k", mode="overwrite")
    monkeypatch.undo()
    assert is_unchanged(relation)
    assert not [name for name in os.listdir(Path(relation.path) / "versions") if name.startswith(".")]


def test_directory_that_forbids_writing_is_read_only(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(relation.path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(RelationReadOnly, match="cannot be written: Permission denied"):
        relation.append(TABLE)
    assert Relation.open(relation.path).to_arrow().num_rows == 3


@pytest.mark.parametrize("name", ["__code", "__CODE", "__Shard"])
def test_reserved_names_are_refused_in_any_case(tmp_path: Path, name: str) -> None:
    with pytest.raises(SchemaError, match=name):
        Relation.build(pa.table({"k": [1], name: [7]}), tmp_path / "r", on="k")


def test_list_views_are_refused_by_name(tmp_path: Path) -> None:
    table = pa.table({"k": [1], "views": pa.array([[1]], pa.list_view(pa.int64()))})
    with pytest.raises(SchemaError, match="views"):
        Relation.build(table, tmp_path / "r", on="k")


def test_change_of_a_relation_whose_directory_is_gone(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": [1]}), tmp_path / "r", on="k")
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(RelationNotFound, match="no longer exists"):
        relation.append(pa.table({"k": [2]}))
