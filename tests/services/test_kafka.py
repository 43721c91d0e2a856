"""A real Kafka broker as source and sink of flows and pipeline files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.cli.main import main
from dovetail.testing.flows import commits_of, published_rows


def test_topic_written_by_a_flow_tells_repetitions_by_its_headers(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    spark.range(6).withColumn("v", F.concat(F.lit("value "), "id")).write.parquet(str(tmp_path / "feed"))
    source = spark.readStream.schema("id long, v string").parquet(str(tmp_path / "feed"))
    to = dt.sinks.kafka(kafka.servers, "written", key="id")
    query = dt.stream(source, "writing").write(to, checkpoint=tmp_path / "ckpt", trigger="available-now")
    query.awaitTermination()
    to.publish(commits_of(tmp_path / "ckpt")[-1]["receipt"])  # as after a crash: everything is sent again
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", kafka.servers)
    records = reader.option("subscribe", "written").option("includeHeaders", "true").load().collect()
    assert len(records) == 12
    headers = Counter(tuple((h["key"], bytes(h["value"])) for h in record["headers"]) for record in records)
    assert set(headers.values()) == {2}, "a repetition has the headers of the first"
    assert {dict(h)["flow"] for h in headers} == {b"writing"}
    assert {json.loads(record["value"])["v"] for record in records} == {f"value {n}" for n in range(6)}
    assert {json.loads(record["key"])["id"] for record in records} == set(range(6))


def texts(spark: SparkSession, values: list[str]) -> DataFrame:
    """Records, in order: all in one partition of Spark's."""
    return spark.createDataFrame([(value,) for value in values], "value string").coalesce(1)


def numbers(first: int, last: int) -> list[str]:
    return [json.dumps({"id": number, "city": f"c{number % 3}"}) for number in range(first, last)]


PIPELINE = """\
name: {topic}
checkpoint: ckpt
trigger: available-now
sources:
  events:
    format: kafka
    servers: {servers}
    topic: {topic}
    schema: id bigint, city string
    malformed: dead-letter
    dead_letter: {{path: dead}}
    max_records_per_trigger: 7
    max_record_bytes: 80
    options: {options}
relations:
  keys: {{path: keys}}
steps:
  - surrogate_key: {{column: sk, relation: keys, on: id}}
sink: {{format: parquet, path: out}}
"""


@pytest.fixture
def pipeline(kafka: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a pipeline file that reads a topic."""
    monkeypatch.chdir(tmp_path)

    def write(topic: str, options: str = "{}") -> Path:
        file = tmp_path / "p.yaml"
        file.write_text(PIPELINE.format(topic=topic, servers=kafka.servers, options=options))
        return file

    return write


def test_pipeline_reads_a_topic_and_sets_aside_what_is_not_json(
    kafka: Any, spark: SparkSession, tmp_path: Path, pipeline: Any
) -> None:
    long = json.dumps({"id": 99, "city": "x" * 900})
    kafka.send(texts(spark, [*numbers(0, 20), "not JSON", '{"id": "x"}', long]), "read")
    pipeline("read")
    assert main(["run", "p.yaml"]) == 0
    assert sorted(row["id"] for row in published_rows(tmp_path / "out")) == list(range(20))
    assert {row["malformed"] for row in published_rows(tmp_path / "dead")} == {"not JSON", '{"id": "x"}', long[:80]}
    assert all(row["origin"].startswith("read, partition ") for row in published_rows(tmp_path / "dead"))
    batches = commits_of(tmp_path / "ckpt")
    assert len(batches) >= 4, "23 records, at most 7 at a time"
    kafka.send(texts(spark, numbers(15, 30)), "read")
    assert main(["run", "p.yaml"]) == 0
    rows = published_rows(tmp_path / "out")
    assert Counter(row["id"] for row in rows) == Counter([*range(20), *range(15, 30)])
    assert len({(row["id"], row["sk"]) for row in rows}) == 30, "a key that comes again keeps its number"


def test_records_that_the_broker_has_lost_are_an_error_that_says_so(
    kafka: Any, spark: SparkSession, tmp_path: Path, pipeline: Any, capfd: Any
) -> None:
    kafka.send(texts(spark, numbers(0, 10)), "lost")
    pipeline("lost")
    assert main(["run", "p.yaml"]) == 0
    kafka.send(texts(spark, numbers(10, 20)), "lost")
    kafka.lose_records(spark, "lost")
    kafka.send(texts(spark, numbers(20, 30)), "lost")
    capfd.readouterr()
    assert main(["run", "p.yaml"]) == 2
    told = capfd.readouterr().err
    assert "Kafka no longer has records that the flow has not read yet" in told
    assert "lost" in told
    assert "failOnDataLoss" in told
    assert "Traceback" not in told
    assert sorted(row["id"] for row in published_rows(tmp_path / "out")) == list(range(10))
    # The user decides to do without them; the flow goes on with what is there.
    pipeline("lost", "{failOnDataLoss: false}")
    assert main(["run", "p.yaml"]) == 0
    rows = published_rows(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == [*range(10), *range(20, 30)]
    assert len({row["sk"] for row in rows}) == 20


def test_broker_that_is_not_there_is_told_in_one_message(
    spark: SparkSession, tmp_path: Path, pipeline: Any, capfd: Any
) -> None:
    file = pipeline("nobody")
    file.write_text(file.read_text().replace("servers: 127.0.0.1:", "servers: 127.0.0.1:1 # "))
    capfd.readouterr()
    assert main(["run", "p.yaml"]) == 2
    told = capfd.readouterr().err
    assert "p.yaml:7" in told
    assert "No Kafka broker responds at 127.0.0.1:1" in told
    assert "Traceback" not in told
