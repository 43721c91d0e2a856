"""Pipeline files on Spark: what goes in comes out, what cannot be read is set aside, secrets stay secret."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.cli.main import main
from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.runner import plan_pipeline
from dovetail.testing.flows import published_rows
from dovetail.testing.rows import assert_same_rows

PIPELINE = """\
name: orders
checkpoint: checkpoint
trigger: available-now
sources:
  orders:
    format: json
    path: landing
    schema: order_id bigint, customer_id bigint
    malformed: dead-letter
    dead_letter: {path: dead}
relations:
  customers:
    path: relation
    build: {format: csv, path: customers.csv, options: {header: true}, schema: "customer_id bigint, city string",
            on: customer_id, shards: 2}
steps:
  - where: order_id < 100
  - enrich: {relation: customers, on: customer_id, how: left, budget: 4MB}
  - with: {town: upper(city)}
sink: {format: parquet, path: out}
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Command:
    """The command line in this process, with the session that is there."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(list(arguments))
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "landing").mkdir()
    (tmp_path / "customers.csv").write_text("customer_id,city\n1,Rome\n2,Oslo\n")
    (tmp_path / "p.yaml").write_text(PIPELINE)
    return tmp_path


def land(project: Path, name: str, *lines: str) -> None:
    (project / "landing" / name).write_text("\n".join(lines) + "\n")


def test_pipeline_takes_up_where_it_was_and_sets_malformed_rows_aside(command: Command, project: Path) -> None:
    land(project, "a.json", '{"order_id": 1, "customer_id": 1}', "{broken", '{"order_id": 2, "customer_id": 9}')
    code, out, err = command("run", "p.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)["batch"] == 0
    *stages, last = err.splitlines()
    assert stages == ["Starting Spark", "Planning", "Building relation customers"]
    assert last.startswith("batch=0 "), "a plain line where nobody watches"
    land(project, "b.json", '{"order_id": 3, "customer_id": 2}', '{"order_id": "x"}', '{"order_id": 200}')
    code, out, err = command("run", "p.yaml")
    assert code == 0, err
    assert "orders has ended" in out
    expected = [
        {"customer_id": 1, "order_id": 1, "city": "Rome", "town": "ROME"},
        {"customer_id": 9, "order_id": 2, "city": None, "town": None},
        {"customer_id": 2, "order_id": 3, "city": "Oslo", "town": "OSLO"},
    ]
    assert_same_rows(published_rows(project / "out"), expected)
    dead = published_rows(project / "dead")
    assert sorted(row["malformed"] for row in dead) == ['{"order_id": "x"}', "{broken"]
    assert {row["reason"] for row in dead} == {"not json of the schema of source orders"}
    assert {Path(row["origin"]).name for row in dead} == {"a.json", "b.json"}
    code, out, _ = command("status", "p.yaml", "--json")
    status = json.loads(out)
    assert (code, status["flow"], status["running"], status["batch"]) == (0, "orders", None, 1)
    assert status["progress"]["operators"][0]["totals"]["stream_tuples_in"] == 3


def test_malformed_row_is_an_error_that_is_over_when_the_file_is_right(command: Command, project: Path) -> None:
    text = PIPELINE.replace("malformed: dead-letter\n    dead_letter: {path: dead}", "malformed: error")
    (project / "p.yaml").write_text(text)
    land(project, "a.json", '{"order_id": 1, "customer_id": 1}', "{broken")
    code, out, err = command("run", "p.yaml")
    assert (code, out) == (2, "")
    (told,) = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert "landing/a.json" in told
    assert "Unexpected character" in told
    land(project, "a.json", '{"order_id": 1, "customer_id": 1}')
    assert command("run", "p.yaml")[0] == 0
    assert [row["order_id"] for row in published_rows(project / "out")] == [1]


def test_record_that_is_too_long_is_malformed(command: Command, project: Path) -> None:
    text = PIPELINE.replace("customer_id bigint\n", "customer_id bigint, note string\n    max_record_bytes: 60\n", 1)
    long = json.dumps({"order_id": 2, "customer_id": 1, "note": "x" * 500})
    land(project, "a.json", '{"order_id": 1, "customer_id": 1}', long, "{broken")
    (project / "p.yaml").write_text(text)
    code, _, err = command("run", "p.yaml")
    assert code == 0, err
    assert [row["order_id"] for row in published_rows(project / "out")] == [1]
    dead = {row["malformed"][:13]: row["reason"] for row in published_rows(project / "dead")}
    assert dead == {
        '{"order_id":2': "longer than the 60 bytes of max_record_bytes of source orders",
        "{broken": "not json of the schema of source orders",
    }
    land(project, "b.json", long)
    mode = "malformed: dead-letter\n    dead_letter: {path: dead}"
    (project / "p.yaml").write_text(
        text.replace(mode, "malformed: error").replace("checkpoint:", "checkpoint: again #")
    )
    code, _, err = command("run", "p.yaml")
    assert code == 2
    assert "A record is longer than the 60 bytes of max_record_bytes of source orders." in err


def test_xml_and_parquet_are_read_and_a_plan_that_spark_refuses_names_the_line(
    spark: SparkSession, project: Path
) -> None:
    (project / "landing" / "a.xml").write_text("<r><o><id>1</id></o><o><id>2</id></o></r>")
    pq.write_table(pa.table({"id": [1, 2, 3], "city": ["Rome", "Oslo", "Lima"]}), project / "cities.parquet")
    relation = dt.Relation.build(pq.read_table(project / "cities.parquet"), project / "cities", on="id", shards=2)
    text = f"""\
name: xml
checkpoint: checkpoint
sources:
  o: {{format: xml, path: landing, row_tag: o, schema: id bigint}}
relations:
  cities: {{path: {relation.path}}}
steps:
  - enrich: {{relation: cities}}
sink: {{format: parquet, path: out}}
"""
    (project / "p.yaml").write_text(text)
    planned = plan_pipeline(spark, check_pipeline(*parse_pipeline(project / "p.yaml")))
    (step,) = planned.flow.explanation().as_dict()["steps"]
    assert (step["name"], step["kind"], step["shards"], step["plan"]["strategy"]) == ("1-enrich", "enrich", 2, "lookup")
    query = planned.start("available-now")
    query.awaitTermination()
    assert_same_rows(published_rows(project / "out"), [{"id": 1, "city": "Rome"}, {"id": 2, "city": "Oslo"}])
    (project / "p.yaml").write_text(text.replace("sink:", "  - where: nonsense(id) > 2\nsink:"))
    with pytest.raises(PipelineError, match=r"p\.yaml:9: steps\[1\]\.where: .*nonsense"):
        plan_pipeline(spark, check_pipeline(*parse_pipeline(project / "p.yaml")))


def test_second_runner_of_a_checkpoint_is_refused(command: Command, project: Path) -> None:
    from dovetail.storage.running import running

    with running(project / "checkpoint"):
        code, _, err = command("run", "p.yaml")
    assert code == 3
    assert "already runs this flow" in err
