"""The settings with which the command starts Spark."""

from typing import Any

import pytest

from dovetail.cli.session import _configuration

OPTIONS = "spark.driver.extraJavaOptions"


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, "as it was")


def options(master: str, settings: dict[str, str]) -> Any:
    return _configuration(master, settings, "/scratch").get(OPTIONS)


def test_jvm_of_a_local_spark_optimizes_only_hot_code() -> None:
    assert options("local[2]", {}).startswith("-XX:Tier4InvocationThreshold=")


def test_options_of_the_user_come_last_and_win() -> None:
    assert options("local[*]", {OPTIONS: "-XX:Tier4InvocationThreshold=5000"}).endswith(
        " -XX:Tier4InvocationThreshold=5000"
    )


def test_a_cluster_has_its_own_options() -> None:
    assert options("spark://host:7077", {OPTIONS: "-Dx=1"}) == "-Dx=1"
    assert options("spark://host:7077", {}) is None
