"""The command itself: version, help, mistakes, defects."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dovetail as dt
from dovetail.cli.main import main

Run = Callable[..., Any]


def test_version(run: Run) -> None:
    shown = run("--version")
    assert (shown.code, shown.out, shown.err) == (0, f"dovetail {dt.__version__}\n", "")


def test_version_as_json(run: Run) -> None:
    assert run("--version", "--json").document == {"name": "dovetail", "version": dt.__version__}


def test_console_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("dovetail")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"dovetail {dt.__version__}\n"


def test_help_lists_commands_and_exit_codes(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0
    assert "relation" in shown.out
    assert "130 interrupted" in " ".join(shown.out.split())
    commands = run("relation", "--help").out
    assert all(name in commands for name in ("build", "info", "versions", "append", "upsert", "delete", "vacuum"))


@pytest.mark.parametrize("arguments", [[], ["relation"]])
def test_bare_command_shows_its_help(run: Run, arguments: list[str]) -> None:
    shown = run(*arguments)
    assert shown.code == 2
    assert "Usage:" in shown.out + shown.err
    assert "Error" not in shown.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["relation", "info"], "PATH"),
        (["relation", "inof", "x"], "inof"),
        (["relation", "build", "r", "x.parquet"], "--on"),
        (["relation", "build", "r", "x.parquet", "--on", "k", "--shards", "0"], "--shards"),
        (["relation", "build", "r", "x.parquet", "--on", "k", "--shards", "many"], "--shards"),
        (["relation", "build", "r", "x.parquet", "--on", "k", "--mode", "append"], "--mode"),
        (["relation", "vacuum", "r", "--keep", "0"], "--keep"),
        (["relation", "info", "r", "--colour"], "--colour"),
        (["--json", "relation", "info", "r"], "--json"),
    ],
)
def test_usage_mistake_is_exit_code_2(capfd: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    if "--json" not in arguments:
        assert (out, part in err, "Hint: See dovetail" in err) == ("", True, True)
        assert main([*arguments, "--json"]) == 2
        out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert (error["class"], part in error["message"], err) == ("UsageError", True, "")


def test_defect_is_exit_code_1_and_asks_for_a_report(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dt.Relation, "open", lambda *_: 1 // 0)
    assert main(["relation", "info", "r"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "ZeroDivisionError" in err
    assert "report" in err
    assert "Traceback" not in err
    assert main(["relation", "info", "r", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["error"]["class"] == "InternalError"


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dt.Relation, "open", lambda *_: 1 // 0)
    assert main(["relation", "info", "r", "--debug", "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["class"] == "InternalError"
    assert "Traceback" in err


def test_ctrl_c_while_looking_is_exit_code_130(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dt.Relation, "open", interrupt)
    assert main(["relation", "info", "r", "--json"]) == 130
    assert json.loads(capfd.readouterr().out)["error"]["class"] == "Interrupted"


def test_ctrl_c_before_a_command_has_begun_is_told_once(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.cli.relation.reporting", interrupt)
    shown = run_here("relation", "info", "r")
    assert (shown.code, shown.out, shown.err) == (130, "", "Interrupted.\n")
    shown = run_here("relation", "info", "r", "--json")
    assert (shown.code, shown.error["class"], shown.err) == (130, "Interrupted", "")


def test_reader_that_goes_away_is_exit_code_141(command: list[str], environment: Callable[..., dict[str, str]]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(
        [*command, "--version", "--json"], stdout=writer, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (141, b"")
