"""The real ``dovetail run`` in a process of its own, on a terminal: progress, Ctrl-C, and going on."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail.pipeline.starter import write_starter
from dovetail.testing.flows import published_rows

COMMAND = [sys.executable, "-m", "dovetail.cli.main"]
SPARK = [
    *("--master", "local[1]"),
    *("--conf", "spark.driver.memory=512m"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
]
PATIENCE_S = 300.0


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The starter project, running until it is stopped."""
    write_starter(tmp_path)
    file = tmp_path / "pipeline.yaml"
    file.write_text(file.read_text().replace("trigger: available-now", "trigger: 200 ms"))
    return tmp_path


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[str]", what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < give_up_at, f"waited in vain for {what}"
        time.sleep(0.05)


def start(shop: Path, stderr: int) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return subprocess.Popen(
        [*COMMAND, "run", "pipeline.yaml", *SPARK],
        cwd=shop,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**environment, "TERM": "xterm"},
        text=True,
        start_new_session=True,
    )


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


def status(shop: Path) -> dict[str, object]:
    shown = subprocess.run([*COMMAND, "status", "pipeline.yaml", "--json"], cwd=shop, capture_output=True, check=True)
    return dict(json.loads(shown.stdout))


def test_ctrl_c_stops_a_run_that_shows_progress_and_the_next_one_goes_on(shop: Path) -> None:
    terminal, stderr = pty.openpty()
    process = start(shop, stderr)
    os.close(stderr)
    # Read as it is written: a terminal that nobody reads is full after a few screens, and its writer waits.
    with ThreadPoolExecutor(1) as reader:
        screen = reader.submit(read_all, terminal)
        first_run(shop, process)
    shown = screen.result()
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, ""), shown
    assert "1-enrich" in shown
    assert "Ctrl-C stops it" in shown
    assert "nothing is lost. Resume with: dovetail run pipeline.yaml" in shown
    assert "Traceback" not in shown
    assert status(shop)["running"] is None
    (shop / "landing" / "orders-2.json").write_text('{"order_id": 200, "customer_id": 2, "amount": 1.0}\n')
    process = start(shop, subprocess.PIPE)
    wait_until(lambda: len(published_rows(shop / "warehouse" / "orders")) == 4, process, "the new row")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    lines = err.splitlines()
    assert lines[:2] == ["Starting Spark", "Planning"], "a line per stage where there is no terminal"
    assert lines[2].startswith("batch=")
    assert "\x1b" not in err
    assert lines[-1].endswith("Resume with: dovetail run pipeline.yaml")
    assert sorted(row["order_id"] for row in published_rows(shop / "warehouse" / "orders")) == [100, 101, 102, 200]


def first_run(shop: Path, process: "subprocess.Popen[str]") -> None:
    """While it runs: what is seen of it, and that it is alone; then Ctrl-C. It is ended in any case."""
    try:
        watch(shop, process)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def watch(shop: Path, process: "subprocess.Popen[str]") -> None:
    wait_until(lambda: len(published_rows(shop / "warehouse" / "orders")) == 3, process, "the first rows")
    running = status(shop)["running"]
    assert isinstance(running, dict)
    assert running["pid"] == process.pid
    second = subprocess.run([*COMMAND, "run", "pipeline.yaml"], cwd=shop, capture_output=True, text=True, check=False)
    assert second.returncode == 3
    assert f"Process {process.pid}" in second.stderr
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
