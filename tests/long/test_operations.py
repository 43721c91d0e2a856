"""Every command of docs/operations.md, run in order in one directory: each does what the page says."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from dovetail.testing.flows import published_rows

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
BLOCK = re.compile(r"```sh( refused)?\n(.*?)```\n(?:\n```text\n(.*?)\n```)?", re.DOTALL)
SPARK = (
    "--master local[1] --conf spark.driver.memory=512m "
    "--conf 'spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC'"
)


def run(line: str, where: Path) -> "subprocess.CompletedProcess[str]":
    """Run a line of the page, with the command of this checkout."""
    command = f"{sys.executable} -m dovetail.cli.main"
    text = re.sub(
        r"^dovetail run (.*)", rf"{command} run \1 {SPARK}", re.sub(r"^dovetail (?!run)", f"{command} ", line)
    )
    return subprocess.run(
        text, shell=True, cwd=where, env=dict(os.environ), capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=600, check=False,
    )  # fmt: skip


def orders(where: Path) -> Counter[int]:
    return Counter(row["order_id"] for row in published_rows(where / "shop" / "warehouse" / "orders"))


def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert sum(bool(refused) for refused, _, _ in blocks) == 1
    once: Counter[int] = Counter()
    times: list[int] = []
    for refused, lines, told in blocks:
        for line in lines.splitlines():
            before = orders(tmp_path)
            finished = run(line, tmp_path)
            if refused:
                assert finished.returncode == 3, f"{line}: {finished.stderr}"
                assert told in " ".join(finished.stderr.split()), finished.stderr
                assert orders(tmp_path) == before, "a refused start changed the target"
                continue
            assert finished.returncode == 0, f"{line}: {finished.stderr}"
            if line.startswith("dovetail run"):
                once = once or orders(tmp_path)
                files = len(list((tmp_path / "shop" / "landing").iterdir()))
                assert orders(tmp_path) == Counter({order: n * files for order, n in once.items()}), line
                times.append(files)
    assert once, "the project has orders"
    assert times == [1, 2, 2, 3, 3, 4]
