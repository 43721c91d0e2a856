"""A relation that follows a table, against deltalake's merge of the same changes, in one run.

Changes are 70 % updates, 20 % inserts and 10 % deletes; updated and deleted keys are Zipf-distributed. Axes: rows of
the table (--rows), changes per micro-batch (--changes), micro-batches (--batches, at most 9: commits are kept), time
between folds (--fold-every). Figures of the follower: changes divided by the time from the first commit after the
warm-up to the end of the run, with the last fold; bytes written per byte of change, of the shards' state and of the
relation; the time of a lookup of 100,000 keys against a relation that was built anew from the same rows. Of deltalake:
changes per second of merges of the same micro-batches, each reduced to the last change of a key, which merge requires.

Run it with ``make bench-follow``.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import dovetail as dt
from dovetail.storage.state_files import StateFile
from dovetail.testing.flows import Feed, commits_of
from dovetail.testing.sessions import local_session

SEED, WARM_UP = 11, 2
SCHEMA = "id long, city string, amount double, op string, seq long"


def rows_of(ids: np.ndarray[Any, np.dtype[np.int64]], chance: np.random.Generator) -> dict[str, Any]:
    cities = np.array([f"city {number}" for number in range(1000)])
    return {"id": ids, "city": cities[chance.integers(0, 1000, ids.size)], "amount": chance.random(ids.size)}


def changes_of(number: int, count: int, rows: int, chance: np.random.Generator) -> pa.Table:
    """One micro-batch of changes."""
    inserts, deletes = count * 2 // 10, count // 10
    known = chance.zipf(1.1, count - inserts) % rows
    new = rows + number * inserts + np.arange(inserts)
    ids = np.concatenate([known, new]).astype(np.int64)
    op = np.array(["u"] * (count - inserts - deletes) + ["d"] * deletes + ["c"] * inserts)
    order = chance.permutation(count)
    table = pa.table({**rows_of(ids, chance), "op": op}).take(pa.array(order))
    return table.append_column("seq", pa.array(number * count + np.arange(count)))


def written_by_this_process() -> int:
    """Bytes that this process has passed to write calls: the folds are made here."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def followed(root: Path, feed: Feed, fold_every: str, count: int) -> dict[str, float]:
    """Follow all changes; rates and bytes."""
    spark = local_session(settings={"spark.driver.memory": "2g"})
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(feed.directory))
    before = written_by_this_process()
    query = dt.follow(
        root / "relation",
        source,
        sequence_by="seq",
        apply_as_deletes="op = 'd'",
        columns=["city", "amount"],
        checkpoint=root / "checkpoint",
        trigger="available-now",
        fold_every=fold_every,
    )
    query.awaitTermination()
    ended_ms = time.time() * 1000
    commits = commits_of(root / "checkpoint")
    starts = [commit["time_ms"] for commit in commits]
    state = 0
    for commit in commits:
        for shard in commit["operators"]["1-follow"]:
            files = [StateFile.from_dict(file) for file in shard["files"]]
            state += sum(file.bytes for file in files if file.batch == commit["batch"])
    spans = [later - earlier for earlier, later in zip(starts[WARM_UP:], starts[WARM_UP + 1 :], strict=False)]
    given = sum(pq.read_table(file).nbytes for file in feed.files())
    relation = dt.Relation.open(root / "relation")
    segments = [len(shard.segments) for shard in relation._manifest.shards]
    return {
        "changes_per_second": count * (len(starts) - WARM_UP) / ((ended_ms - starts[WARM_UP]) / 1000),
        "median_micro_batch_s": statistics.median(spans) / 1000,
        "bytes_per_byte_of_change": (state + written_by_this_process() - before) / given,
        "state_bytes_per_byte": state / given,
        "segments_per_shard": max(segments),
        "levels_per_lookup": max(
            sum(file["table"] == "changes" for file in shard["files"])
            for commit in commits
            for shard in commit["operators"]["1-follow"]
        ),
    }


def merged(path: Path, start: pa.Table, feed: Feed, count: int) -> float:
    """Changes per second of deltalake."""
    import deltalake

    deltalake.write_deltalake(str(path), start)
    spent = 0.0
    for file in feed.files():
        changes = pq.read_table(file)
        last = changes.group_by("id").aggregate([("seq", "max")]).column("seq_max")
        changes = changes.filter(pc.is_in(changes["seq"], last))
        began = time.perf_counter()
        merge = deltalake.DeltaTable(str(path)).merge(changes, "t.id = s.id", source_alias="s", target_alias="t")
        values = {name: f"s.{name}" for name in start.column_names}
        merge = merge.when_matched_delete("s.op = 'd'").when_matched_update(values, "s.op <> 'd'")
        merge.when_not_matched_insert(values, "s.op <> 'd'").execute()
        spent += time.perf_counter() - began
    return count * len(feed.files()) / spent


def lookup_seconds(relation: dt.Relation, codes: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    reader = relation.reader()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _, positions = reader.lookup(codes)
        reader.gather(positions)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=9)
    parser.add_argument("--fold-every", default="10 seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chance = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch:
        root = Path(scratch)
        start = pa.table(rows_of(np.arange(given.rows), chance))
        relation = start.append_column("row_sequence", pa.array(np.full(given.rows, -1)))
        dt.Relation.build(relation, root / "relation", on="id", shards=2, unique=True)
        feed = Feed(root / "feed")
        for number in range(given.batches):
            feed.add(changes_of(number, given.changes, given.rows, chance))
        result: dict[str, Any] = {"rows": given.rows, "changes": given.changes, "batches": given.batches}
        result |= followed(root, feed, given.fold_every, given.changes)
        kept = dt.Relation.open(root / "relation")
        anew = dt.Relation.build(kept.to_arrow(), root / "anew", on="id", shards=2, unique=True)
        codes = chance.integers(0, given.rows, 100_000)
        result["lookup_against_new_build"] = lookup_seconds(kept, codes) / lookup_seconds(anew, codes)
        result["deltalake_changes_per_second"] = merged(root / "delta", start, feed, given.changes)
        result["times_deltalake"] = result["changes_per_second"] / result["deltalake_changes_per_second"]
        for name, value in result.items():
            print(f"{name:<32} {value:>14,.2f}")
        if given.json is not None:
            given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
