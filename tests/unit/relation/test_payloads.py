"""Payload columns of every type survive, in every way of reading, cut at every kind of place."""

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.relation.reads.row_ranges import read_rows
from dovetail.relation.segment_writer import SegmentWriter
from dovetail.testing.rows import canonical

UTC = dt.UTC
ROWS = 61  # not a multiple of eight: bitmaps are cut inside bytes


def _values(kind: str) -> tuple[pa.DataType, list[Any]]:
    """A type and five values of it, one of them NULL; nested ones have NULL and empty at every level."""
    moments = [dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(2024, 2, 29, 12), None]
    return {
        "boolean": (pa.bool_(), [True, False, None, True, True]),
        "byte": (pa.int8(), [-128, 127, None, 0, 1]),
        "short": (pa.int16(), [-(2**15), 2**15 - 1, None, 0, 1]),
        "int": (pa.int32(), [-(2**31), 2**31 - 1, None, 0, 1]),
        "long": (pa.int64(), [-(2**63), 2**63 - 1, None, 0, 1]),
        "float": (pa.float32(), [float("nan"), -0.0, None, 1.5, float("inf")]),
        "double": (pa.float64(), [float("nan"), -0.0, None, 1e300, float("-inf")]),
        "decimal": (pa.decimal128(38, 18), [Decimal("-99999999999999999999.000000000000000001"), None, Decimal(0)]),
        "string": (pa.string(), ["", "é" * 30, None, "a", "\x00"]),
        "binary": (pa.binary(), [b"", b"\xff\x00", None, b"x" * 100]),
        "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        "timestamp": (pa.timestamp("us", tz="UTC"), [m and m.replace(tzinfo=UTC) for m in moments]),
        "timestamp_ntz": (pa.timestamp("us"), moments),
        "time": (pa.time64("ns"), [dt.time(0), dt.time(23, 59, 59, 999_999), None]),
        "day-time interval": (pa.duration("us"), [dt.timedelta(days=-3, microseconds=1), dt.timedelta(0), None]),
        "void": (pa.null(), [None]),
        "array of int": (pa.list_(pa.int32()), [[], [1, None, 3], None, [5] * 9]),
        "array of string": (pa.list_(pa.string()), [[], ["a", None, ""], None, ["xyz"] * 9]),
        "array of boolean": (pa.list_(pa.bool_()), [[], [True, None], None, [False, True] * 9]),
        "array of void": (pa.list_(pa.null()), [[], [None, None], None]),
        "array of array": (pa.list_(pa.list_(pa.int64())), [[], [[], None, [1]], None, [[7] * 9, [8]]]),
        "map": (pa.map_(pa.string(), pa.float64()), [[], [("a", 1.0), ("b", None)], None, [("z", -0.0)] * 9]),
        "struct": (
            pa.struct([("a", pa.int32()), ("b", pa.string()), ("flag", pa.bool_())]),
            [{"a": 1, "b": "x", "flag": None}, None, {"a": None, "b": None, "flag": True}],
        ),
        "struct of nothing": (pa.struct([]), [{}, None, {}]),
        "deep": (
            pa.list_(pa.struct([("m", pa.map_(pa.int32(), pa.list_(pa.decimal128(10, 2)))), ("d", pa.date32())])),
            [
                [],
                None,
                [None, {"m": [], "d": None}, {"m": [(1, [Decimal("1.25"), None]), (2, None), (3, [])], "d": None}],
                [{"m": None, "d": dt.date(2024, 1, 1)}] * 5,
            ],
        ),
        "all empty lists of strings": (pa.list_(pa.string()), [[], None]),
    }[kind]


KINDS = [
    "boolean", "byte", "short", "int", "long", "float", "double", "decimal", "string", "binary", "date", "timestamp",
    "timestamp_ntz", "time", "day-time interval", "void", "array of int", "array of string", "array of boolean",
    "array of void", "array of array", "map", "struct", "struct of nothing", "deep", "all empty lists of strings",
]  # fmt: skip


def column_of(kind: str, rows: int = ROWS) -> pa.Array:
    data_type, values = _values(kind)
    return pa.array([values[i % len(values)] for i in range(rows)], data_type)


def same(left: list[Any], right: list[Any]) -> bool:
    return [canonical(value) for value in left] == [canonical(value) for value in right]


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    columns = {"k": pa.array(range(ROWS)), **{kind: column_of(kind) for kind in KINDS}}
    schema = pa.schema([pa.field(name, c.type, metadata={"comment": name}) for name, c in columns.items()])
    built = Relation.build(
        pa.table(columns, schema=schema), tmp_path_factory.mktemp("payloads") / "r", on="k", shards=1
    )
    return built.delete(pa.table({"k": [3, 30]}))


@pytest.mark.parametrize("io", ["map", "buffered", "direct"])
@pytest.mark.parametrize("kind", KINDS)
def test_payload_survives_a_round_trip_in_blocks_of_any_size(relation: Relation, kind: str, io: Any) -> None:
    assert relation.schema.field(kind).metadata == {b"comment": kind.encode()}
    column = column_of(kind)
    expected = [value for number, value in enumerate(column.to_pylist()) if number not in (3, 30)]
    for block_rows in (1, 3, 8, 13, 200):
        shard = relation.shard(0, columns=[kind], io=io)
        found = []
        for block in shard.blocks(block_rows):
            block.rows.validate(full=True)
            assert block.rows.schema.field(0).type == column.type
            found.extend(block.rows.column(0).to_pylist())
        assert same(found, expected)
    positions = np.array([60, 7, 7, 0, 59])
    gathered = relation.shard(0, columns=[kind], io=io).gather(positions)
    gathered.validate(full=True)
    assert same(gathered.column(0).to_pylist(), [column[p].as_py() for p in positions.tolist()])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_mapped_batch_are_read_alone_wherever_they_are_cut(tmp_path: Path, kind: str) -> None:
    """Every range [start, stop), nested bitmaps cut inside a byte, and not a byte outside the file."""
    rows = 19
    file = tmp_path / "batch"
    file.write_bytes(bytes(pa.record_batch([column_of(kind, rows)], names=["c"]).serialize()))
    schema = pa.schema([("c", _values(kind)[0])])
    with pa.memory_map(str(file)) as mapped:
        buffer = mapped.read_buffer()
    array = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), schema).column(0)

    def read_at(address: int, length: int) -> pa.Buffer:
        offset = address - buffer.address
        assert 0 <= offset <= offset + length <= buffer.size
        return pa.py_buffer(file.read_bytes()[offset : offset + length])

    expected = column_of(kind, rows).to_pylist()
    for start in range(rows):
        for stop in range(start, rows + 1):
            found = read_rows(array, start, stop, read_at)
            found.validate(full=True)
            assert same(found.to_pylist(), expected[start:stop]), (start, stop)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        (pa.array(["a", None], pa.large_string()), pa.string()),
        (pa.array([b"a", None], pa.large_binary()), pa.binary()),
        (pa.array([b"ab", None], pa.binary(2)), pa.binary()),
        (pa.array([1, None], pa.timestamp("ms", tz="Europe/Rome")), pa.timestamp("us", tz="UTC")),
        (pa.array([1, None], pa.timestamp("s")), pa.timestamp("us")),
        (pa.array([dt.date(2024, 1, 1), None], pa.date64()), pa.date32()),
        (pa.array([1, None], pa.duration("s")), pa.duration("us")),
        (pa.array([[1], None], pa.large_list(pa.int32())), pa.list_(pa.int32())),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), pa.list_(pa.int32())),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else str(value),
)
def test_arrow_types_that_spark_has_not_are_stored_as_their_spark_twin(
    tmp_path: Path, given: pa.Array, stored: pa.DataType
) -> None:
    table = pa.table({"k": list(range(len(given))), "p": given})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1)
    assert relation.schema.field("p").type == stored
    assert relation.to_arrow().column("p").to_pylist() == given.cast(stored).to_pylist()


def test_reader_batch_and_table_are_all_sources(tmp_path: Path) -> None:
    table = pa.table({"k": [2, 1], "p": ["b", "a"]})
    sources = [table, table.to_batches()[0], table.to_reader()]
    relations = [Relation.build(source, tmp_path / str(n), on="k", shards=1) for n, source in enumerate(sources)]
    assert [relation.to_arrow().to_pylist() for relation in relations] == [table.sort_by("k").to_pylist()] * 3


def test_sliced_and_chunked_tables_are_written_whole(tmp_path: Path) -> None:
    chunks = [pa.table({"k": [f"{i}{c}" for i in range(20)], "p": [[c, i] for i in range(20)]}) for c in range(3)]
    table = pa.concat_tables([chunk.slice(3, 11) for chunk in chunks]).slice(5, 20)
    relation = Relation.build(table, tmp_path / "r", on="k", shards=3)
    assert sorted(map(str, relation.to_arrow().to_pylist())) == sorted(map(str, table.to_pylist()))


def test_rows_wider_than_a_batch_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.relation.segment_writer.MAX_BATCH_BYTES", 1_000)
    table = pa.table({"k": list(range(20)), "p": ["x" * (i * 200) for i in range(20)]})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1)
    assert relation.to_arrow().to_pylist() == table.to_pylist()
    shard = relation.shard(0, io="buffered")
    assert [row for block in shard.blocks(3) for row in block.rows.to_pylist()] == table.to_pylist()
    assert len(shard._segments[0]._batch_rows) > 5


@pytest.mark.parametrize("incoming_rows", [1, 3, 7, 10, 64])
def test_record_batches_are_full_whatever_the_batches_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incoming_rows: int
) -> None:
    """A scan in blocks as long as a record batch then copies nothing, also over what Spark handed in by 10,000 rows."""
    monkeypatch.setattr("dovetail.relation.segment_writer.MAX_BATCH_ROWS", 7)
    schema = pa.schema([("k", pa.int64()), ("p", pa.string())])
    writer = SegmentWriter(tmp_path / "data" / "0", "segment", schema, is_keyed=True)
    table = pa.table({"k": list(range(64)), "p": [f"{i}" for i in range(64)]}, schema=schema)
    for batch in table.to_batches(max_chunksize=incoming_rows):
        writer.write(batch, batch.column("k").to_numpy())
    segment = writer.close()
    assert segment is not None
    assert segment.rows == 64
    index = pa.ipc.open_stream((tmp_path / "data" / "0" / "segment.index").read_bytes()).read_next_batch()
    assert index.column("batch_rows")[0].as_py() == [7] * 9 + [1]
    with pa.ipc.open_stream((tmp_path / "data" / "0" / "segment.rows").read_bytes()) as stream:
        assert stream.read_all() == table
