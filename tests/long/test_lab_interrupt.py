"""Ctrl-C in a run of the lab, in a real process: what is finished is kept, and the same command goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dovetail.testing.flows import wait_until

NAMES = ["hybridjoin-fig10", "hybridjoin-fig11", "hybridjoin-fig3"]


def command(tmp_path: Path, *more: str) -> list[str]:
    places = ["--results", str(tmp_path / "r"), "--data", str(tmp_path / "d")]
    return [sys.executable, "-m", "dovetail.cli.main", "lab", "run", *NAMES, "--quick", *places, *more]


def started_at(tmp_path: Path, name: str) -> str:
    text: str = json.loads((tmp_path / "r" / f"{name}.json").read_text())["started_at"]
    return text


def test_sigint_keeps_what_is_finished_and_resume_goes_on(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_until(lambda: (tmp_path / "r" / f"{NAMES[1]}.json").exists(), "two results", timeout_s=300)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=120) == 130, said
    assert "2 finished in this run" in said
    assert "--resume" in said
    assert not (tmp_path / "r" / f"{NAMES[2]}.json").exists()
    first = [started_at(tmp_path, name) for name in NAMES[:2]]
    resumed = subprocess.run(
        command(tmp_path, "--resume", "--json"),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=True,
    )
    names = [experiment["experiment"] for experiment in json.loads(resumed.stdout)["experiments"]]
    assert names == NAMES
    assert "1/1 hybridjoin-fig3" in resumed.stderr
    assert [started_at(tmp_path, name) for name in NAMES[:2]] == first
