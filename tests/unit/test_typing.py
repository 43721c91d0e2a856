"""What mypy says about code of users: a misspelt option is found before anything runs."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
CODE = """\
import dovetail as dt
from pyspark.sql import DataFrame

def joined(orders: DataFrame) -> None:
    dt.enrich(orders, "customers", on="customer_id", how="lefft")
    dt.enrich(orders, "customers", on="customer_id", how="left", strategy="ballanced")
    dt.stream(orders, "orders").enrich("customers", on="customer_id", refresh="bach")
    dt.enrich(orders, "customers", on="customer_id", how="left", strategy="balanced")
    dt.pipeline("pipeline.yaml").start(trigger="5 seconds")
    dt.pipeline("pipeline.yaml").start(triger="5 seconds")
"""


def test_misspelt_options_are_found_by_mypy(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(CODE)
    # The cache of `make lint`, if there is one: without it, all of Dovetail is checked first.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(PROJECT / "pyproject.toml"),
        str(tmp_path / "user.py"),
    ]
    finished = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    lines = [line.partition("user.py:")[2] for line in finished.stdout.splitlines() if "error:" in line]
    assert [line.partition(":")[0] for line in lines] == ["5", "6", "7", "10"], finished.stdout
    for line, word in zip(lines, ("lefft", "ballanced", "bach", "triger"), strict=True):
        assert word in line
