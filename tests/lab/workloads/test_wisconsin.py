"""The Wisconsin relations: permutations, equal frequencies, independence."""

import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import wisconsin_relation
from dovetail_lab.workloads.wisconsin import WISCONSIN_COLUMNS


@pytest.mark.parametrize("name", ["unique1", "unique3", "unique14"])
def test_unique_columns_are_permutations(name: str) -> None:
    values = wisconsin_relation(5000, [name, "unique2"], seed=1)
    assert sorted(values[name].to_pylist()) == list(range(5000))
    assert values["unique2"].to_pylist() == list(range(5000))
    assert values[name].to_pylist() != list(range(5000))


@pytest.mark.parametrize(("name", "count"), [("tenk6", 10_000), ("tenk", 10_000), ("thousand", 1000), ("twenty", 20)])
def test_other_columns_have_every_value_equally_often(name: str, count: int) -> None:
    values = wisconsin_relation(50_000, [name])[name].to_numpy()
    assert np.bincount(values).tolist() == [50_000 // count] * count


def test_columns_and_relations_are_independent() -> None:
    table = wisconsin_relation(40_000, ["unique1", "unique14", "tenk5", "tenk6"], seed=5)
    other = wisconsin_relation(40_000, ["unique1"], seed=6)
    deciles = {
        name: table[name].to_numpy() * 10 // (40_000 if name[0] == "u" else 10_000) for name in table.column_names
    }
    deciles["other"] = other["unique1"].to_numpy() * 10 // 40_000
    names = list(deciles)
    for i, one in enumerate(names):
        for two in names[:i]:
            assert follows(np.bincount(deciles[one] * 10 + deciles[two], minlength=100), np.full(100, 400.0)), (
                one,
                two,
            )


def test_whole_relation_has_the_benchmarks_columns_and_bytes() -> None:
    table = wisconsin_relation(1000, seed=2)
    assert tuple(table.column_names) == WISCONSIN_COLUMNS
    assert {len(text) for name in ("stringu1", "stringu2", "string4") for text in table[name].to_pylist()} == {52}
    assert len(set(table["stringu1"].to_pylist())) == 1000
    assert len(set(table["string4"].to_pylist())) == 4
    assert (table["oddOnePercent"].to_numpy() % 2 == 1).all()


def test_fewer_values_for_smaller_relations() -> None:
    assert wisconsin_relation(500, ["tenk6"], values=50)["tenk6"].to_numpy().max() == 49


@pytest.mark.parametrize("name", ["unique", "fortyk", "tenk-1"])
def test_unknown_column_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="unique1"):
        wisconsin_relation(10, [name])
