"""The harness kills where it says, notices when it did not, and leaves no process behind."""

import subprocess
import time
from pathlib import Path

import pytest

from dovetail.core.faultpoints import FAULT_POINT_VARIABLE
from dovetail.testing.faults import (
    Passage,
    passages_of,
    python_program,
    random_moments,
    run_killed_after,
    run_killed_at,
    run_unharmed,
)

WRITER = """
import sys
from pathlib import Path
from dovetail.core.faultpoints import fault_point
target = Path(sys.argv[1])
for name in ("first", "second", "first"):
    fault_point("writer." + name)
    with target.open("a") as file:
        file.write(name + " ")
"""


def test_every_passage_is_found_and_killed_at(tmp_path: Path) -> None:
    passages = passages_of(python_program(WRITER, str(tmp_path / "whole")))
    assert passages == [Passage("writer.first", 1), Passage("writer.second", 1), Passage("writer.first", 2)]
    for done, passage in enumerate(passages):
        target = tmp_path / f"killed-{done}"
        assert run_killed_at(python_program(WRITER, str(target)), passage).was_killed
        left = target.read_text().split() if target.exists() else []
        assert left == ["first", "second"][:done]


def test_program_that_passes_no_point_has_no_passages() -> None:
    assert passages_of(python_program("pass")) == []


def test_point_that_is_not_passed_is_an_error_not_a_success(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"died at writer.first:3, but ended with 0"):
        run_killed_at(python_program(WRITER, str(tmp_path / "t")), Passage("writer.first", 3))


@pytest.mark.parametrize("run", [run_unharmed, passages_of, lambda command: run_killed_after(command, 60)])
def test_program_that_fails_by_itself_is_an_error_with_its_output(run: object) -> None:
    with pytest.raises(AssertionError, match=r"failed by itself with 3(.|\n)*out of luck"):
        run(python_program("import sys; print('out of luck'); sys.exit(3)"))  # type: ignore[operator]


def test_points_armed_for_this_process_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_POINT_VARIABLE, "writer.first")
    assert run_unharmed(python_program(WRITER, str(tmp_path / "t"))).returncode == 0
    assert len(passages_of(python_program(WRITER, str(tmp_path / "u")))) == 3


def test_given_variables_reach_the_program() -> None:
    program = python_program("import os; print(os.environ['COLOUR'])")
    assert run_unharmed(program, env={"COLOUR": "red"}).stdout == "red\n"


def test_killed_after_a_time_keeps_what_was_printed() -> None:
    ended = run_killed_after(python_program("import time; print('begun', flush=True); time.sleep(600)"), delay_s=2)
    assert ended.was_killed
    assert ended.stdout in ("begun\n", "")


def test_program_done_before_its_time_was_not_killed() -> None:
    ended = run_killed_after(python_program("print('done')"), delay_s=60)
    assert not ended.was_killed
    assert ended.stdout == "done\n"


def test_children_die_with_the_program() -> None:
    parent = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
from dovetail.core.faultpoints import fault_point
fault_point("parent.after_fork")
"""
    ended = run_killed_at(python_program(parent), Passage("parent.after_fork", 1))
    child_stat = Path(f"/proc/{int(ended.stdout)}/stat")
    for _ in range(600):
        # Gone, or dead and waiting for somebody to collect it.
        if not child_stat.exists() or child_stat.read_text().split(") ")[1].startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail("The child outlived the program.")


def test_program_that_hangs_is_stopped_at_the_timeout() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_unharmed(python_program("import time; time.sleep(600)"), timeout_s=0.2)


def test_moments_are_repeatable_and_spare_no_part_of_the_run() -> None:
    moments = random_moments(seed=5, rounds=50, up_to_s=10.0)
    assert moments == random_moments(seed=5, rounds=50, up_to_s=10.0)
    assert [int(moment * 5) for moment in moments] == list(range(50))
