"""The synthetic relation and stream batches."""

import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import Zipf, make_relation_table, make_stream_batch, relation_batches


@pytest.mark.parametrize("row_bytes", [20, 64, 120])
def test_relation_rows_take_the_declared_bytes(row_bytes):
    table = make_relation_table(1024, row_bytes=row_bytes)
    assert table.num_rows == 1024
    assert table.nbytes == 1024 * row_bytes
    assert {len(text) for text in table["pay"].to_pylist()} == {row_bytes - 20}


def test_relation_is_decided_by_its_seed():
    assert make_relation_table(200, seed=5).equals(make_relation_table(200, seed=5))
    assert make_relation_table(200, seed=5).equals(make_relation_table(300, seed=5).slice(0, 200))
    assert not make_relation_table(200, seed=5).equals(make_relation_table(200, seed=6))


def test_relation_keys_and_payloads_are_distinct():
    table = make_relation_table(1000, seed=1)
    assert table["k"].to_pylist() == list(range(1, 1001))
    assert len(set(table["sk"].to_pylist())) == 1000
    assert len(set(table["pay"].to_pylist())) == 1000


def test_relation_with_several_rows_per_key():
    assert make_relation_table(5, rows_per_key=2)["k"].to_pylist() == [1, 1, 2, 2, 3]


def test_empty_relation_has_its_schema():
    assert make_relation_table(0).schema.names == ["k", "sk", "pay"]
    assert list(relation_batches(0)) == []


def test_stream_tuples_take_20_bytes():
    batch = make_stream_batch(Zipf(100, 1.0, seed=1), 1000)
    assert batch.nbytes == 20_000
    assert set(batch["q"].to_pylist()) <= set(range(1, 101))


def test_next_batch_continues_the_stream():
    distribution, twin = Zipf(100, 1.0, seed=1), Zipf(100, 1.0, seed=1)
    first = make_stream_batch(distribution, 50)
    second = make_stream_batch(distribution, 50, first_sequence=50)
    assert first["k"].to_pylist() + second["k"].to_pylist() == twin.sample(100).tolist()
    assert second["v"].to_pylist() == list(range(50, 100))


def test_unmatched_share_negates_keys():
    keys = np.arange(1, 2001)
    drawn = make_stream_batch(keys, unmatched_share=0.25, seed=3)["k"].to_numpy()
    np.testing.assert_array_equal(np.abs(drawn), keys)
    assert 400 < (drawn < 0).sum() < 600


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: make_relation_table(-1), "rows=-1"),
        (lambda: relation_batches(1, row_bytes=19), "row_bytes=19"),
        (lambda: make_relation_table(1, rows_per_key=0), "rows_per_key=0"),
        (lambda: make_stream_batch(Zipf(5, 0.0)), "rows="),
        (lambda: make_stream_batch(np.arange(5), 4), "rows=4"),
        (lambda: make_stream_batch(np.arange(5), unmatched_share=1.5), "unmatched_share=1.5"),
    ],
)
def test_impossible_arguments_are_refused(call, reason):
    with pytest.raises(PlanError, match=reason):
        call()


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_drawn_relation_keys_follow_their_distribution(exponent):
    rows, domain = 200_000, 50
    table = make_relation_table(rows, 20, keys=Zipf(domain, exponent, seed=4))
    counts = np.bincount(table["k"].to_numpy(), minlength=domain + 1)[1:]
    assert follows(counts, rows * Zipf(domain, exponent).probabilities(np.arange(1, domain + 1)))


def test_smaller_relation_of_drawn_keys_is_a_prefix():
    whole, part = (make_relation_table(rows, keys=Zipf(100, 1.0, seed=4)) for rows in (70_000, 66_000))
    assert part.equals(whole.slice(0, 66_000))


def test_drawn_keys_exclude_a_number_of_rows_per_key():
    with pytest.raises(PlanError, match="rows_per_key"):
        make_relation_table(10, rows_per_key=2, keys=Zipf(5, 1.0))
