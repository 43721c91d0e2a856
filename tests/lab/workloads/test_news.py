"""News items and access records: what they promise is true."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail_lab.workloads.news import NewsWorkload


@pytest.mark.parametrize("items_per_part", [1, 7, 100])
def test_no_record_comes_for_an_item_that_is_over(items_per_part: int) -> None:
    closed: set[int] = set()
    for _, accesses in NewsWorkload(60, 5).parts(items_per_part):
        assert not closed & set(accesses.records["sno"].to_pylist())
        assert not closed & set(accesses.closed.tolist())
        closed |= set(accesses.closed.tolist())
    assert closed == set(range(60))


@pytest.mark.parametrize("order", ["ordered", "random"])
def test_every_item_comes_once_and_the_same_in_every_run(order: str) -> None:
    work = NewsWorkload(50, order=order)  # type: ignore[arg-type]
    numbers = [n for news, _ in work.parts(8) for n in news["sno"].to_pylist()]
    assert sorted(numbers) == list(range(50))
    assert (numbers == sorted(numbers)) == (order == "ordered")
    again = list(work.parts(8))
    assert all(news.equals(other) for (news, _), (other, _) in zip(work.parts(8), again, strict=True))


def test_records_are_of_the_latest_items_and_about_as_many_for_each() -> None:
    work = NewsWorkload(1000, 10)
    part = work.accesses(500, 600).records
    assert set(part["sno"].to_pylist()) <= set(range(491, 600))
    records = pa.concat_batches([a.records for _, a in work.parts(100)])
    counts = np.bincount(np.asarray(records["sno"]))
    assert records.num_rows == 10_000
    assert 8 < counts[20:900].mean() < 12


def test_workload_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError):
        NewsWorkload(0)
    with pytest.raises(PlanError):
        NewsWorkload(5, order="sorted")  # type: ignore[arg-type]
