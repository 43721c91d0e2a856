"""Every code block of the documentation runs: Python on Spark, YAML as part of a pipeline, commands by their parser.

Other tests run the blocks of README.md and docs/watching.md, and the commands of docs/operations.md.
"""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
import yaml
from pyspark.sql import DataFrame, SparkSession

import dovetail as dt
from dovetail.cli.main import app
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.starter import write_starter
from dovetail_lab.workloads import cloud_reports

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if not {"design", "lab"} & set(page.parts) and page.name not in ("watching.md",)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RELATIVE = re.compile(r'\("((?:landing|customers|warehouse|topics)(?:/[^"]*)?")')
ORDERS = "order_id long, customer_id long, shop string, amount double, user_id long, place string"
COMMAND = typer.main.get_command(app)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


def with_blocks(kind: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(DOCS))) for page in PAGES if blocks(page, kind)]


# -------------------------------------------------------------------- Python


class Names:
    """What the pages take for granted: streams, relations, files."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._spark, self._root = spark, root

    def stream(self, name: str, columns: str, **times: str) -> DataFrame:
        """An empty directory as a stream."""
        (self._root / "feeds" / name).mkdir(parents=True, exist_ok=True)
        df = self._spark.readStream.schema(columns).json(str(self._root / "feeds" / name))
        return df.withColumns({time: df[of].cast("timestamp") for time, of in times.items()})

    def relation(self, path: str, columns: dict[str, list[Any]], key: str) -> dt.Relation:
        return dt.Relation.build(pa.table(columns), self._root / path, on=key)

    def streams(self) -> dict[str, Any]:
        orders = self.stream("orders", f"{ORDERS}, ts timestamp, ordered_at timestamp", ordered="order_id")
        return {
            "dt": dt,
            "spark": self._spark,
            "orders": orders,
            "payments": self.stream("payments", "order_id long, paid_amount double", paid="order_id"),
            "shipments": self.stream("shipments", "order_id long", shipped="order_id"),
            "clicks": self.stream("clicks", "user_id long", clicked="user_id"),
            "customers": self.stream("customers", "customer_id long, name string, city string"),
            "changes": self.stream("changes", "customer_id long, city string, changed_at timestamp"),
        }

    def customers(self, path: str = "relations/customers") -> dt.Relation:
        return self.relation(path, {"customer_id": [1, 2], "segment": ["vip", "test"]}, "customer_id")


def of_enrich(names: Names, root: Path) -> dict[str, Any]:
    return {"relation": names.customers()}


def of_flows(names: Names, root: Path) -> dict[str, Any]:
    names.customers()
    (root / "landing" / "orders").mkdir(parents=True)
    return {}


def of_static_joins(names: Names, root: Path) -> dict[str, Any]:
    names.customers("made").to_df(names._spark).write.parquet(str(root / "customers"))
    return {}


def of_news(number: int) -> dict[str, Any]:
    return {
        "news_batch": pa.record_batch({"sno": pa.array([number], pa.int64()), "title": ["t"]}),
        "access_batch": pa.record_batch({"sno": pa.array([number] * 2, pa.int64()), "ipaddr": ["a", "b"]}),
    }


def of_metadata(names: Names, root: Path) -> dict[str, Any]:
    return {
        **of_news(79),
        "news": names.stream("news", "sno long, title string"),
        "access": names.stream("access", "sno long, size long, is_last boolean"),
        "tell": lambda rows, batch: None,
        "path": str(root / "groups"),
    }


def of_multi_join(names: Names, root: Path) -> dict[str, Any]:
    payments = names.stream("paid", "user_id long, paid_amount double, shop string")
    return {
        "distance_km": lambda left, right: pa.array([0.0] * len(left)).to_numpy(),
        "inputs": {"o": names.stream("placed", "user_id long, amount double, place string"), "p": payments},
        "clicks": names.stream("clicked", "user_id long", clicked="user_id"),
    }


def of_pipelines(names: Names, root: Path) -> dict[str, Any]:
    write_starter(root / "shop")
    return {}


def of_follow(names: Names, root: Path) -> dict[str, Any]:
    (root / "topics" / "customers").mkdir(parents=True)
    return {}


def of_history(names: Names, root: Path) -> dict[str, Any]:
    times = pa.array([0], pa.timestamp("us", tz="UTC"))
    columns: dict[str, Any] = {
        "customer_id": [1],
        "row_hash": [0],
        "city": ["Rome"],
        "valid_from": times,
        "valid_to": times,
    }
    names.relation("relations/customers", columns, "customer_id")
    return {}


def of_wait_for(names: Names, root: Path) -> dict[str, Any]:
    names.customers()
    return {}


def of_workloads(names: Names, root: Path) -> dict[str, Any]:
    return {}


PREPARED: dict[str, Callable[[Names, Path], dict[str, Any]]] = {
    "enrich.md": of_enrich,
    "flows.md": of_flows,
    "from_stream_static_joins.md": of_static_joins,
    "metadata.md": of_metadata,
    "multi_join.md": of_multi_join,
    "pipelines.md": of_pipelines,
    "warehouse/follow.md": of_follow,
    "warehouse/history.md": of_history,
    "warehouse/wait_for.md": of_wait_for,
    "workloads.md": of_workloads,
}


def end_queries(spark: SparkSession) -> None:
    """Stop what a block has started, and wait until their flows have let go of their checkpoints."""
    for query in spark.streams.active:
        query.stop()
    for thread in threading.enumerate():
        if thread.name.startswith("dovetail "):
            thread.join()


@pytest.fixture
def queries_end(spark: SparkSession) -> Iterator[None]:
    yield
    end_queries(spark)


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queries_end: None, page: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = Names(spark, tmp_path)
    prepare = PREPARED.get(str(page.relative_to(DOCS)), lambda *_: {})
    given = {**names.streams(), **prepare(names, tmp_path)}
    for number, text in enumerate(blocks(page, "python")):
        if "load_cloud_reports" in text:
            # Needs files that are not ours to give; what it returns has the columns of this.
            compile(text, str(page), "exec")
            assert next(iter(cloud_reports(10))).num_rows
            continue
        if "ScheduledJoin" in text:
            # The page shows another way to join the same rows.
            given |= of_news(80)
        # Spark takes relative paths from where its JVM was started.
        text = _RELATIVE.sub(f'("{tmp_path}/\\1', text)
        exec(compile(text, f"{page.name}, block {number}", "exec"), given)
        end_queries(spark)


# -------------------------------------------------------------------- YAML


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_yaml_is_a_pipeline_or_part_of_one(page: Path, tmp_path: Path) -> None:
    whole = {
        "name": "name: orders",
        "checkpoint": "checkpoint: checkpoint",
        "sources": "sources: {orders: {format: rate}}",
        "sink": "sink: {format: console}",
    }
    for text in blocks(page, "yaml"):
        rest = [line for key, line in whole.items() if key not in yaml.safe_load(text)]
        (tmp_path / "pipeline.yaml").write_text("\n".join([*rest, text]))
        parse_pipeline(tmp_path / "pipeline.yaml")


# -------------------------------------------------------------------- commands


def commands(page: Path) -> list[str]:
    lines = [
        line for kind in ("", "sh", "console", "bash") for text in blocks(page, kind) for line in text.splitlines()
    ]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("dovetail ")]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.name))
def test_command_can_be_given(page: Path) -> None:
    for line in commands(page):
        words, command = line.split()[1:], COMMAND
        while hasattr(command, "commands"):
            assert words[0] in command.commands, f"there is no command {words[0]}: {line}"
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words, resilient_parsing=False)
