"""Makes `Script` available to the tests of this directory."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load_script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("mjoin_script", Path(__file__).with_name("script.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


_SCRIPT = _load_script()


@pytest.fixture
def script() -> type:
    """The class `Script`, to be called with the inputs and the options of a join."""
    return _SCRIPT.Script
