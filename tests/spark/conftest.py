"""Fixtures of the tests that need a Spark session."""

import pytest


@pytest.fixture(params=["keys", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `enrich` sends to Python, whatever it would choose: only keys, or whole rows."""
    why = None if request.param == "keys" else "the test asks for it"
    monkeypatch.setattr("dovetail.spark.steps.enrich.rows_must_travel", lambda plan, refresh: why)
    return str(request.param)
