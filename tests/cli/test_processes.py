"""The real command with a Spark of its own. Every test starts one, so each looks at several things."""

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail as dt

Run = Callable[..., Any]
Rows = Callable[..., pa.Table]
# A JVM that does not optimise starts in half the time.
SPARK = [
    *("--master", "local[1]"),
    *("--conf", "spark.driver.memory=512m"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
    *("--conf", "spark.sql.codegen.wholeStage=false"),
]


@pytest.fixture
def source(tmp_path: Path, customers: Rows) -> Path:
    pq.write_table(customers(0, 1000), tmp_path / "customers.parquet")
    return tmp_path / "customers.parquet"


def read_all(terminal: int) -> str:
    """Everything that was written to a pseudo terminal, until its last writer closed it."""
    chunks = []
    while True:
        try:
            chunk = os.read(terminal, 65_536)
        except OSError:  # Linux reports the end of a pseudo terminal as an error
            chunk = b""
        if not chunk:
            return b"".join(chunks).decode()
        chunks.append(chunk)


def test_build_shows_progress_on_a_terminal_and_the_result_on_standard_output(
    command: list[str], environment: Callable[..., dict[str, str]], tmp_path: Path, source: Path
) -> None:
    terminal, stderr = pty.openpty()
    build = [*command, "relation", "build", "r", str(source), "--on", "id", "--shards", "2", *SPARK]
    with subprocess.Popen(
        build, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, env=environment(TERM="xterm"), text=True
    ) as process:
        os.close(stderr)
        shown = read_all(terminal)
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0, shown
    assert "Starting Spark" in shown
    assert "Writing" in shown
    assert "2/2" in shown, "the bar did not reach its end"
    assert "\x1b[2K" in shown, "the bar was left behind"
    assert "WARN" not in shown
    assert out.splitlines()[0] == f"Built {tmp_path}/r: version 1"
    assert "\x1b" not in out
    assert dt.Relation.open(tmp_path / "r").stats.rows == 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["customers.parquet", "r"], "Spark left files behind"


def test_upsert_as_json_is_one_document_and_silent_otherwise(run: Run, relation: dt.Relation, source: Path) -> None:
    shown = run("relation", "upsert", relation.path, source, "--json", *SPARK)
    assert (shown.code, shown.err) == (0, "")
    assert (shown.document["version"], shown.document["rows_before"], shown.document["rows"]) == (4, 148, 1000)


def test_malformed_source_is_one_clear_line_without_java(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("id,city\n1,Rome\n2,Oslo,extra\n")
    shown = run("relation", "build", "r", "bad.csv", "--on", "id", "--option", "header=true", *SPARK)
    assert (shown.code, shown.out) == (2, "")
    error, hint = shown.err.splitlines()
    assert error.startswith("Error: ")
    assert "2,Oslo,extra" in error
    assert hint.startswith("Hint: ")
    assert not list(tmp_path.rglob("versions/*.json"))


def test_spark_that_cannot_start_is_exit_code_2(run: Run, source: Path, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no-java")
    shown = run("relation", "build", "r", source, "--on", "id", "--json", PATH="/usr/bin:/bin", JAVA_HOME=nowhere)
    assert (shown.code, shown.err, shown.error["class"]) == (2, "", "SparkStartError")
    assert "Java" in shown.error["hint"]


def processes_of(directory: Path) -> list[str]:
    """The command lines of all processes that work in a directory."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink() == directory:
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended, or is not ours to look at
            continue
    return found


@pytest.fixture
def interrupted_build(
    command: list[str], environment: Callable[..., dict[str, str]], tmp_path: Path, source: Path
) -> Callable[[Callable[[], bool]], tuple[int, str, str]]:
    """Press Ctrl-C in a build as soon as a condition holds; gives exit code, output and messages."""

    def interrupt_when(is_time: Callable[[], bool]) -> tuple[int, str, str]:
        build = [*command, "relation", "build", "r", str(source), "--on", "id", *SPARK]
        with subprocess.Popen(
            build,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
            start_new_session=True,
        ) as process:
            while not is_time():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group, Spark's processes included
            out, err = process.communicate()
        return process.returncode, out, err

    return interrupt_when


def test_ctrl_c_ends_a_build_cleanly_and_commits_nothing(interrupted_build: Run, tmp_path: Path, source: Path) -> None:
    # The lock is taken right before the job; the job then has to start Python workers, which takes far longer than it
    # takes to notice the lock.
    code, out, err = interrupted_build((tmp_path / "r" / "writer.lock").exists)
    assert (code, out, err) == (130, "", "Interrupted: nothing was committed, r has no version yet.\n")
    assert not list((tmp_path / "r" / "versions").glob("*.json"))
    assert processes_of(tmp_path) == []
    table = pq.read_table(source)
    assert dt.Relation.build(table, tmp_path / "r", on="id").version == 1, "the path is not usable afterwards"


def test_ctrl_c_while_spark_starts_leaves_no_process_behind(interrupted_build: Run, tmp_path: Path) -> None:
    code, out, err = interrupted_build(lambda: any("SparkSubmit" in line for line in processes_of(tmp_path)))
    assert (code, out, err) == (130, "", "Interrupted: nothing was committed, r has no version yet.\n")
    assert processes_of(tmp_path) == []
