"""What is kept of a host's costs: used here and now, else measured again, and the reason is said once."""

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dovetail.costs import CostFactors
from dovetail.costs.host import HostCosts, fingerprint, load_costs, store_costs

COSTS = HostCosts(CostFactors.of_papers(), CostFactors.of_papers(seek_s=0.0))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    store_costs(path, fingerprint(tmp_path), COSTS)
    return path


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_costs_of_this_host_are_used_in_silence(kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dovetail"):
        assert load_costs(kept, fingerprint(tmp_path)) == COSTS
        assert load_costs(tmp_path / "nothing.json", fingerprint(tmp_path)) is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": {"processor": "another one"}}, "was measured on another host"),
        ({"format": 3}, "has format 3"),
        ({"format": None}, "has format None"),
        ({"measured_at": (datetime.now(UTC) - timedelta(days=40)).isoformat()}, "is older than 30 days"),
        ({"measured_at": (datetime.now(UTC) + timedelta(days=2)).isoformat()}, "is of the future"),
    ],
    ids=["host", "format", "no format", "age", "future"],
)
def test_costs_that_are_not_valid_here_are_measured_again_and_the_reason_is_said_once(
    kept: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    change(kept, **changes)
    with caplog.at_level(logging.INFO, "dovetail"):
        for _ in range(3):
            assert load_costs(kept, fingerprint(tmp_path)) is None
    (said,) = caplog.messages
    assert why in said
    assert "measured again" in said
    assert str(kept) in said
