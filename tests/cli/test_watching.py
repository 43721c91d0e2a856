"""``top``, ``stop``, ``ui`` and ``status --watch`` on checkpoints of flows that run elsewhere."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from dovetail.core.errors import StateError
from dovetail.storage.running import RunnerLock
from dovetail.storage.stop_request import forget_stop_request, stop_request
from dovetail.testing.checkpoints import WrittenFlow
from dovetail.testing.flows import wait_until

Run = Callable[..., Any]


@pytest.fixture
def flow(tmp_path: Path) -> WrittenFlow:
    written = WrittenFlow(tmp_path / "shop" / "checkpoint", "orders")
    written.start()
    written.run(30)
    return written


def test_top_shows_every_flow_below_the_directory(run_here: Run, flow: WrittenFlow, tmp_path: Path) -> None:
    other = WrittenFlow(tmp_path / "other", "returns")
    other.start()
    other.end(StateError("No."))
    shown = run_here("top", "--once")
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[:2] for line in shown.out.splitlines()[1:]] == [["returns", "failed"], ["orders", "killed"]]
    flows = run_here("top", "--json").document["flows"]
    assert [(one["flow"], one["batch"]) for one in flows] == [("returns", None), ("orders", 29)]


def test_top_of_a_flow_that_runs_and_of_no_flow(run_here: Run, flow: WrittenFlow, tmp_path: Path) -> None:
    lock = RunnerLock(flow.checkpoint, "query")
    (one,) = run_here("top", flow.checkpoint, "--json").document["flows"]
    lock.release()
    assert (one["state"], one["running"]["pid"]) == ("running", os.getpid())
    (tmp_path / "empty").mkdir()
    assert run_here("top", "empty").code == 3


def test_stop_waits_until_the_flow_has_ended(run_here: Run, flow: WrittenFlow) -> None:
    lock, seen, ended = RunnerLock(flow.checkpoint, "query"), [], threading.Event()

    def driver() -> None:
        wait_until(lambda: stop_request(flow.checkpoint), "the request")
        seen.append(stop_request(flow.checkpoint))
        flow.end()
        # As `dovetail run` does, whose Spark takes a while to stop.
        forget_stop_request(flow.checkpoint)
        ended.wait(0.5)
        lock.release()

    thread = threading.Thread(target=driver)
    thread.start()
    shown = run_here("stop", flow.checkpoint, "--drain", "--json")
    thread.join()
    assert (shown.code, seen[0].drain) == (0, True)
    assert shown.document == {
        "checkpoint": str(flow.checkpoint),
        "flow": "orders",
        "drained": True,
        "state": "stopped",
        "batch": 29,
        "waiting": shown.document["waiting"],
    }


def test_stop_says_that_a_flow_did_not_drain_and_runs_on(run_here: Run, flow: WrittenFlow) -> None:
    lock = RunnerLock(flow.checkpoint, "query")

    def driver() -> None:
        wait_until(lambda: stop_request(flow.checkpoint), "the request")
        flow.recorder.drain_failed(StateError("The flow did not drain."))
        forget_stop_request(flow.checkpoint)

    thread = threading.Thread(target=driver)
    thread.start()
    shown = run_here("stop", flow.checkpoint, "--drain")
    thread.join()
    lock.release()
    assert (shown.code, "did not drain" in shown.err, "--timeout" in shown.err) == (3, True, True)


def test_stop_of_a_driver_that_does_not_answer_gives_up(run_here: Run, flow: WrittenFlow) -> None:
    lock = RunnerLock(flow.checkpoint, "query")
    shown = run_here("stop", flow.checkpoint, "--timeout", "0")
    lock.release()
    assert (shown.code, "has not stopped within 0 s" in shown.err) == (3, True)


def test_stop_of_a_flow_that_does_not_run(run_here: Run, flow: WrittenFlow, tmp_path: Path) -> None:
    shown = run_here("stop", flow.checkpoint)
    assert (shown.code, "is not running" in shown.err) == (3, True)
    (tmp_path / "empty").mkdir()
    assert "is not the checkpoint of a flow" in run_here("stop", "empty").err


def document(lines: IO[str]) -> Any:
    """The next JSON document of a stream of them."""
    text = ""
    for line in lines:
        text += line
        if line == "}\n":
            return json.loads(text)
    raise AssertionError(f"The stream has ended with: {text}")


def test_watched_status_is_a_document_per_change_until_ctrl_c(
    command: list[str], environment: Callable[..., dict[str, str]], flow: WrittenFlow, tmp_path: Path
) -> None:
    watching = [*command, "status", str(flow.checkpoint), "--watch", "--every", "0.1", "--json"]
    with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()) as process:
        assert process.stdout is not None
        first, second = document(process.stdout), None
        flow.run(1)
        second = document(process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    assert (first["batch"], second["batch"], process.returncode) == (29, 30, 0)


def test_ui_prints_an_address_that_works_until_ctrl_c(
    command: list[str], environment: Callable[..., dict[str, str]], flow: WrittenFlow, tmp_path: Path
) -> None:
    serving = [*command, "ui", "--port", "0"]
    with subprocess.Popen(
        serving, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        token = address.partition("?token=")[2]
        asked = urllib.request.Request(
            address.partition("?")[0] + "api/flows", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert [one["flow"] for one in json.load(answer)["flows"]] == ["orders"]
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_ui_of_something_else_is_refused(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "landing").mkdir()
    assert run_here("ui", "landing").code == 3
    assert run_here("ui").code == 2
    assert run_here("ui", "missing.yaml").code == 2


def test_asking_who_runs_a_flow_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    """Whoever looks holds the lock for a moment."""
    from dovetail.storage.running import who_runs

    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            who_runs(tmp_path)

    lock = RunnerLock(tmp_path, "query")
    lock.release()
    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            RunnerLock(tmp_path, "query").release()
            time.sleep(0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
