"""Pipeline files that are wrong: each is answered with one clear message, the line, and exit code 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail as dt
from dovetail.cli import session
from dovetail.pipeline.starter import write_starter

Run = Callable[..., Any]

GOOD = """\
name: orders
checkpoint: checkpoint
trigger: 5 seconds
sources:
  orders:
    format: json
    path: landing
    schema: order_id bigint, customer_id bigint, amount double, ts timestamp
relations:
  customers:
    path: customers
steps:
  - name: joined
    enrich:
      relation: customers
      on: customer_id
      how: left
      budget: 16MB
      max_delay: 5 seconds
  - select: [order_id, customer_id, city, amount * 2 AS twice]
sink:
  format: parquet
  path: warehouse
"""
SINK = "sink:\n  format: parquet\n  path: warehouse\n"
SCHEMA = "    schema: order_id bigint, customer_id bigint, amount double, ts timestamp\n"
SOURCE = f"  orders:\n    format: json\n    path: landing\n{SCHEMA}"
POSTGRES = "sink:\n  format: postgres\n  host: 127.0.0.1\n  port: 1\n  database: dw\n  table: orders\n  user: etl\n"
KAFKA = "sink:\n  format: kafka\n  servers: 127.0.0.1:1\n  topic: orders\n"

# What is replaced in the good file, by what; the line, and what the message must say.
BROKEN: dict[str, tuple[str, str, int, list[str]]] = {
    "a key that is misspelt": ("trigger:", "triger:", 3, ["triger", "Did you mean 'trigger'"]),
    "a key of a step that is misspelt": ("budget: 16MB", "budgt: 16MB", 18, ["enrich.budgt", "Did you mean 'budget'"]),
    "a kind of step that is not known": ("  - select:", "  - selct:", 20, ["steps[1].selct", "Did you mean 'select'"]),
    "a column that is no text": (
        "on: customer_id",
        "on: {customer_id: 5}",
        16,
        ["steps[0].enrich.on.customer_id: This must be a text, not 5."],
    ),
    "a key of no possible type": ("on: customer_id", "on: 5", 16, ["steps[0].enrich.on: This must be"]),
    "a step of two kinds": ("  - select:", "  - where: 1 = 1\n    select:", 20, ["exactly one of", "select and where"]),
    "a step of no kind": (
        "  - select: [order_id, customer_id, city, amount * 2 AS twice]",
        "  - name: x",
        20,
        ["no kind"],
    ),
    "no name": ("name: orders\n", "", 1, ["name", "missing"]),
    "a name that cannot be a file's": ("name: orders", "name: my orders/2", 1, ["not a flow name"]),
    "no sink": (SINK, "", 1, ["sink", "missing"]),
    "no checkpoint": ("checkpoint: checkpoint\n", "", 1, ["checkpoint", "missing"]),
    "no source": (SOURCE, "  {}\n", 4, ["sources", "at least one"]),
    "a format that is not known": ("format: json", "format: jsn", 6, ["'jsn' is not a known format", "'json'"]),
    "a sink without a format": ("  format: parquet\n", "", 21, ["sink.format", "missing"]),
    "a sink that is not known": ("format: parquet", "format: parket", 22, ["'parket'", "Did you mean 'parquet'"]),
    "a number where a text belongs": ("path: landing", "path: 17", 7, ["must be a text, not 17"]),
    "a list where a mapping belongs": ("steps:\n", "spark: [1]\nsteps:\n", 12, ["spark", "mapping"]),
    "a mapping where a list belongs": (
        "[order_id, customer_id, city, amount * 2 AS twice]",
        "{a: b}",
        20,
        ["must be a list"],
    ),
    "a budget that is no amount": ("budget: 16MB", "budget: lots", 18, ["steps[0].enrich.budget", "lots"]),
    "a budget of an unknown unit": ("budget: 16MB", "budget: 16 MX", 18, ["16 MX"]),
    "a negative budget": ("budget: 16MB", "budget: -5", 18, ["budget"]),
    "a delay that is no span": ("max_delay: 5 seconds", "max_delay: soon", 19, ["'soon' is not a duration"]),
    "a trigger that is no span": ("trigger: 5 seconds", "trigger: often", 3, ["'often' is not a duration"]),
    "a join type that is not known": ("how: left", "how: lft", 17, ["'lft' is not known", "Did you mean 'left'"]),
    "a relation that is not declared": (
        "relation: customers",
        "relation: custmers",
        15,
        ["no relation 'custmers'", "'customers'"],
    ),
    "a relation that is not there": ("path: customers", "path: customer", 11, ["no relation at", "'customers'"]),
    "a source that is not there": ("path: landing", "path: lannding", 7, ["does not exist", "'landing'"]),
    "a source that is a Delta table": ("path: landing", "path: lake", 7, ["is a Delta table", "Export"]),
    "a column that is not there": (
        "on: customer_id",
        "on: custmer_id",
        16,
        ["no column 'custmer_id'", "'customer_id'"],
    ),
    "a selected column that is not there": (
        "[order_id, customer",
        "[ordr_id, customer",
        20,
        ["no column 'ordr_id'", "'order_id'"],
    ),
    "a relation's column that is not there": (
        "how: left",
        "select: [town]",
        17,
        ["no column 'town' in relation 'customers'"],
    ),
    "a key of two columns for a key of one": (
        "on: customer_id",
        "on: [customer_id, order_id]",
        16,
        ["2 columns are named"],
    ),
    "no key and no condition": (
        "on: customer_id\n      how: left",
        "on: []\n      select: city",
        16,
        ["key columns, a condition, or both", "condition:"],
    ),
    "no key and unmatched rows": (
        "on: customer_id",
        "condition: amount < credit\n      on: []\n      select: city",
        19,
        ["how='left' needs key columns", "inner"],
    ),
    "no key for a strategy that needs one": (
        "on: customer_id\n      how: left",
        "on: []\n      select: city\n      condition: amount < credit\n      strategy: hybrid",
        19,
        ["hybrid joins on equal keys only", "mesh"],
    ),
    "no key for rows that may come late": (
        "  - select:",
        "  - wait_for: {relation: customers, on: [], select: city, deadline: 1 day}\n  - select:",
        20,
        ["wait_for joins on equal keys", "Name the key"],
    ),
    "a strategy that is not known": ("how: left", "strategy: hash", 17, ["'hash' is not known", "mesh", "lookup"]),
    "an objective without a meaning": (
        "how: left",
        "strategy: hybrid\n      objective: memory",
        18,
        ['objective="memory" has no meaning', "hybrid", "balanced"],
    ),
    "a rate without the objective that it belongs to": (
        "how: left",
        "rate: 5000",
        17,
        ["enrich.rate", "objective", "memory"],
    ),
    "a rate for a strategy without one": (
        "how: left",
        "objective: memory\n      rate: 50",
        18,
        ["enrich.rate", "no meaning for strategy='auto'", "mesh or balanced"],
    ),
    "a rate of nothing": ("how: left", "objective: memory\n      rate: 0", 18, ["enrich.rate", "greater than 0"]),
    "a rate that is none": ("how: left", "objective: memory\n      rate: fast", 18, ["enrich.rate", "number"]),
    "a way of shedding that is not known": ("how: left", "shed: newest", 17, ["'newest' is not known", "oldest"]),
    "shedding where no tuple waits": ("max_delay: 5 seconds", "shed: oldest", 19, ["without max_delay", "mesh"]),
    "shedding by lookups": ("how: left", "strategy: lookup\n      shed: random", 18, ["no tuple waits", "hybrid"]),
    "a place for dropped rows when none is dropped": ("how: left", "shed_to: {path: shed}", 17, ["shed_to", "shed="]),
    "dropped rows in the sink's place": (
        "how: left",
        "shed: oldest\n      shed_to: {path: warehouse}",
        18,
        ["is also sink.path"],
    ),
    "a column that both sides have": (
        "customer_id bigint, amount",
        "customer_id bigint, city string, amount",
        14,
        ["both have a column 'city'"],
    ),
    "a type that is not known": ("amount double", "amount dubble", 8, ["'dubble'", "Did you mean 'double'"]),
    "a schema that is none": ("schema: order_id bigint, ", "schema: order_id, ", 8, ["not a name and a type"]),
    "no schema of JSON files": (SCHEMA, "", 5, ["needs schema"]),
    "steps in a circle": (
        "  - select:",
        "  - from: second\n    name: second\n    select:",
        20,
        ["form a cycle", "second"],
    ),
    "a step from nowhere": ("    enrich:\n", "    from: nowhere\n    enrich:\n", 14, ["no source or step 'nowhere'"]),
    "a branch": ("  - select:", "  - {from: orders, where: amount > 1}\n  - select:", 20, ["used by two steps"]),
    "a variable that is not set": ("path: landing", "path: ${DOVETAIL_NOT_SET}", 7, ["no variable DOVETAIL_NOT_SET"]),
    "a key that is given twice": ("trigger: 5 seconds", "name: again", 3, ["given twice", "line 1"]),
    "not YAML": ("steps:\n", "steps: [\n", 13, ["not YAML"]),
    "a checkpoint that is the sink": ("path: warehouse", "path: checkpoint", 23, ["is also checkpoint"]),
    "a checkpoint that is a file": ("checkpoint: checkpoint", "checkpoint: note.txt", 2, ["is a file"]),
    "a password in the file": (SINK, POSTGRES + "  password: hunter2\n", 28, ["must not be in the file"]),
    "a secret by substitution": ("path: landing", "path: ${MY_PASSWORD}", 7, ["would put a secret into plain text"]),
    "a password that is not set": (
        SINK,
        POSTGRES + "  password: {env: DOVETAIL_NO_SUCH}\n",
        28,
        ["no variable DOVETAIL_NO_SUCH"],
    ),
    "a database that does not answer": (SINK, POSTGRES, 21, ["PostgreSQL at 127.0.0.1:1", "Check host, port"]),
    "a table key that is not put out": (SINK, POSTGRES + "  key: [order]\n", 28, ["no column 'order'", "'order_id'"]),
    "a broker that does not answer": (SINK, KAFKA, 23, ["No Kafka broker responds at 127.0.0.1:1", "Check servers"]),
    "a broker without a port that does not answer": (
        SINK,
        KAFKA.replace(":1\n", "\n"),
        23,
        ["'127.0.0.1' is not a broker address"],
    ),
    "expired rows in the sink's place": (
        "  - select:",
        "  - wait_for: {relation: customers, select: customer_id, deadline: 1 day, expired: {path: warehouse}}\n"
        "  - select:",
        20,
        ["is also sink.path"],
    ),
    "XML without a row's element": ("format: json", "format: xml", 5, ["row_tag"]),
    "dead letters without a place": (
        "    path: landing\n",
        "    path: landing\n    malformed: dead-letter\n",
        5,
        ["dead_letter"],
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "landing").mkdir()
    (tmp_path / "lake" / "_delta_log").mkdir(parents=True)
    (tmp_path / "note.txt").write_text("a file")
    rows = pa.table({"customer_id": [1, 2], "city": ["Rome", "Oslo"]})
    dt.Relation.build(rows, tmp_path / "customers", on="customer_id", shards=2)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong must be known before Spark starts."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started for a broken file.")

    monkeypatch.setattr(session, "spark_session", refuse)
    monkeypatch.setenv("MY_PASSWORD", "hunter2")


def test_the_file_that_the_others_are_made_from_is_all_right(run_here: Run, project: Path) -> None:
    (project / "p.yaml").write_text(GOOD)
    shown = run_here("check", "p.yaml", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert shown.document["steps"] == ["enrich", "select"]
    assert shown.document["columns"] == ["order_id", "customer_id", "city", "twice"]
    assert len(BROKEN) >= 40


@pytest.mark.parametrize("what", BROKEN)
def test_broken_file_is_one_message_with_its_line(run_here: Run, project: Path, what: str) -> None:
    command = ("check", "run", "explain")[list(BROKEN).index(what) % 3 if "answer" not in what else 0]
    old, new, line, told = BROKEN[what]
    assert GOOD.count(old) == 1, "the good file has changed"
    (project / "p.yaml").write_text(GOOD.replace(old, new))
    shown = run_here(command, "p.yaml")
    assert (shown.code, shown.out) == (2, ""), shown.err
    message = shown.err.splitlines()[0]
    assert message.startswith(f"Error: p.yaml:{line}: "), shown.err
    for part in told:
        assert part in shown.err
    assert len(shown.err.splitlines()) == 1, "one mistake is one message"
    assert "Traceback" not in shown.err
    assert "hunter2" not in shown.err
    assert not (project / "checkpoint" / "dovetail").exists(), "a flow was begun"


def test_all_mistakes_of_a_file_are_told_at_once(run_here: Run, project: Path) -> None:
    (project / "p.yaml").write_text(GOOD.replace("how: left", "how: lft").replace("trigger:", "triger:"))
    shown = run_here("check", "p.yaml", "--json")
    assert shown.code == 2
    first, second = shown.error["message"].splitlines()
    assert first.startswith("p.yaml:3: triger:")
    assert second.startswith("p.yaml:17: steps[0].enrich.how:")


def test_file_that_cannot_be_read_is_a_message(run_here: Run, project: Path) -> None:
    (project / "binary.yaml").write_bytes(bytes(range(256)))
    (project / "empty.yaml").write_text("")
    (project / "huge.yaml").write_text("a" * (1 << 21))
    for name, told in {
        "nowhere.yaml": "No such file",
        "binary.yaml": "not UTF-8 text",
        "empty.yaml": "empty",
        "huge.yaml": "too large for a pipeline file",
        "landing": "Is a directory",
    }.items():
        shown = run_here("check", name)
        assert (shown.code, shown.out) == (2, "")
        assert told in shown.err, shown.err


def test_variables_stand_for_the_environment(run_here: Run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD.replace("path: landing", "path: ${PLACE}/landing").replace(
        "5 seconds\nsources", "${EVERY:-2 seconds}\nsources"
    )
    (project / "p.yaml").write_text(text)
    monkeypatch.setenv("PLACE", str(project))
    assert run_here("check", "p.yaml").code == 0


def test_paths_are_relative_to_the_file(run_here: Run, tmp_path: Path) -> None:
    write_starter(tmp_path / "deep" / "shop")
    shown = run_here("check", "deep/shop/pipeline.yaml")
    assert (shown.code, shown.err) == (0, "")
    assert "orders -> where -> enrich -> with -> parquet" in shown.out


def test_columns_of_parquet_files_are_known_without_a_schema(run_here: Run, project: Path) -> None:
    pq.write_table(pa.table({"order_id": [1], "customer_id": [2]}), project / "landing" / "a.parquet")
    text = GOOD.replace(SCHEMA, "")
    (project / "p.yaml").write_text(
        text.replace("format: json", "format: parquet").replace("amount * 2 AS twice", "amunt")
    )
    shown = run_here("check", "p.yaml")
    assert shown.code == 2
    assert "no column 'amunt'" in shown.err


def test_schema_for_editors_names_every_key(run_here: Run) -> None:
    shown = run_here("schema")
    assert shown.code == 0
    assert shown.document["properties"]["trigger"]["description"]
    assert "EnrichModel" in shown.document["$defs"]


def test_init_refuses_a_directory_with_something_in_it(run_here: Run, project: Path) -> None:
    shown = run_here("init", ".")
    assert (shown.code, shown.out) == (2, "")
    assert "not empty" in shown.err


def test_status_of_something_else_is_exit_code_3(run_here: Run, project: Path) -> None:
    shown = run_here("status", "landing")
    assert shown.code == 3
    assert "not the checkpoint of a flow" in shown.err
