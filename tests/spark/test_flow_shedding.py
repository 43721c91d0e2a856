"""Flows that drop what they have no room for, when asked to: counted, handed over, and exact for what is kept."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from dovetail import Relation
from dovetail.core.errors import PlanError
from dovetail.operators import OldestFirst, Random
from dovetail.spark import sinks
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, published_rows, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

KEYS = 20_000
CITIES = [{"k": key, "city": f"c{key % 17}"} for key in range(0, KEYS, 2)]
SMALL = "300kB"


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    path = tmp_path_factory.mktemp("shedding") / "cities"
    return Relation.build(pa.Table.from_pylist(CITIES), path, on="k", shards=2)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "feed")


@pytest.fixture
def source(spark: SparkSession, feed: Feed) -> DataFrame:
    reader = spark.readStream.schema("n long, k long, note string, span interval year to month")
    return reader.option("maxFilesPerTrigger", 1).parquet(str(feed.directory))


def orders(first: int, count: int) -> pa.Table:
    """Rows with a text, so that what is dropped has columns of every form."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "n": list(numbers),
            "k": [number * 7919 % KEYS for number in numbers],
            "note": [f"order {number}" for number in numbers],
        }
    )


def run(flow: Flow, root: Path) -> Any:
    query = flow.write(sinks.parquet(root / "out"), checkpoint=root / "checkpoint", trigger="available-now")
    assert query.awaitTermination(180)
    assert query.progress is not None
    return query.progress.operators[0].totals


@pytest.mark.parametrize(
    ("shed", "strategy", "name"),
    [
        ("oldest", "mesh", "oldest_first"),
        ("random", "balanced", "random"),
        ("least_joined", "auto", "least_joined_first"),
    ],
)
def test_what_is_dropped_is_counted_and_goes_to_its_sink(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, shed: str, strategy: str, name: str
) -> None:
    for number in range(2):
        feed.add(orders(20_000 * number, 20_000))
    flow = stream(source, "shedding").enrich(
        relation,
        on="k",
        how="left",
        budget=SMALL,
        strategy=strategy,
        max_delay="5 seconds",
        shed=shed,
        shed_to=sinks.parquet(tmp_path / "shed"),
    )
    totals = run(flow, tmp_path)
    kept, dropped = published_rows(tmp_path / "out"), published_rows(tmp_path / "shed")
    assert totals.stream_tuples_in == 40_000
    if strategy != "auto":
        # What auto looks up does not wait, whatever the policy.
        assert totals.shed_tuples > 1_000
    assert totals.shed == ({name: len(dropped)} if dropped else {})
    assert totals.tuples_left == 40_000
    arrived = feed.rows()
    assert sorted(row["n"] for row in kept + dropped) == list(range(40_000))
    for row in dropped[:: max(1, len(dropped) // 50)]:
        assert row == {**arrived[row["n"]], "span": None}
    rows = [{**arrived[row["n"]], "span": None} for row in kept]
    assert_same_rows(kept, join_oracle(rows, CITIES, on=["k"], how="left"), shed)


def test_nothing_is_dropped_unless_asked_for_and_a_checkpoint_goes_on_with_shedding(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"on": "k", "how": "left", "budget": SMALL, "strategy": "mesh", "max_delay": "1 hour"}
    feed.add(orders(0, 20_000))
    query = (
        stream(source, "later")
        .enrich(relation, **options)
        .write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="1 hour")
    )
    wait_until(lambda: query.progress is not None, "the first micro-batch")
    assert query.progress is not None
    before = query.progress.operators[0]
    query.stop()
    assert before.totals.shed == {}
    assert before.pending > 0
    feed.add(orders(20_000, 20_000))
    totals = run(stream(source, "later").enrich(relation, **options, shed=Random(rate=1.0)), tmp_path)
    assert totals.shed["random"] > 1_000
    assert len(published_rows(tmp_path / "out")) == 40_000 - totals.shed_tuples


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shed": "newest", "max_delay": "1 second"}, "shed='newest' is not known.*oldest"),
        ({"shed": 7, "max_delay": "1 second"}, "shed=7 is not known"),
        ({"shed": "oldest"}, "without max_delay= none does"),
        ({"shed": OldestFirst(), "strategy": "lookup"}, "no tuple waits"),
        ({"shed": "oldest", "on": [], "condition": "n < k2"}, "shed= needs key columns"),
        ({"shed_to": sinks.noop()}, "Pass shed= as well"),
        ({"shed": "oldest", "max_delay": "1 second", "shed_to": "there"}, "is not a sink"),
        ({"rate": 100}, "objective=.memory"),
        ({"rate": 50, "objective": "memory"}, "rate= has no meaning for strategy='auto'.*mesh or balanced"),
        ({"rate": 0, "objective": "memory"}, "rate=0 is not a rate"),
        ({"rate": "many", "objective": "memory"}, "rate='many' is not a rate"),
        ({"objective": "memory", "strategy": "hybrid"}, "no meaning for strategy='hybrid'.*mesh"),
    ],
    ids=str,
)
def test_option_that_cannot_be_says_what_would_work(
    source: DataFrame, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    rows = pa.table({"k": [1], "k2": [1]})
    relation = Relation.build(rows, tmp_path / "r", on="k", shards=1)
    with pytest.raises(PlanError, match=f"(?s){why}"):
        stream(source, "plans").enrich(relation, **({"on": "k"} | options))


def test_fingerprint_of_a_flow_does_not_depend_on_what_it_drops(relation: Relation, source: DataFrame) -> None:
    plain = stream(source, "f").enrich(relation, on="k", max_delay="1 second")
    shedding = stream(source, "f").enrich(relation, on="k", max_delay="1 second", shed="oldest")
    assert json.dumps(plain.steps[0].fingerprint()) == json.dumps(shedding.steps[0].fingerprint())
