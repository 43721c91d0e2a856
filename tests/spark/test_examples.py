"""The examples run as the README says, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo_gives_the_rows_of_sparks_join_and_leaves_nothing_behind(tmp_path: Path) -> None:
    sizes = ["--customers", "1000", "--orders", "200", "--batches", "2"]
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "enrich_demo.py"), *sizes],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Both gave 400 rows" in finished.stdout
    assert "the same rows, by count and by digest" in finished.stdout
    assert list(tmp_path.glob("dovetail-demo-*")) == []
