"""``info``, ``versions`` and ``vacuum``: the commands that need no Spark."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dovetail as dt

Run = Callable[..., Any]
Rows = Callable[..., pa.Table]

# Runs a command in a process where importing Spark is an error, and tells which of the heavy packages it imported.
WITHOUT_SPARK = """
import sys
sys.modules["pyspark"] = None
from dovetail.cli.main import main
code = main(sys.argv[1:])
print(sorted({"numba", "numpy", "pandas", "pyarrow"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def run_without_spark(environment: Callable[..., dict[str, str]]) -> Run:
    def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
        started = [sys.executable, "-c", WITHOUT_SPARK, *map(str, arguments)]
        return subprocess.run(started, capture_output=True, text=True, check=False, env=environment())

    return run_command


def test_info_as_json_tells_what_the_relation_knows(run: Run, relation: dt.Relation) -> None:
    shown = run("relation", "info", relation.path, "--json")
    assert (shown.code, shown.err) == (0, "")
    document = shown.document
    assert document["path"] == relation.path
    assert (document["version"], document["parent"], document["operation"]) == (3, 2, "delete")
    assert document["key"] == {"columns": ["id"], "code": "value", "declared_unique": False}
    assert (document["rows"], document["distinct_codes"], document["max_multiplicity"]) == (148, 148, 1)
    assert (document["is_unique"], document["null_key_rows"], document["shards"]) == (True, 0, 4)
    assert document["bytes"] == relation.stats.bytes
    assert document["index_bytes"] == relation.index_bytes > 0
    assert [column["name"] for column in document["schema"]] == ["id", "city", "tags"]
    assert document["schema"][0] == {"name": "id", "type": "int64", "nullable": True}
    assert "shards_detail" not in document


def test_info_as_json_with_shards_adds_up(run_here: Run, relation: dt.Relation) -> None:
    document = run_here("relation", "info", relation.path, "--shards-detail", "--json").document
    assert [shard["shard"] for shard in document["shards_detail"]] == [0, 1, 2, 3]
    assert sum(shard["rows"] for shard in document["shards_detail"]) == document["rows"]


def test_info_as_text_is_tidy(run: Run, relation: dt.Relation) -> None:
    shown = run("relation", "info", relation.path, "--shards-detail")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0] == f"Relation {relation.path}"
    assert any(line.split() == ["rows", "148"] for line in lines)
    assert any(line.split()[:2] == ["key", "id:"] for line in lines)
    assert any(line.split()[:2] == ["city", "string"] for line in lines)
    assert all(len(line) <= 80 for line in lines[1:]), "a line is wider than a terminal"
    assert "\x1b" not in shown.out


def test_info_of_an_older_version(run_here: Run, relation: dt.Relation) -> None:
    document = run_here("relation", "info", relation.path, "--version", 1, "--json").document
    assert (document["version"], document["rows"], document["operation"]) == (1, 100, "build")


def test_long_names_and_nested_types_are_folded_not_cut(run_here: Run, tmp_path: Path) -> None:
    name = "a_rather_long_name_of_a_column_" * 4
    table = pa.table({"id": [1], name: pa.array([[{"x": 1, "y": "z"}]])})
    dt.Relation.build(table, tmp_path / "wide", on="id", shards=1)
    shown = run_here("relation", "info", "wide")
    assert all(len(line) <= 80 for line in shown.out.splitlines()[1:])
    assert name in "".join(line.split()[0] for line in shown.out.splitlines() if "a_rather" in line or "_col" in line)


def test_brackets_in_names_are_shown_as_they_are(run_here: Run, tmp_path: Path) -> None:
    dt.Relation.build(pa.table({"[bold]id": [1]}), tmp_path / "odd [1]", on="[bold]id", shards=1)
    shown = run_here("relation", "info", "odd [1]")
    assert "[bold]id" in shown.out
    assert "odd [1]" in shown.out


@pytest.mark.parametrize(
    ("changes", "is_coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colours_only_where_wanted(
    run_here: Run, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], is_coloured: bool
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[1;31m" in run_here("relation", "versions", "nowhere").err) is is_coloured


def test_versions_as_json(run: Run, relation: dt.Relation) -> None:
    document = run("relation", "versions", relation.path, "--json").document
    assert document["path"] == relation.path
    assert [(v["version"], v["parent"], v["operation"], v["rows"]) for v in document["versions"]] == [
        (1, None, "build", 100),
        (2, 1, "upsert", 150),
        (3, 2, "delete", 148),
    ]
    assert all(v["bytes"] > 0 and v["created_at"].endswith("+00:00") for v in document["versions"])


def test_versions_as_text(run: Run, relation: dt.Relation) -> None:
    lines = run("relation", "versions", relation.path).out.splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["1", "build", "-"], ["2", "upsert", "1"], ["3", "delete", "2"]]


def test_vacuum_says_what_there_was_and_what_there_is(run: Run, customers: Rows, tmp_path: Path) -> None:
    path = tmp_path / "r"
    for city in ("Rome", "Oslo", "Lima"):
        dt.Relation.build(customers(0, 100, city), path, on="id", shards=2, mode="overwrite")
    files = [file for file in (path / "data").rglob("*") if file.is_file()]
    document = run("relation", "vacuum", path, "--keep", 1, "--json").document
    left = [file for file in (path / "data").rglob("*") if file.is_file()]
    assert (document["before"]["versions"], document["before"]["files"]) == (3, len(files))
    assert document["after"] == {
        "versions": 1,
        "files": len(left),
        "bytes": sum(file.stat().st_size for file in left),
    }
    assert document["removed"]["versions"] == [1, 2]
    assert document["before"]["bytes"] - document["after"]["bytes"] == document["removed"]["bytes"] > 0
    assert dt.Relation.open(path).to_arrow().column("city").unique().to_pylist() == ["Lima"]


def test_vacuum_keeps_three_versions_unless_told_otherwise(
    run_here: Run, customers: Rows, relation: dt.Relation
) -> None:
    shown = run_here("relation", "vacuum", relation.upsert(customers(0, 1)).path)
    assert shown.code == 0
    assert "4 -> 3 (removed: 1)" in shown.out
    assert [version.version for version in relation.versions()] == [2, 3, 4]


@pytest.mark.parametrize("command", ["info", "versions", "vacuum"])
def test_looking_never_imports_spark(run_without_spark: Run, relation: dt.Relation, command: str) -> None:
    finished = run_without_spark("relation", command, relation.path, "--json")
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["relation", "build", "--help"], ["relation", "no"]])
def test_help_and_mistakes_import_nothing_heavy(run_without_spark: Run, arguments: list[str]) -> None:
    assert run_without_spark(*arguments).stderr.splitlines()[-1] == "[]"


# -------------------------------------------------------------------- relations that cannot be used


def test_no_relation_there_is_exit_code_3(run: Run) -> None:
    shown = run("relation", "info", "nowhere", "--json")
    assert (shown.code, shown.err) == (3, "")
    assert shown.error["class"] == "RelationNotFound"
    assert "nowhere does not exist" in shown.error["message"]


def test_error_as_text_is_on_standard_error_alone(run: Run) -> None:
    shown = run("relation", "versions", "nowhere")
    assert (shown.code, shown.out) == (3, "")
    assert shown.err.startswith("Error: ")
    assert "nowhere does not exist" in shown.err
    assert "Traceback" not in shown.err


def test_directory_that_holds_something_else_is_exit_code_3(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    shown = run_here("relation", "info", "photos", "--json")
    assert (shown.code, shown.error["class"]) == (3, "RelationNotFound")
    assert "is not a relation" in shown.error["message"]


def test_file_system_that_does_not_exist_is_exit_code_3(run_here: Run) -> None:
    shown = run_here("relation", "info", "gopher://host/r", "--json")
    assert (shown.code, shown.error["class"]) == (3, "RelationError")
    assert "gopher" in shown.error["message"]


def test_version_that_is_gone_is_exit_code_3(run_here: Run, relation: dt.Relation) -> None:
    shown = run_here("relation", "info", relation.path, "--version", 9, "--json")
    assert (shown.code, shown.error["class"]) == (3, "RelationNotFound")
    assert "no version 9" in shown.error["message"]


def test_damaged_manifest_is_exit_code_3(run_here: Run, relation: dt.Relation) -> None:
    newest = Path(relation.path) / "versions" / "00000003.json"
    newest.write_text(newest.read_text().replace('"delete"', '"append"'))
    shown = run_here("relation", "info", relation.path, "--json")
    assert (shown.code, shown.error["class"]) == (3, "RelationCorrupt")
    assert run_here("relation", "info", relation.path, "--version", 2).code == 0


def test_truncated_segment_is_exit_code_3(run_here: Run, relation: dt.Relation) -> None:
    named = relation._manifest.shards[0].segments[0].name  # older versions have segments of their own there
    segment = Path(relation.path) / "data" / "0" / f"{named}.rows"
    os.truncate(segment, segment.stat().st_size - 1)
    shown = run_here("relation", "info", relation.path)
    assert shown.code == 3
    assert segment.name in shown.err


def test_another_writer_is_exit_code_4(run_here: Run, relation: dt.Relation) -> None:
    with open(Path(relation.path) / "writer.lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = run_here("relation", "vacuum", relation.path, "--json")
    assert (busy.code, busy.error["class"]) == (4, "RelationConflict")
    assert run_here("relation", "vacuum", relation.path).code == 0


def test_erase_names_what_it_did_and_what_is_not_its_own(run_here: Run, tmp_path: Path) -> None:
    rows = pa.table({"id": [1, 2, 3], "city": ["a", "b", "c"]})
    dt.Relation.build(rows, tmp_path / "r", on="id").upsert(rows.slice(1, 1))
    shown = run_here("relation", "erase", "r", "--key", 2, "--key", "9", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert (shown.document["keys"], shown.document["rows"], shown.document["versions"]) == (2, 2, [1, 2])
    assert any("sinks" in place for place in shown.document["not_erased"])
    assert dt.Relation.open(tmp_path / "r", 1).to_arrow()["id"].to_pylist() == [1, 3]
    refused = run_here("relation", "erase", "r", "--key", "two")
    assert refused.code != 0
    assert "not of the key's type" in refused.err


def test_erase_of_a_key_of_several_columns_takes_json(run_here: Run, tmp_path: Path) -> None:
    dt.Relation.build(pa.table({"a": ["x", "x"], "b": [1, 2], "n": [1, 2]}), tmp_path / "r", on=["a", "b"])
    assert run_here("relation", "erase", "r", "--key", '["x", 2]').code == 0
    assert dt.Relation.open(tmp_path / "r").to_arrow()["b"].to_pylist() == [1]
    refused = run_here("relation", "erase", "r", "--key", "x")
    assert "write a JSON array of that many values" in refused.err
