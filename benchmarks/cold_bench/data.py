"""The table as a relation, as Parquet, in LMDB and in RocksDB, and the stream: made once per directory."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dovetail import Relation

SHARDS = 8
BYTES_PER_ROW = 4 * 150  # on disk, for all copies together, with room for drafts
_PAYLOAD = 104
_FACTOR = 1_190_494_759  # a prime: multiplying by it permutes the keys of any table that is not a multiple of it
_PIECE_ROWS = 1 << 20
_SPARK_ROWS = 30_000_000  # larger relations are built by Spark: this process would need several times their size

Int64Array = npt.NDArray[np.int64]


def rows_between(start: int, stop: int) -> pa.RecordBatch:
    """Rows of 120 bytes with ascending keys; the payload is letters that depend on the key."""
    keys = np.arange(start, stop)
    alphabet = np.tile(np.arange(97, 123, dtype=np.uint8), _PAYLOAD // 26 + 2)
    letters = np.lib.stride_tricks.sliding_window_view(alphabet, _PAYLOAD)[keys * 7 % 26]
    offsets = np.arange(0, (stop - start + 1) * _PAYLOAD, _PAYLOAD, dtype=np.int32)
    payload = pa.StringArray.from_buffers(
        stop - start, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(letters))
    )
    return pa.record_batch({"k": pa.array(keys), "sk": pa.array(keys * 3), "pay": payload})


def pieces(rows: int) -> Iterator[pa.RecordBatch]:
    """All rows, in pieces."""
    for start in range(0, rows, _PIECE_ROWS):
        yield rows_between(start, min(rows, start + _PIECE_ROWS))


def keys_of_batch(rows: int, tuples: int, exponent: float, number: int) -> Int64Array:
    """The keys of one micro-batch: by Zipf's law with exponent 1, hot keys anywhere, or uniform (0)."""
    uniform = np.random.default_rng([17, number, int(exponent * 10)]).random(tuples)
    ranks = rows**uniform - 1.0 if exponent else uniform * rows
    return np.minimum(ranks.astype(np.int64), rows - 1) * _FACTOR % rows


def stored(row: int) -> bytes:
    """Key of a row in the key-value stores."""
    return row.to_bytes(8, "big")


def make(directory: Path, rows: int, names: list[str]) -> dict[str, Path]:
    """Make what the contenders need, unless it is there."""
    makers: dict[str, Callable[[Path, int], None]] = {
        "parquet": _make_parquet,
        "relation": _make_relation,
        "lmdb": _make_lmdb,
        "rocksdb": _make_rocksdb,
    }
    paths = {}
    for name, maker in makers.items():
        path = paths[name] = directory / f"{name}-{rows}"
        if name in names and not path.exists():
            draft = path.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            maker(draft, rows)
            draft.rename(path)
    return paths


def _make_parquet(path: Path, rows: int) -> None:
    path.mkdir(parents=True)
    for number, piece in enumerate(pieces(rows)):
        # Payloads repeat: as a dictionary or compressed, the table would be a fraction of its size.
        target = path / f"part-{number:05d}.parquet"
        pq.write_table(pa.Table.from_batches([piece]), target, compression="none", use_dictionary=False)


def _make_relation(path: Path, rows: int) -> None:
    parquet = path.parent / f"parquet-{rows}"
    if rows <= _SPARK_ROWS:
        Relation.build(pq.read_table(parquet), path, on="k", shards=SHARDS)
        return
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").config("spark.driver.memory", "6g").getOrCreate()
    Relation.build(spark.read.parquet(str(parquet)), path, on="k", shards=SHARDS)
    spark.stop()


def _values(piece: pa.RecordBatch) -> Iterator[tuple[bytes, bytes]]:
    surrogates, payloads = piece.column("sk").to_numpy(), piece.column("pay").to_pylist()
    first = piece.column("k")[0].as_py()
    for number, (surrogate, payload) in enumerate(zip(surrogates.tolist(), payloads, strict=True)):
        yield stored(first + number), stored(surrogate) + payload.encode()


def _make_lmdb(path: Path, rows: int) -> None:
    import lmdb

    with lmdb.open(str(path), map_size=rows * 300 + (1 << 26), sync=False) as environment:
        for piece in pieces(rows):
            with environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(_values(piece), append=True)
        environment.sync(True)


def _make_rocksdb(path: Path, rows: int) -> None:
    from rocksdict import Rdict, WriteBatch

    database = Rdict(str(path), rocksdb_options())
    for piece in pieces(rows):
        batch = WriteBatch(raw_mode=True)
        for key, value in _values(piece):
            batch.put(key, value)
        database.write(batch)
    database.flush()
    database.compact_range(None, None)
    database.close()


def rocksdb_options(cache_bytes: int = 1 << 26):  # type: ignore[no-untyped-def]
    """Uncompressed blocks of 4 KiB, a filter, and a block cache of this size."""
    from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options

    options, blocks = Options(raw_mode=True), BlockBasedOptions()
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    blocks.set_block_cache(Cache(cache_bytes))
    blocks.set_block_size(4096)
    blocks.set_bloom_filter(10, True)
    options.set_block_based_table_factory(blocks)
    return options
