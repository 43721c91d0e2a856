"""The join by index alone against nested loops, for every join type, unique and repeated keys."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail.operators import Comparison
from dovetail.operators.spec import JoinSpec, JoinType
from dovetail.relation import Relation, compute_codes
from dovetail.spark import lookup_join
from dovetail.spark.lookup_join import LookupJoin
from dovetail.testing.oracle import as_multiset, join_oracle

SEED = 9


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("is_unique", [True, False], ids=["unique", "repeated"])
@pytest.mark.parametrize("has_condition", [False, True], ids=["equality", "condition"])
@pytest.mark.parametrize("kind", ["number", "text"])
def test_join_gives_what_nested_loops_give(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: JoinType,
    is_unique: bool,
    has_condition: bool,
    kind: str,
) -> None:
    # So few rows at a time that every way to cut a batch is taken.
    monkeypatch.setattr(lookup_join, "MAX_ROWS", 16)
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
    spec = JoinSpec(reader, coded.schema, (("k", "k"),), how=how, condition=condition, code_kind=relation.code_kind)
    join = LookupJoin(spec, reader, relation.stats.max_multiplicity)
    batches = [batch for part in coded.to_batches(max_chunksize=15) for batch in join.join(part)]
    assert all(batch.num_rows <= 16 for batch in batches)
    found = [row for batch in batches for row in batch.to_pylist()]
    holds = (lambda s, r: s["v"] <= r["limit"]) if has_condition else None
    expected = join_oracle(stream.to_pylist(), table.to_pylist(), on=["k"], how=how, condition=holds)
    assert as_multiset(found) == as_multiset(expected)
    metrics = join.metrics
    assert metrics.stream_tuples_in == 120 == metrics.matched_tuples + metrics.unmatched_tuples
    assert metrics.output_rows == len(found) > 0
