"""Trees of joins, and the two-input operators."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.errors import PlanError, StateError
from dovetail.model.multiway import plan_multiway
from dovetail.operators.mjoin import MJoin, MJoinTree, SymmetricHashJoin, TimeWindow, XJoin, mjoin_spec
from dovetail.testing.rows import rows_of
from dovetail.testing.snapshots import through_storage

SCHEMAS = {
    "a": pa.schema({"k": pa.int64(), "va": pa.string()}),
    "b": pa.schema({"m": pa.int64(), "z": pa.string(), "vb": pa.string()}),
    "c": pa.schema({"m": pa.string(), "vc": pa.string()}),
}
ON = [("a.k", "b.m"), ("b.z", "c.m")]


def tree_of(plan: Any = "auto", **options: Any) -> MJoinTree:
    spec = mjoin_spec(SCHEMAS, on=ON, budget="1MB", **options)
    return MJoinTree(spec, plan_multiway(spec.graph, force=plan))


def run(join: Any, name: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    schema = SCHEMAS[name]
    batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
    return rows_of(join.offer(name, batch if isinstance(join, MJoinTree) else join.spec.with_codes(name, batch)))


@pytest.mark.parametrize("plan", ["auto", "binary", "single", [["a", "b"], "c"], ["a", ["c", "b"]]])
def test_any_plan_gives_the_columns_and_rows_of_one_mjoin(plan: Any) -> None:
    # Two attributes use the name m for different things, so inner nodes cannot go by the inputs' own names.
    tree = tree_of(plan)
    run(tree, "c", ("z1", "c1"), ("z2", "c2"))
    run(tree, "a", (1, "a1"))
    assert run(tree, "b", (1, "z1", "b1"), (2, "z2", "b2")) == [{"k": 1, "z": "z1", "va": "a1", "vb": "b1", "vc": "c1"}]
    assert run(tree, "a", (2, "a2")) == [{"k": 2, "z": "z2", "va": "a2", "vb": "b2", "vc": "c2"}]
    single = MJoin(mjoin_spec(SCHEMAS, on=ON, budget="1MB"))
    assert single.output_schema == tree.output_schema
    for name in "abc":
        tree.finish(name)
    assert list(tree.drain()) == []
    assert sum(tree.state_rows().values()) == 0
    assert tree.metrics.output_rows == 2


def test_join_columns_of_two_attributes_with_one_name_are_refused() -> None:
    schemas = {"a": pa.schema({"m": pa.int64()}), "b": SCHEMAS["b"], "c": SCHEMAS["c"]}
    swapped = {"c": schemas["c"], "b": schemas["b"], "a": schemas["a"]}
    with pytest.raises(PlanError, match="of two different join attributes"):
        mjoin_spec(swapped, on=[("a.m", "b.m"), ("b.z", "c.m")])


def test_restart_of_a_tree_goes_on_where_it_was(tmp_path: Path) -> None:
    tree = tree_of([["a", "b"], "c"])
    run(tree, "a", (1, "a1"))
    run(tree, "b", (1, "z1", "b1"))
    again = tree_of([["a", "b"], "c"])
    again.restore(through_storage(tree.snapshot()))
    assert run(again, "c", ("z1", "c1")) == run(tree, "c", ("z1", "c1")) != []
    with pytest.raises(StateError, match="another join or plan"):
        tree_of(["a", ["b", "c"]]).restore(tree.snapshot())


def test_upper_node_keeps_what_delayed_results_of_a_lower_one_will_meet(tmp_path: Path) -> None:
    columns = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.string()}) for n in "abc"}
    window = TimeWindow(10, {n: f"t{n}" for n in "abc"})
    spec = mjoin_spec(columns, on="k", window=window, budget="1MB", spill_directory=tmp_path, flushing="random")
    tree = MJoinTree(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]))

    def offer(name: str, time: int) -> list[Any]:
        return rows_of(tree.offer(name, pa.record_batch({"k": [1], f"t{name}": [time], name: [name]})))

    offer("a", 100)
    tree.joins[0].flush("a")
    offer("b", 100)
    offer("c", 100)
    # The pair of a and b is still to come from disk; c must wait for it although its window has gone by.
    assert rows_of(tree.advance(200)) == [{"k": 1, "ta": 100, "a": "a", "tb": 100, "b": "b", "tc": 100, "c": "c"}]
    assert sum(tree.state_rows().values()) == 0


def test_outer_join_over_several_nodes_is_refused() -> None:
    with pytest.raises(PlanError, match="needs one MJoin"):
        tree_of([["a", "b"], "c"], how="left")


def test_two_input_operators_take_two_inputs_only(script: Any, tmp_path: Path) -> None:
    two, three = script("ab").spec, script("abc").spec
    with pytest.raises(PlanError, match="symmetric hash join has two"):
        SymmetricHashJoin(three)
    with pytest.raises(PlanError, match="XJoin has two"):
        XJoin(three)
    with pytest.raises(PlanError, match="XJoin flushes"):
        XJoin(two)
    with pytest.raises(PlanError, match="does not spill"):
        SymmetricHashJoin(script("ab", spill_directory=tmp_path).spec)
    assert XJoin(script("ab", spill_directory=tmp_path, flushing="random").spec).pending == 0
