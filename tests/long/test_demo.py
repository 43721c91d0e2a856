"""The demos, small: one loads what was landed through a kill, with a report; one counts news that are over."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "retail_demo.py"


def test_demo_loads_every_order_once_and_writes_its_report(tmp_path: Path) -> None:
    report = tmp_path / "out" / "report.html"
    sizes = ["--customers", "20000", "--budget", "1MB", "--rate", "600", "--seconds", "6", "--report", str(report)]
    finished = subprocess.run(
        [sys.executable, str(DEMO), *sizes],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "0 missing, 0 repeated, 0 wrong: every order exactly once" in finished.stdout
    assert "kill -9 of Dovetail" in finished.stdout
    assert "WARN" not in finished.stdout + finished.stderr
    page = report.read_text()
    assert len(re.findall(r"<figure id=.*?<svg", page, re.DOTALL)) == 5
    for link in re.findall(r'href="([^"#]+)"', page):
        assert (report.parent / link).is_file(), link
    for anchor in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{anchor}"' in page, anchor
    numbers = json.loads((report.parent / "numbers.json").read_text())
    assert numbers["verdict"]["is_exact"] is True
    assert numbers["verdict"]["changed"] > 0
    assert numbers["moments"]["back"] > numbers["moments"]["kill"]
    assert list(tmp_path.glob("dovetail-retail-*")) == []


def test_news_demo_counts_every_access_record_and_every_item_once(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / "news" / "news_demo.py")],
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "600 accesses of 600 counted, for 60 news items, each once" in finished.stdout
    assert "rows held at the end: {'news': 0, 'access': 0}, open groups: 0" in finished.stdout
    assert list(tmp_path.glob("dovetail-news-demo-*")) == []
