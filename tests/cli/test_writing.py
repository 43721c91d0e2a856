"""``build``, ``append``, ``upsert`` and ``delete``, on the Spark that the tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail as dt
from dovetail.cli import relation as commands

Run = Callable[..., Any]
Rows = Callable[..., pa.Table]
pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def parquet(tmp_path: Path, customers: Rows) -> Path:
    (tmp_path / "new").mkdir()
    pq.write_table(customers(0, 30), tmp_path / "new" / "a.parquet")
    pq.write_table(customers(30, 10, "Oslo"), tmp_path / "new" / "b.parquet")
    return tmp_path / "new"


def cities(path: str | Path) -> dict[int, str]:
    rows = dt.Relation.open(path).to_arrow()
    return dict(zip(rows.column("id").to_pylist(), rows.column("city").to_pylist(), strict=True))


# -------------------------------------------------------------------- what works


def test_build_from_a_directory(run_here: Run, parquet: Path) -> None:
    shown = run_here("relation", "build", "r", parquet, "--on", "id", "--shards", 2, "--unique", "--json")
    assert (shown.code, shown.err) == (0, "")
    document = shown.document
    assert (document["operation"], document["version"], document["parent"]) == ("build", 1, None)
    assert (document["rows"], document["rows_before"], document["shards"]) == (40, None, 2)
    assert document["key"] == {"columns": ["id"], "code": "value", "declared_unique": True}
    assert dt.Relation.open("r").stats.rows == 40


def test_build_from_several_files_with_a_composite_key(run_here: Run, parquet: Path) -> None:
    files = sorted(parquet.iterdir())
    shown = run_here("relation", "build", "r", *files, "--on", "city", "--on", "id", "--shards", 1)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines()[0].endswith("/r: version 1")
    opened = dt.Relation.open("r")
    assert (opened.key, opened.stats.rows, opened.code_kind) == (("city", "id"), 40, "xxhash64")


def test_overwrite_adds_a_version(run_here: Run, relation: dt.Relation, parquet: Path) -> None:
    shown = run_here(
        "relation", "build", relation.path, parquet, "--on", "id", "--shards", 1, "--mode", "overwrite", "--json"
    )
    assert (shown.document["version"], shown.document["rows"]) == (4, 40)
    assert dt.Relation.open(relation.path, version=3).stats.rows == 148


def test_append_as_json_and_text(run_here: Run, relation: dt.Relation, parquet: Path) -> None:
    document = run_here("relation", "append", relation.path, parquet / "a.parquet", "--json").document
    assert (document["operation"], document["version"]) == ("append", 4)
    assert (document["rows_before"], document["rows"], document["max_multiplicity"]) == (148, 178, 2)
    shown = run_here("relation", "append", relation.path, parquet / "b.parquet")
    assert (shown.code, "178 -> 188" in shown.out) == (0, True)


def test_csv_takes_the_types_of_the_relation_whatever_the_order_of_its_columns(run_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "r"
    dt.Relation.build(pa.table({"id": [1, 2], "city": ["Rome", "Rome"]}), path, on="id", shards=1)
    (tmp_path / "changes.csv").write_text("city,id\nBergen,2\nLima,3\n")
    shown = run_here("relation", "upsert", path, "changes.csv", "--option", "header=true", "--json")
    assert shown.code == 0, shown.out
    assert cities(path) == {1: "Rome", 2: "Bergen", 3: "Lima"}


def test_json_lines_and_deletion_by_key(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": n, "city": "Rome"}) + "\n" for n in range(4)))
    assert run_here("relation", "build", "r", "rows.jsonl", "--on", "id", "--shards", 1).code == 0
    (tmp_path / "gone.jsonl").write_text('{"id": 1, "why": "moved"}\n{"id": 7}\n')
    document = run_here("relation", "delete", "r", "gone.jsonl", "--json").document
    assert (document["operation"], document["rows_before"], document["rows"]) == ("delete", 4, 3)
    assert set(cities("r")) == {0, 2, 3}
    (tmp_path / "gone.csv").write_text("id\n2\n")
    shown = run_here("relation", "delete", "r", "gone.csv", "--option", "header=true")
    assert (shown.code, shown.err, "3 -> 2" in shown.out) == (0, "", True)


def test_schema_names_the_columns_of_a_file_that_does_not(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("1\tRome\n2\tOslo\n")
    built = run_here("relation", "build", "r", "rows.tsv", "--on", "id", "--schema", "id bigint, city string")
    assert built.code == 0, built.err
    assert cities("r") == {1: "Rome", 2: "Oslo"}


# -------------------------------------------------------------------- requests that cannot be carried out


@pytest.fixture
def refused(run_here: Run, tmp_path: Path) -> Callable[..., Any]:
    """Run a command that must be refused; gives its exit code and error, after checking that nothing was committed."""

    def run_refused(*arguments: object) -> tuple[int, Any]:
        before = sorted(tmp_path.rglob("versions/*.json"))
        shown = run_here("relation", *arguments, "--json")
        assert sorted(tmp_path.rglob("versions/*.json")) == before
        assert shown.err == ""
        assert "\n" not in shown.error["message"]
        assert "org.apache" not in shown.error["message"]
        return shown.code, shown.error

    return run_refused


@pytest.mark.parametrize("command", ["append", "upsert", "delete"])
def test_change_of_a_relation_that_is_not_there(refused: Run, parquet: Path, command: str) -> None:
    code, error = refused(command, "nowhere", parquet)
    assert (code, error["class"]) == (3, "RelationNotFound")


def test_missing_source(refused: Run, relation: dt.Relation) -> None:
    code, error = refused("upsert", relation.path, "nowhere.parquet")
    assert (code, error["class"]) == (2, "SourceError")
    assert error["message"] == "nowhere.parquet does not exist."


def test_arguments_in_the_wrong_order_are_recognised(refused: Run, parquet: Path) -> None:
    code, error = refused("build", parquet, "r", "--on", "id")
    assert (code, error["class"]) == (2, "SourceError")
    assert "path comes first" in error["hint"]


def test_build_where_a_relation_is(refused: Run, relation: dt.Relation, parquet: Path) -> None:
    code, error = refused("build", relation.path, parquet, "--on", "id")
    assert (code, error["class"]) == (3, "RelationError")
    assert "--mode overwrite" in error["hint"]


def test_build_where_something_else_is(refused: Run, parquet: Path) -> None:
    code, error = refused("build", parquet, parquet / "a.parquet", "--on", "id")
    assert (code, error["class"]) == (3, "RelationError")


def test_key_column_that_is_not_there(refused: Run, parquet: Path) -> None:
    code, error = refused("build", "r", parquet, "--on", "customer")
    assert (code, error["class"]) == (2, "PlanError")
    assert "'customer'" in error["message"]


def test_column_that_cannot_be_a_key(refused: Run, parquet: Path) -> None:
    code, error = refused("build", "r", parquet, "--on", "tags")
    assert (code, error["class"]) == (2, "SchemaError")


def test_duplicates_of_a_key_declared_unique(refused: Run, parquet: Path) -> None:
    code, error = refused("build", "r", parquet, "--on", "city", "--unique", "--shards", "1")
    assert (code, error["class"]) == (3, "RelationError")


def test_column_of_another_type(refused: Run, relation: dt.Relation, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "keys.parquet")
    code, error = refused("delete", relation.path, "keys.parquet")
    assert (code, error["class"]) == (2, "SchemaError")
    assert "'id'" in error["message"]


def test_option_without_a_value(refused: Run, parquet: Path) -> None:
    code, error = refused("build", "r", parquet, "--on", "id", "--option", "header")
    assert (code, error["class"]) == (2, "PlanError")
    code, error = refused("build", "r", parquet, "--on", "id", "--conf", "spark.x")
    assert (code, error["class"]) == (2, "PlanError")


@pytest.mark.parametrize(
    ("name", "content", "options", "part"),
    [
        ("bad.parquet", "PAR1 not at all", [], "bad.parquet"),
        ("bad.orc", "not at all", [], "bad.orc"),
        ("bad.json", '{"id": 1}\n{"id":\n', [], "Malformed"),
        ("bad.csv", "id,city\n1,Rome\n2,Oslo,extra\n", ["--option", "header=true"], "2,Oslo,extra"),
        ("types.csv", "id,city\nx,Rome\n", ["--option", "header=true", "--schema", "id int, city string"], "x"),
        ("names.csv", "id,town\n1,Rome\n", ["--option", "header=true", "--schema", "id int, city string"], "header"),
        ("plain.csv", "id,city\n1,Rome\n", [], "_c0"),
        ("empty.csv", "", ["--option", "header=true"], "no columns"),
        ("a.csv", "id\n1\n", ["--option", "header=perhaps"], "header"),
        ("a.csv", "id\n1\n", ["--format", "cobol"], "cobol"),
        ("a.csv", "id\n1\n", ["--schema", "id bigint nonsense,"], "nonsense"),
    ],
)
def test_source_that_cannot_be_read(
    refused: Run, tmp_path: Path, name: str, content: str, options: list[str], part: str
) -> None:
    (tmp_path / name).write_text(content)
    code, error = refused("build", "r", name, "--on", "id", *options)
    assert (code, error["class"]) == (2, "SourceError")
    assert part in error["message"]


def test_value_of_another_type_in_a_change_is_named(refused: Run, tmp_path: Path) -> None:
    dt.Relation.build(pa.table({"id": [1]}), tmp_path / "r", on="id", shards=1)
    (tmp_path / "keys.csv").write_text("id\n1\ntwo\n")
    code, error = refused("delete", "r", "keys.csv", "--option", "header=true")
    assert (code, error["class"]) == (2, "SourceError")
    assert "two" in error["message"]


# -------------------------------------------------------------------- interrupts


def test_interrupt_after_the_commit_says_so(
    run_here: Run, relation: dt.Relation, parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_and_interrupt(self: dt.Relation, *_: object, **__: object) -> None:
        self.append(pq.read_table(parquet / "a.parquet"))
        raise KeyboardInterrupt

    monkeypatch.setattr(dt.Relation, "upsert", commit_and_interrupt)
    shown = run_here("relation", "upsert", relation.path, parquet)
    assert (shown.code, shown.out) == (130, "")
    assert "version 4" in shown.err
    assert "already committed" in shown.err


def test_interrupt_before_any_version_says_that_there_is_none(
    run_here: Run, parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "read_source", interrupt)
    shown = run_here("relation", "build", "r", parquet, "--on", "id")
    assert (shown.code, shown.err) == (130, "Interrupted: nothing was committed, r has no version yet.\n")
