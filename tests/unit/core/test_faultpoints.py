"""A fault point does nothing unless armed, and then leaves no chance to tidy up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.core.faultpoints import FAULT_ORDERS_VARIABLE, FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE

PROGRAM = """
import sys
from dovetail.core.faultpoints import fault_point
try:
    for name in ("start", "middle", "middle", "end"):
        fault_point(name)
        print(name, flush=True)
finally:
    print("tidied up", flush=True)
"""


def _run(**variables: str) -> subprocess.CompletedProcess[str]:
    disarmed = (FAULT_ORDERS_VARIABLE, FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE)
    clean = {k: v for k, v in os.environ.items() if k not in disarmed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | variables, capture_output=True, text=True, check=False
    )


def test_unarmed_points_do_nothing() -> None:
    ended = _run()
    assert ended.returncode == 0
    assert ended.stdout.split("\n")[:5] == ["start", "middle", "middle", "end", "tidied up"]


@pytest.mark.parametrize(
    ("armed", "printed"),
    [
        ("start", []),
        ("middle", ["start"]),
        ("middle:2", ["start", "middle"]),
        ("end:1", ["start", *["middle"] * 2]),
    ],
)
def test_armed_point_kills_at_its_passage_without_cleanup(armed: str, printed: list[str]) -> None:
    ended = _run(**{FAULT_POINT_VARIABLE: armed})
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == printed


@pytest.mark.parametrize("armed", ["elsewhere", "middle:3"])
def test_point_that_is_not_reached_kills_nothing(armed: str) -> None:
    ended = _run(**{FAULT_POINT_VARIABLE: armed})
    assert ended.returncode == 0


def test_order_kills_one_process_and_says_which(tmp_path: Path) -> None:
    (tmp_path / "middle").touch()
    ends = [_run(**{FAULT_ORDERS_VARIABLE: str(tmp_path)}) for _ in range(2)]
    assert [ended.returncode for ended in ends] == [-signal.SIGKILL, 0]
    assert ends[0].stdout.split() == ["start"]
    (taken,) = tmp_path.glob("middle:*")
    lines = [line.split() for line in (tmp_path / "passed").read_text().splitlines()]
    assert [name for name, _ in lines] == ["start", "middle", "start", "middle", "end"]
    assert taken.name == f"middle:{lines[0][1]}"
    assert len({pid for _, pid in lines}) == 2


def test_trace_lists_every_passage_in_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ended = _run(**{FAULT_TRACE_VARIABLE: str(trace)})
    assert ended.returncode == 0
    assert trace.read_text().split() == ["start", "middle", "middle", "end"]


def test_trace_and_kill_together_end_with_the_deadly_passage(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ended = _run(**{FAULT_TRACE_VARIABLE: str(trace), FAULT_POINT_VARIABLE: "middle:2"})
    assert ended.returncode == -signal.SIGKILL
    assert trace.read_text().split() == ["start", "middle", "middle"]


@pytest.mark.parametrize("armed", ["middle:0", "middle:x", "middle:-1"])
def test_malformed_passage_is_refused_rather_than_ignored(armed: str) -> None:
    ended = _run(**{FAULT_POINT_VARIABLE: armed})
    assert ended.returncode == 1
    assert "must be an integer from 1" in ended.stderr
