"""The shared cache on Spark: how much of a skewed stream it answers, and that warm pages do without it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.runtime.cache_file import GenerationWriter
from dovetail.runtime.enrich import CACHE_SHARE
from dovetail.runtime.generator.zipf import Zipf
from dovetail.runtime.shared_cache import GENERATION_SHARE
from dovetail.testing.flows import Feed

KEYS, TUPLES, FILES, SEED = 200_000, 40_000, 8, 3
ROW = 100


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> dt.Relation:
    keys = np.arange(1, KEYS + 1)
    rows = pa.table({"k": keys, "pay": [f"{key:0{ROW}d}" for key in keys]})
    return dt.Relation.build(rows, tmp_path_factory.mktemp("cache") / "r", on="k", shards=2)


@pytest.fixture(scope="module")
def zipf() -> Zipf:
    return Zipf(KEYS, exponent=1.0, order="shuffled", seed=SEED)


def hit_ratios(
    spark: SparkSession, tmp_path: Path, zipf: Zipf, relation: dt.Relation, name: str, *, io: str
) -> list[float]:
    """The share of tuples that the cache answered, micro-batch by micro-batch; the join's rows are counted, too."""
    feed = Feed(tmp_path / "in")
    for _ in range(FILES):
        codes = zipf.sample(TUPLES)
        feed.add(pa.table({"k": codes, "v": codes}))
    stream = spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    budget = relation.stats.bytes // 20
    joined = dt.enrich(stream, relation, "k", io=io, budget=budget, metrics=name)
    query = joined.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    running = query.trigger(availableNow=True).start()
    assert running.awaitTermination(600)
    observed = [progress["observedMetrics"][name] for progress in running.recentProgress]
    hits, tuples = (np.array([row[key] for row in observed]) for key in ("cache_hits", "stream_tuples_in"))
    ratios = hits / np.maximum(tuples, 1)
    print(name, np.round(ratios, 3).tolist())
    return [float(ratio) for ratio, count in zip(ratios, tuples, strict=True) if count]


def predicted(relation: dt.Relation) -> float:
    """The model: the hottest values that a generation has room for, and their share of a Zipf stream."""
    generation_bytes = CACHE_SHARE * GENERATION_SHARE * (relation.stats.bytes // 20)
    values = generation_bytes / GenerationWriter.value_bytes(relation.stats.bytes / relation.stats.rows, 1.0)
    weights = 1.0 / np.arange(1, KEYS + 1)
    return float(weights[: int(values)].sum() / weights.sum())


def test_skewed_stream_is_answered_as_the_model_predicts(
    spark: SparkSession, tmp_path: Path, zipf: Zipf, relation: dt.Relation
) -> None:
    ratios = hit_ratios(spark, tmp_path, zipf, relation, "hits", io="buffered")
    model = predicted(relation)
    print("model", round(model, 3))
    assert np.mean(ratios[-3:]) == pytest.approx(model, rel=0.1)


def test_warm_pages_are_joined_without_a_cache(
    spark: SparkSession, tmp_path: Path, zipf: Zipf, relation: dt.Relation
) -> None:
    ratios = hit_ratios(spark, tmp_path, zipf, relation, "warm", io="map")
    assert set(ratios) == {0.0}
