"""Makes `Script` available to the tests of this directory."""

from pathlib import Path

import pytest

from dovetail.testing.faults import load_program

_SCRIPT = load_program(Path(__file__).with_name("script.py"))


@pytest.fixture
def script() -> type:
    """The class `Script`, to be called with the inputs and the options of a join."""
    return _SCRIPT.Script
