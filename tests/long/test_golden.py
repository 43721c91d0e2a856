"""Checkpoints that earlier versions wrote: every flow goes on from its golden copy, and each row comes exactly once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

sys.path.append(str(Path(__file__).parents[1] / "golden"))

from golden_case import CHECKPOINT
from golden_cases import CASES
from golden_files import ARCHIVES, formats, locked, plain_rows, read_expected, restored

from dovetail.testing.flows import unnamed_state_files
from dovetail.testing.rows import assert_same_rows

BY_NAME = {case.name: case for case in CASES}
COPIES = [
    pytest.param(directory / f"{name}.tar.gz", id=f"{directory.name}-{name}")
    for directory in formats()
    for name in BY_NAME
    if (directory / f"{name}.tar.gz").exists()
]


@pytest.fixture(scope="module", autouse=True)
def place() -> Iterator[None]:
    """Copies are restored at one place, where they were made."""
    with locked():
        yield


def test_every_flow_has_a_copy() -> None:
    assert {name for name in BY_NAME if not (ARCHIVES / f"{name}.tar.gz").exists()} == set()


@pytest.mark.parametrize("copy", COPIES)
def test_flow_goes_on_from_its_copy_with_every_row_exactly_once(spark: SparkSession, copy: Path) -> None:
    expected = read_expected(copy)
    with restored(copy) as root:
        case = BY_NAME[root.name]
        before = {place: plain_rows(rows) for place, rows in case.found(root).items()}
        if case.least_waiting or case.killed_at:
            assert sum(map(len, before.values())) < sum(map(len, expected.values())), "nothing is left to do"
        case.between(root)
        case.add_later(root)
        query = case.start(spark, case, root, "available-now", is_resumed=True)
        assert query.awaitTermination(120), "the flow did not end"
        for place, rows in case.found(root).items():
            assert_same_rows(plain_rows(rows), expected[place], f"{case.name}: {place}")
        assert unnamed_state_files(root / CHECKPOINT) == set()
