"""Shards of a join with promises, micro-batch by micro-batch, from state files alone: no Spark is needed."""

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import DovetailError, PlanError, PromiseError, SchemaError
from dovetail.joins.multiway import mjoin_spec
from dovetail.joins.promises import Metadata, Punctuation
from dovetail.joins.promises.punctuation import BoundPunctuation
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.runtime.promises import MetadataJoinTask
from dovetail.runtime.shard_job import ShardInput
from dovetail.spark.flow.step import BatchClock
from dovetail.spark.steps.join_metadata import ENDS, IS_DATA_TOO, JoinMetadata
from dovetail.storage.state_files import ShardState, write_tables
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows
from dovetail_lab.workloads.news import NewsWorkload

SCHEMAS = {
    "news": pa.schema({"sno": pa.int64(), "title": pa.string()}),
    "access": pa.schema({"sno": pa.int64(), "~ends access": pa.int8(), "ipaddr": pa.string()}),
}
SLOTS = [pa.int64(), pa.string(), pa.int8()]
SHARDS = 2
# A join takes its spill directory with it when it goes.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


class Shards:
    """All shards of the join, each with its state files."""

    def __init__(self, root: Path, **metadata: Any) -> None:
        self.root = root
        self.states: list[ShardState | None] = [None] * SHARDS
        self.reports: list[Any] = [None] * SHARDS
        self.batch = 0
        spec = mjoin_spec(SCHEMAS, on="sno", budget="1MB", partitions=4, spill_directory=root / "spill")
        names = ("sno", "title", "ends", "ipaddr", "notice")
        self.task = MetadataJoinTask(
            spec=spec, numbers=(0, 1), codes=1, places=((0, 1), (0, 2, 1)), output_names=names, owner="test",
            alive_bytes=0, metadata=Metadata(keys=["news"], is_batchwise=True, **metadata),
            marked=frozenset(["access"]), timed=frozenset(), patterns={}, has_notices=True, has_quarantine=False,
            shards=SHARDS,
        )  # fmt: skip
        for shard in range(SHARDS):
            (root / "1-join" / f"{shard:05d}").mkdir(parents=True)

    def run(self, news: list[tuple[Any, ...]], access: list[tuple[Any, ...]], given: Any = ()) -> list[dict[str, Any]]:
        """One micro-batch of (sno, title) and (sno, mark, address); gives all shards' output."""
        rows = [(0, sno, title, None) for sno, title in news] + [(1, sno, ip, mark) for sno, mark, ip in access]
        codes = pa.array([row[1] for row in rows], pa.int64())
        homes = shard_of_codes(codes.fill_null(0).to_numpy(zero_copy_only=False), SHARDS).tolist()
        intent = {"time_ms": self.batch, "watermark": None, "drain": True, "punctuations": dict(given)}
        out: list[dict[str, Any]] = []
        for shard in range(SHARDS):
            # Sorted as the route sorts them: the order of arrival is lost.
            mine = sorted((row for row, home in zip(rows, homes, strict=True) if home == shard), key=str)
            columns = [pa.array([r[0] for r in mine], pa.int32()), pa.array([r[1] for r in mine], pa.int64())]
            columns += [pa.array([r[n] for r in mine], kind) for n, kind in zip((1, 2, 3), SLOTS, strict=True)]
            batch = pa.record_batch(columns, names=["__shard", "__code", "s0", "s1", "s2"])
            work = self.task.run(
                ShardInput(shard, self.states[shard], self.root, iter([batch] if mine else []), intent)
            )
            while True:
                try:
                    out += next(work).to_pylist()
                except StopIteration as end:
                    result = end.value
                    break
            written = write_tables(self.root, "1-join", shard, self.batch, result.tables)
            self.states[shard] = ShardState(uuid.uuid4().hex, (*result.kept, *written), result.values)
            self.reports[shard] = result.report
        self.batch += 1
        return out

    def counter(self, name: str) -> int:
        return sum(report["counters"][name] for report in self.reports)


def test_marked_rows_close_every_group_once_whatever_the_order_within_a_micro_batch(tmp_path: Path) -> None:
    work = NewsWorkload(40, 4, order="random", seed=5)
    news = [(row["sno"], row["title"]) for row in work.news(0, 40).to_pylist()]
    shards, out, told = Shards(tmp_path), [], []
    data: list[tuple[int, str]] = []
    for start in range(0, 40, 8):
        records, closed = work.accesses(start, start + 8)
        rows = [(row["sno"], None, row["ipaddr"]) for row in records.to_pylist()]
        data += [(sno, ip) for sno, _, ip in rows]
        found = shards.run(news[start : start + 8], rows + [(sno, ENDS, None) for sno in closed.tolist()])
        new = [(row["sno"], row["title"], row["ipaddr"]) for row in found if row["notice"] is None]
        assert not {sno for sno, _, _ in new} & set(told), "a result came after its group was closed"
        out += new
        told += [row["sno"] for row in found if row["notice"] == "closed"]
    expected = multiway_oracle(
        {"n": [{"k": s, "t": t} for s, t in news], "a": [{"k": s, "i": i} for s, i in data]}, [(("n", "k"), ("a", "k"))]
    )
    joined = [{"k": sno, "t": title, "i": ip} for sno, title, ip in out]
    assert_same_rows(joined, [dict(row) for row in expected])
    assert sorted(told) == list(range(40))
    assert sum(sum(report["state_rows"].values()) for report in shards.reports) == 0
    assert shards.counter("punctuations_in") == 40
    assert shards.counter("purge_lag") == 0
    assert shards.counter("punctuations_held") <= 40


def test_row_may_end_its_value_and_be_data_as_well(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    found = shards.run([(1, "n1"), (2, "n2")], [(1, IS_DATA_TOO, "last"), (1, None, "other"), (2, None, "x")])
    joined = sorted((row["sno"], row["ipaddr"]) for row in found if row["notice"] is None)
    assert joined == [(1, "last"), (1, "other"), (2, "x")]
    assert [row["sno"] for row in found if row["notice"] == "closed"] == [1]
    assert [row["sno"] for row in shards.run([], [(2, IS_DATA_TOO, "y")]) if row["notice"] == "closed"] == [2]


def test_rows_that_break_promises_come_out_with_the_reason(tmp_path: Path) -> None:
    shards = Shards(tmp_path, on_broken_promise="quarantine")
    shards.run([(1, "n1")], [(1, ENDS, None)])
    found = shards.run([(2, "n2"), (2, "again")], [(1, None, "late"), (3, None, "x")])
    reasons = {(row["sno"], row["title"], row["ipaddr"]): row["notice"] for row in found}
    assert reasons[1, None, "late"] == "it matches an earlier punctuation of its input"
    # Of the two rows of a unique number, which one came first is not known.
    assert sum(reason.startswith("it is a second row") for reason in reasons.values()) == 1
    assert shards.counter("closed_rows") + shards.counter("dropped_on_arrival") == 1
    assert shards.run([(3, "n3")], [])[0]["ipaddr"] == "x"


def test_what_a_function_gave_is_taken_from_the_intent_by_all_shards(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.run([(n, "n") for n in range(10)], [])
    given = [BoundPunctuation.of(Punctuation.between("sno", 0, 7), "access", SCHEMAS["access"]).as_dict()]
    found = shards.run([], [], {"access": given})
    # Each value is told by its own shard only.
    assert sorted(row["sno"] for row in found) == list(range(8))
    assert sum(report["state_rows"]["news"] for report in shards.reports) == 2
    with pytest.raises(PromiseError, match="matches an earlier punctuation"):
        shards.run([], [(5, None, "x")])


def test_punctuation_that_does_not_name_the_join_column_is_a_promise_in_every_shard(tmp_path: Path) -> None:
    shards = Shards(tmp_path, on_broken_promise="quarantine")
    given = [BoundPunctuation.of(Punctuation({"ipaddr": "gone"}), "access", SCHEMAS["access"]).as_dict()]
    shards.run([(n, "n") for n in range(10)], [], {"access": given})
    assert [report["counters"]["punctuations_in"] for report in shards.reports] == [1, 1]
    assert [report["counters"]["punctuations_held"] for report in shards.reports] == [1, 1]
    found = shards.run([], [(n, None, "gone") for n in range(10)] + [(n, None, "here") for n in range(10)])
    told = sorted((row["sno"], row["ipaddr"], row["notice"] is None) for row in found)
    assert told == sorted([(n, "gone", False) for n in range(10)] + [(n, "here", True) for n in range(10)])
    assert all(report["counters"]["broken_promises"]["punctuation"] for report in shards.reports)


def test_values_that_a_function_gave_are_held_by_their_own_shard_only(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    # So far apart that no two make one range.
    numbers = list(range(0, 20_000_000, 2_000_000))
    given = [BoundPunctuation.of(Punctuation.one_of("sno", numbers), "access", SCHEMAS["access"]).as_dict()]
    found = shards.run([(n, "n") for n in numbers], [], {"access": given})
    assert sorted(row["sno"] for row in found) == numbers
    held = [report["counters"]["punctuations_held"] for report in shards.reports]
    assert sum(held) == len(numbers)
    assert 0 not in held


def test_closed_values_with_none_of_the_shard_between_them_are_one_range(tmp_path: Path) -> None:
    shards, told = Shards(tmp_path), []
    numbers = list(range(100))
    # In turns from both ends, so that what is between them is closed last; 50 stays open.
    order = [n for pair in zip(numbers[:50], reversed(numbers[51:]), strict=False) for n in pair] + [49]
    for start in range(0, len(order), 25):
        part = order[start : start + 25]
        found = shards.run([(n, "n") for n in part], [(n, ENDS, None) for n in part])
        told += [row["sno"] for row in found if row["notice"] == "closed"]
    assert sorted(told) == sorted(set(numbers) - {50})
    # Below and above 50 in its own shard; everything in the other one.
    assert sorted(report["counters"]["punctuations_held"] for report in shards.reports) == [1, 2]
    assert [row["ipaddr"] for row in shards.run([(50, "n")], [(50, None, "x")]) if row["notice"] is None] == ["x"]


def test_marked_rows_go_to_the_shard_of_their_value_only(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.run([(n, "n") for n in range(10)], [(3, ENDS, None)])
    assert sorted(report["counters"]["punctuations_in"] for report in shards.reports) == [0, 1]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([Punctuation({"nope": 1})], PlanError, "on a column that input 'access' does not have"),
        ([Punctuation({"sno": "x"})], SchemaError, "access.sno has the value 'x' of type str; the column is int64"),
        (["sno"], PlanError, "'sno' is not a punctuation"),
        (Punctuation({"sno": 1}), PlanError, "Return a list of punctuations"),
        (None, PlanError, "returned None"),
    ],
)
def test_function_that_gives_no_punctuation_of_its_input_is_refused(
    given: Any, error: type[DovetailError], message: str
) -> None:
    spec = mjoin_spec(SCHEMAS, on="sno", budget="1MB")
    promised = JoinMetadata(Metadata(is_batchwise=True), callables={"access": lambda clock: given})
    with pytest.raises(error, match=message):
        promised.given(spec, BatchClock(1, None, False))
