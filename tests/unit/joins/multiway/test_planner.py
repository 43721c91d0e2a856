"""Join graphs and plans of multi-way joins."""

import json
import time
from typing import Any

import pytest

from dovetail.core.errors import PlanError
from dovetail.joins.multiway.graph import JoinGraph
from dovetail.joins.multiway.planner import (
    MultiwayCosts,
    MultiwayStatistics,
    discard_cost,
    paper_output_rate,
    plan_multiway,
    split_cost,
)

STAR = JoinGraph.of({name: ["k"] for name in "abcd"}, on="k")
CHAIN = JoinGraph.of(
    {"a": ["x"], "b": ["x", "y"], "c": ["y", "z"], "d": ["z"]}, on=[("a.x", "b.x"), ("b.y", "c.y"), ("c.z", "d.z")]
)
# Section 3.5: two stars of three, linked by a second attribute.
SIX_COLUMNS = (
    {f"s{n}": ["u1"] for n in (1, 4)} | {f"s{n}": ["t6", "u14"] for n in (2, 5)} | {"s3": ["t6"], "s6": ["t6"]}
)
SIX = JoinGraph.of(
    SIX_COLUMNS,
    on=[
        ("s1.u1", "s2.t6"),
        ("s1.u1", "s3.t6"),
        ("s4.u1", "s5.t6"),
        ("s4.u1", "s6.t6"),
        ("s2.u14", "s5.u14"),
    ],
)


# ---------------------------------------------------------------- join graphs


def test_columns_of_different_names_are_one_attribute() -> None:
    graph = JoinGraph.of({"a": ["id"], "b": ["oid"], "c": ["ref"]}, on={"a": "id", "b": "oid", "c": "ref"})
    assert graph.star is not None
    assert graph.star.columns == {"a": ("id",), "b": ("oid",), "c": ("ref",)}


def test_attributes_of_the_same_inputs_are_one_composite_attribute() -> None:
    graph = JoinGraph.of({"a": ["x", "y"], "b": ["x", "z"]}, on=[("a.x", "b.x"), ("a.y", "b.z")])
    assert [attribute.columns for attribute in graph.attributes] == [{"a": ("x", "y"), "b": ("x", "z")}]


@pytest.mark.parametrize(
    ("columns", "on", "message"),
    [
        ({"a": ["k"], "b": ["k"], "c": ["k"]}, [("a.k", "b.k")], "not connected: nothing links a, b with c"),
        ({"a": ["k"], "b": ["j"]}, "k", "Input 'b' has no column 'k'"),
        ({"a": ["k"], "b": ["k"]}, [("a.k", "z.k")], "'z.k' does not name a column"),
        ({"a": ["k"], "b": ["k"]}, [(("a", "k"), ("z", "k"))], "no input 'z'"),
        ({"a": ["k", "l"], "b": ["k"]}, [("a.k", "b.k"), ("a.l", "b.k")], r"make a\.k equal to a\.l"),
        ({"a": ["k"], "b": ["k"]}, {"a": "k"}, "does not name the same number"),
        ({"a": ["k"]}, "k", "at least two inputs"),
        ({"a": ["k"], "b": ["k"]}, [], "names no join column"),
        ({"a": ["k"], "b": ["k"]}, [7], "neither names nor equalities"),
    ],
)
def test_graph_that_cannot_be_joined_is_refused(columns: dict[str, list[str]], on: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        JoinGraph.of(columns, on)


# ---------------------------------------------------------------- plans


def test_selective_star_is_one_mjoin() -> None:
    plan = plan_multiway(STAR, MultiwayStatistics(dict.fromkeys("abcd", 100.0), {"k": 1e6}))
    assert plan.root.as_nested() == list("abcd")
    assert plan.shuffles == 1


def test_star_is_split_where_recomputing_costs_more_than_keeping() -> None:
    # The fast input meets many combinations of the slow ones, which are then kept instead of computed again.
    statistics = MultiwayStatistics({"a": 1.0, "b": 1.0, "c": 1.0, "d": 5000.0}, {"k": 50.0})
    plan = plan_multiway(STAR, statistics)
    assert plan.shuffles > 1
    assert plan.work_s < plan.alternatives["single"][1]


def test_every_node_of_a_chain_has_one_attribute() -> None:
    plan = plan_multiway(CHAIN)
    described = json.loads(json.dumps(plan.as_dict()))
    assert plan.shuffles == 3
    assert described["tree"]["attribute"] in ("x", "y", "z")


def test_six_way_query_of_the_paper_costs_no_more_than_as_its_figure_14() -> None:
    rates = {"s1": 100.0, "s4": 100.0} | dict.fromkeys(("s2", "s3", "s5", "s6"), 1000.0)
    statistics = MultiwayStatistics(rates, {"u1": 10_000.0, "u1_": 10_000.0, "u14": 100_000.0}, horizon_s=100)
    figure = plan_multiway(SIX, statistics, force=[["s1", "s2", "s3"], ["s4", "s5", "s6"]])
    chosen = plan_multiway(SIX, statistics)
    assert chosen.output_rate == pytest.approx(figure.output_rate)
    assert chosen.work_s <= figure.work_s
    assert [figure.attribute_of(node) for node in figure.root.nodes()] == ["u1", "u1_", "u14"]


def test_plan_is_the_best_of_all_binary_trees_too() -> None:
    rates = {"a": 1.0, "b": 10.0, "c": 100.0, "d": 1000.0}
    statistics = MultiwayStatistics(rates, {"x": 20.0, "y": 500.0, "z": 5000.0}, horizon_s=10)
    best = plan_multiway(CHAIN, statistics, force="binary").work_s
    trees = [[[["a", "b"], "c"], "d"], [["a", ["b", "c"]], "d"], [["a", "b"], ["c", "d"]]]
    trees += [["a", [["b", "c"], "d"]], ["a", ["b", ["c", "d"]]]]
    assert best == pytest.approx(min(plan_multiway(CHAIN, statistics, force=tree).work_s for tree in trees))


def test_kept_tuples_of_a_node_are_the_combinations_of_what_its_children_keep() -> None:
    rates = dict.fromkeys("abcd", 10.0)
    nested = plan_multiway(STAR, MultiwayStatistics(rates, {"k": 50.0}), force=[["a", "b"], ["c", "d"]])
    single = plan_multiway(STAR, MultiwayStatistics(rates, {"k": 50.0}), force="single")
    assert nested.output_rate == pytest.approx(single.output_rate)


def test_forced_plan_is_taken_as_it_is_and_nonsense_refused() -> None:
    assert plan_multiway(STAR, force=[["d", "a"], "b", "c"]).root.as_nested() == [["d", "a"], "b", "c"]
    assert plan_multiway(STAR, force="single").root.as_nested() == list("abcd")
    for force, message in [
        ("some", "none of auto, single, binary"),
        ([["a", "b"], "c"], "does not name each of"),
        ([["a"], "b", "c", "d"], "at least two parts"),
    ]:
        with pytest.raises(PlanError, match=message):
            plan_multiway(STAR, force=force)
    with pytest.raises(PlanError, match="no join attribute in common"):
        plan_multiway(CHAIN, force=[["a", "d"], "b", "c"])


def star_of(count: int) -> JoinGraph:
    return JoinGraph.of({f"i{n}": ["k"] for n in range(count)}, on="k")


def chain_of(count: int) -> JoinGraph:
    columns = {f"i{n}": [f"k{n}", f"k{n + 1}"] for n in range(count)}
    return JoinGraph.of(columns, on=[(f"i{n}.k{n + 1}", f"i{n + 1}.k{n + 1}") for n in range(count - 1)])


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("horizon_s", [None, 0.001, 2.0, 3600.0])
@pytest.mark.parametrize("count", range(2, 13))
def test_one_shared_key_is_one_mjoin_at_any_number_of_inputs(count: int, horizon_s: float | None, how: Any) -> None:
    # A window alone tells how long tuples are kept, and nothing about rates or values: that is no reason to split.
    statistics = None if horizon_s is None else MultiwayStatistics(horizon_s=horizon_s)
    plan = plan_multiway(star_of(count), statistics, how=how)
    assert plan.root.as_nested() == [f"i{n}" for n in range(count)]
    assert plan.shuffles == 1
    assert "One join key" in plan.reason


@pytest.mark.parametrize("count", [4, 9, 12])
def test_measured_statistics_may_split_one_key_and_an_outer_join_is_not_split(count: int) -> None:
    rates = {f"i{n}": 1.0 for n in range(count - 1)} | {f"i{count - 1}": 5000.0}
    statistics = MultiwayStatistics(rates, {"k": 50.0})
    split = plan_multiway(star_of(count), statistics)
    assert split.shuffles > 1
    assert split.work_s < split.alternatives["single"][1]
    kept = plan_multiway(star_of(count), statistics, how="left")
    assert kept.shuffles == 1
    assert "how='left'" in kept.reason


@pytest.mark.parametrize("count", [8, 10, 12])
def test_measured_statistics_of_a_selective_key_leave_it_one_mjoin(count: int) -> None:
    statistics = MultiwayStatistics({f"i{n}": 100.0 for n in range(count)}, {"k": 1e6})
    assert plan_multiway(star_of(count), statistics).shuffles == 1


@pytest.mark.parametrize("make", [star_of, chain_of])
@pytest.mark.parametrize("count", [7, 10, 12])
def test_many_inputs_are_planned_and_described_without_trying_everything(make: Any, count: int) -> None:
    graph = make(count)
    names = list(graph.inputs)
    for force in ("auto", "binary"):
        begin = time.perf_counter()
        plan = plan_multiway(graph, MultiwayStatistics({"i0": 50.0, "i1": 500.0}, horizon_s=5), force)
        planned_s = time.perf_counter() - begin
        assert sorted(plan.root.inputs) == sorted(names)
        assert "MJoin on" in plan.text()
        described_s = time.perf_counter() - begin - planned_s
        print(f"{make.__name__}({count}) {force}: planned in {planned_s:.3f} s, described in {described_s:.3f} s")


def test_rates_of_a_deep_tree_are_estimated_once_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    plain = JoinGraph.shared

    def counted(self: JoinGraph, left: Any, right: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(self, left, right)

    monkeypatch.setattr(JoinGraph, "shared", counted)
    tree: Any = "i0"
    for n in range(1, 12):
        tree = [tree, f"i{n}"]
    assert plan_multiway(star_of(12), force=tree).work_s > 0
    # Each of 11 nodes looks at its two children a few times; one estimate within another would take thousands.
    assert calls < 300


def test_explained_plan_shows_tree_reason_rates_and_the_papers_expressions() -> None:
    text = plan_multiway(SIX).text()
    for part in ("MJoin on", "tuples/s", "probes/s", "reason", "predicted", "S = ", "D = ", "instead"):
        assert part in text


def test_statistics_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PlanError, match="must be positive"):
        MultiwayStatistics({"a": 0.0})


# ---------------------------------------------------------------- the paper's expressions


def test_results_due_to_all_seconds_add_up_to_those_of_all_tuples() -> None:
    rates, selectivities, costs = [3.0, 5.0, 7.0], [0.1, 0.2], MultiwayCosts()
    cost = sum(rates) * (costs.insert_s + costs.compare_s * (1 + 0.1))
    total = sum(paper_output_rate(rates, selectivities, second, costs) * cost for second in range(1, 11))
    assert total == pytest.approx(0.1 * 0.2 * 30 * 50 * 70)


def test_discard_exceeds_split_for_every_selective_join_as_the_paper_writes_it() -> None:
    for selectivity in (0.5, 0.1, 0.001):
        sides = ([100.0, 100.0], [selectivity], [100.0, 100.0], [selectivity])
        costs = MultiwayCosts(1e-9, 1e-9, 1e-6)
        assert (discard_cost(*sides, costs) > split_cost(*sides, costs)) == (selectivity < 0.49)
