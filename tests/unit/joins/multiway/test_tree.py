"""Trees of joins, and the two-input operators."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, StateError
from dovetail.joins.multiway import MJoin, MJoinTree, SymmetricHashJoin, TimeWindow, XJoin, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
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


@pytest.mark.parametrize("plan", ["single", "binary", [["a", "b"], "c"]], ids=str)
@pytest.mark.parametrize("late", ["drop", "side"])
def test_lateness_and_late_tuples_are_those_of_one_mjoin_with_any_plan(plan: Any, late: Any, tmp_path: Path) -> None:
    columns = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int32(), n: pa.string()}) for n in "abc"}
    window = TimeWindow(10, {n: f"t{n}" for n in "abc"}, 5, late)
    spec = mjoin_spec(columns, on="k", window=window, budget="3MB", spill_directory=tmp_path, flushing="random")
    tree = MJoinTree(spec, plan_multiway(spec.graph, force=plan))
    for join in tree.joins:
        assert isinstance(join.spec.window, TimeWindow)
        assert (join.spec.window.lateness, join.spec.window.late) == (5, late)
        assert join.spec.budget.total_bytes == 3_000_000 // len(tree.joins)

    def offer(name: str, time: int, label: str, key: int = 1) -> list[Any]:
        rows = {"k": pa.array([key], pa.int64()), f"t{name}": pa.array([time], pa.int32()), name: [label]}
        return rows_of(tree.offer(name, pa.record_batch(rows)))

    offer("a", 90, "a1")
    next(join for join in tree.joins if "a" in join.spec.names).flush("a")
    offer("b", 92, "b1")
    assert tree.watermark_reached() is None
    offer("a", 100, "a2", key=2)
    offer("b", 104, "b2", key=3)
    offer("c", 120, "c0", key=4)
    # The least of the latest times is that of a.
    assert tree.watermark_reached() == 95
    assert rows_of(tree.advance(95)) == []
    # A node that owes results, which are on disk, is behind; what is late is so by the tree's own watermark.
    assert offer("c", 94, "late c") == offer("a", 94, "late a") == []
    found = [(name, rows.to_pylist()) for name, rows in tree.take_late()]
    expected = [("a", [{"k": 1, "ta": 94, "a": "late a"}]), ("c", [{"k": 1, "tc": 94, "c": "late c"}])]
    assert sorted(found) == (expected if late == "side" else [])
    assert tree.take_late() == []
    assert tree.metrics.late_tuples == 2
    assert tree.metrics.tuples_in == {"a": 3, "b": 2, "c": 2}
    out = offer("c", 95, "c1") + rows_of(tree.drain())
    assert [(row["a"], row["b"], row["c"]) for row in out] == [("a1", "b1", "c1")]
    tree.finish("a")
    assert tree.watermark_reached() == 99


def test_times_of_different_widths_join_in_a_tree() -> None:
    kinds = {"a": pa.int16(), "b": pa.int64(), "c": pa.int32()}
    columns = {n: pa.schema({"k": pa.int64(), f"t{n}": kind}) for n, kind in kinds.items()}
    spec = mjoin_spec(columns, on="k", window=TimeWindow(10, {n: f"t{n}" for n in "abc"}), budget="1MB")
    tree = MJoinTree(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]))
    times = {"a": 100, "b": 104, "c": 110}
    out = []
    for name, time in times.items():
        rows = pa.RecordBatch.from_pylist([{"k": 1, f"t{name}": t} for t in (time, time - 90)], schema=columns[name])
        out += rows_of(tree.offer(name, rows))
    early, late = sorted(out, key=lambda row: row["ta"])
    assert (early, late) == ({"k": 1, "ta": 10, "tb": 14, "tc": 20}, {"k": 1, "ta": 100, "tb": 104, "tc": 110})


def test_older_snapshot_of_a_tree_is_refused() -> None:
    tree = tree_of([["a", "b"], "c"])
    saved = tree.snapshot()
    older = {name: value for name, value in saved.fingerprint.items() if name != "format"}
    with pytest.raises(StateError, match=r"earlier release.*Drain the tree"):
        tree.restore(replace(saved, fingerprint=older))


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
