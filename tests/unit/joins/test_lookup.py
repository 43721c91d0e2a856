"""The join by index alone against nested loops, for every join type, unique and repeated keys."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.joins import OPERATORS, Comparison, LookupJoin, join_spec
from dovetail.joins.spec import JoinSpec, JoinType
from dovetail.relation import Relation, compute_codes
from dovetail.testing.oracle import as_multiset, join_oracle

SEED = 9


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("is_unique", [True, False], ids=["unique", "repeated"])
@pytest.mark.parametrize("has_condition", [False, True], ids=["equality", "condition"])
@pytest.mark.parametrize("kind", ["number", "text"])
def test_join_gives_what_nested_loops_give(
    tmp_path: Path,
    how: JoinType,
    is_unique: bool,
    has_condition: bool,
    kind: str,
) -> None:
    random = np.random.default_rng(SEED)
    keys = np.arange(60) if is_unique else np.concatenate([random.integers(0, 60, 200), np.full(50, 7)])
    named = [int(key) if kind == "number" else f"é{key}" for key in keys]
    table = pa.table({"k": named, "limit": random.integers(0, 10, keys.size), "row": np.arange(keys.size)})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=3)
    asked = [None if n % 9 == 0 else (n % 80 if kind == "number" else f"é{n % 80}") for n in range(120)]
    stream = pa.table({"k": pa.array(asked, table.schema.field("k").type), "v": random.integers(0, 10, 120)})
    condition = Comparison("v", "<=", "limit") if has_condition else None
    reader = relation.reader(["k", "limit", "row"])
    coded = stream.add_column(0, "__code", compute_codes(stream, ["k"])).combine_chunks()
    # So little memory that every way to cut a batch is taken.
    spec = JoinSpec(
        reader,
        coded.schema,
        (("k", "k"),),
        how=how,
        condition=condition,
        code_kind=relation.code_kind,
        budget=Budget(14_000),
    )
    join = LookupJoin(spec)
    assert join.results.max_rows < 64
    batches = [batch for part in coded.to_batches(max_chunksize=15) for batch in join.offer(part)]
    batches += join.drain()
    assert all(batch.num_rows <= join.results.max_rows for batch in batches)
    found = [row for batch in batches for row in batch.to_pylist()]
    holds = (lambda s, r: s["v"] <= r["limit"]) if has_condition else None
    expected = join_oracle(stream.to_pylist(), table.to_pylist(), on=["k"], how=how, condition=holds)
    assert as_multiset(found) == as_multiset(expected)
    metrics = join.metrics
    assert metrics.stream_tuples_in == 120 == metrics.matched_tuples + metrics.unmatched_tuples
    assert metrics.output_rows == len(found) > 0


def documents(tmp_path: Path, width: int) -> tuple[Relation, pa.Table]:
    """A relation with one hot key that has a wide document, among narrow ones."""
    keys = np.arange(50)
    texts = ["x" * (width if key == 7 else 10) for key in keys]
    table = pa.table({"k": keys, "doc": texts})
    return Relation.build(table, tmp_path / "r", on="k", shards=1), table


@pytest.mark.parametrize("kind", ["lookup", "auto", "mesh", "hybrid", "balanced", "index_nested_loop"])
def test_hot_key_with_a_wide_document_stays_within_the_budget(tmp_path: Path, kind: str) -> None:
    """4,000 tuples of a document of 250 kB are a gigabyte of results; a column of strings holds two."""
    relation, _ = documents(tmp_path, 250_000)
    codes = np.full(10_000, 7)
    batch = pa.record_batch({"__code": codes, "k": codes, "t": np.arange(10_000)})
    join = OPERATORS[kind](join_spec(relation, batch.schema, budget="64MB"))
    rows = most_bytes = 0
    for result in itertools.chain(join.offer(batch), join.drain()):
        rows += result.num_rows
        most_bytes = max(most_bytes, result.nbytes)
        assert join.size() <= 64_000_000
    assert rows == 10_000
    assert most_bytes <= 64_000_000


def test_row_wider_than_the_budget_says_what_would_do(tmp_path: Path) -> None:
    relation, _ = documents(tmp_path, 2_000_000)
    batch = pa.record_batch({"__code": [7], "k": [7]})
    join = LookupJoin(join_spec(relation, batch.schema, budget=1_500_000))
    with pytest.raises(BudgetError) as refused:
        list(join.offer(batch))
    assert refused.value.minimum_bytes is not None
    assert refused.value.minimum_bytes > 2_000_000
    enough = LookupJoin(join_spec(relation, batch.schema, budget=4 * refused.value.minimum_bytes))
    assert [result.num_rows for result in enough.offer(batch)] == [1]
