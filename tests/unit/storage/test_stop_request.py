"""Requests to stop a flow reach the process they are for, and no other."""

import json
from pathlib import Path

import pytest

from dovetail.core.errors import StateError
from dovetail.storage.running import running
from dovetail.storage.stop_request import StopRequest, ask_to_stop, forget_stop_request, stop_request


def test_request_is_there_until_it_is_forgotten(tmp_path: Path) -> None:
    with running(tmp_path):
        assert stop_request(tmp_path) is None
        ask_to_stop(tmp_path, True, 5)
        assert stop_request(tmp_path) == StopRequest(True, 5.0)
        ask_to_stop(tmp_path, False, 7)
        assert stop_request(tmp_path) == StopRequest(False, 7.0)
        forget_stop_request(tmp_path)
        assert stop_request(tmp_path) is None


def test_flow_that_does_not_run_cannot_be_asked(tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    with pytest.raises(StateError, match="is not running"):
        ask_to_stop(tmp_path, False, 5)


def test_request_for_an_earlier_run_does_not_stop_the_next(tmp_path: Path) -> None:
    with running(tmp_path):
        ask_to_stop(tmp_path, False, 5)
        path = tmp_path / "dovetail" / "stop.json"
        asked = json.loads(path.read_text())
    asked["for"]["since_ms"] -= 1
    path.write_text(json.dumps(asked))
    with running(tmp_path):
        assert stop_request(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"drain": true}', '{"format": 9, "drain": true, "timeout_s": 1, "for": {}}']
)
def test_file_that_is_no_request_is_ignored(tmp_path: Path, text: str) -> None:
    with running(tmp_path):
        (tmp_path / "dovetail" / "stop.json").write_text(text)
        assert stop_request(tmp_path) is None
