"""Customer and orders of TPC-H, made by the real generator."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import make_tpch, read_tpch


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_tpch(tmp_path_factory.mktemp("tpch"), 0.01)


def test_tables_have_the_benchmarks_sizes(files: dict[str, Path]) -> None:
    customer, orders = read_tpch(files["customer"]), read_tpch(files["orders"])
    assert customer["c_custkey"].to_pylist() == list(range(1, 1501))
    assert orders.num_rows == 15_000
    assert str(customer.schema.field("c_name").type) == "string"


def test_orders_are_of_two_customers_in_three_and_twice_as_often_of_one_of_them(files: dict[str, Path]) -> None:
    keys = read_tpch(files["orders"], ["o_custkey"])["o_custkey"].to_numpy()
    counts = np.bincount(keys, minlength=1501)
    assert counts[3::3].sum() == 0
    # Fifty customers in a bin: about a thousand orders, and five hundred.
    assert follows(counts[1::3].reshape(10, 50).sum(axis=1), np.full(10, counts[1::3].sum() / 10))
    assert follows(counts[2::3].reshape(10, 50).sum(axis=1), np.full(10, counts[2::3].sum() / 10))
    assert follows([counts[1::3].sum(), counts[2::3].sum()], [10_000, 5_000])


def test_files_that_are_there_are_not_made_again(files: dict[str, Path]) -> None:
    before = {name: path.stat().st_mtime_ns for name, path in files.items()}
    again = make_tpch(files["orders"].parents[1], 0.01)
    assert {name: path.stat().st_mtime_ns for name, path in again.items()} == before
    assert list(files["orders"].parents[1].iterdir()) == [files["orders"].parent]


def test_missing_generator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlanError, match="tpchgen-cli is not installed"):
        make_tpch(tmp_path / "data", 0.01)


def test_failed_generator_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "tpchgen-cli"
    program.write_text("#!/bin/sh\necho no space left >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PlanError, match="no space left"):
        make_tpch(tmp_path / "data", 0.01)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(("scale_factor", "tables"), [(0.0, ("orders",)), (1.0, ("sales",)), (1.0, ())])
def test_impossible_arguments_are_refused(tmp_path: Path, scale_factor: float, tables: tuple[str, ...]) -> None:
    with pytest.raises(PlanError):
        make_tpch(tmp_path, scale_factor, tables)
