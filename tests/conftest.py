"""What every suite shares: Hypothesis profiles, the Spark session, and how often a fault test repeats."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Deadlines are timed assertions, and the first example also pays for a kernel's compilation.
_UNTIMED = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _UNTIMED, derandomize=True, database=None)
settings.register_profile("daily", settings.get_profile("ci"), max_examples=30)
settings.register_profile("brief", settings.get_profile("ci"), max_examples=20)
settings.register_profile("soak", _UNTIMED, max_examples=2_000)
HYPOTHESIS_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(HYPOTHESIS_PROFILE)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print what a failure needs to be repeated: the profile, where its seeds come from, and the switches."""
    seed = config.getoption("hypothesis_seed", None)
    origin = "derived from each test" if settings().derandomize else "drawn afresh, printed on failure"
    switches = {
        name: os.environ.get(name, "unset")
        for name in ("NUMBA_DISABLE_JIT", "DOVETAIL_FORCE_BUCKETS", "DOVETAIL_FAULT_ROUNDS")
    }
    return [
        f"hypothesis profile: {HYPOTHESIS_PROFILE}, {settings().max_examples} examples, "
        f"seeds {origin if seed is None else seed}",
        "switches: " + ", ".join(f"{name}={value}" for name, value in switches.items()),
    ]


@pytest.fixture(scope="session")
def fault_rounds() -> int:
    """How often a fault test kills its victim: few in the everyday run, 50 with ``make test-faults``."""
    return int(os.environ.get("DOVETAIL_FAULT_ROUNDS", "5"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """One local Spark for the whole run, started by the first test that asks for it."""
    from dovetail.testing.sessions import local_session

    session = local_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()
