"""The examples run as the README says, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_relation_demo_shows_old_and_new_rows_and_leaves_nothing_behind(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "relation_demo.py"), "--rows", "1000"],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    now, at_first = finished.stdout.split("The same at the first version")
    assert "premium" in now
    assert "premium" not in at_first
    assert "999" in at_first
    assert list(tmp_path.glob("dovetail-demo-*")) == []
