"""Every kind of promise with every kind of plan: the results are the oracle's, promises act in every node, or the plan
is refused. No row that only ends a value comes out, and no hidden column does."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, PromiseError, StateError
from dovetail.joins.multiway import MJoinTree, TimeWindow, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.joins.promises import Metadata, MetadataTree, Punctuation
from dovetail.joins.promises.punctuation import BoundPunctuation
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

SEED = 52_611
GROUP = 6  # join values that are open at the same time
GROUPS = 6
PLANS: dict[str, tuple[str, Any]] = {
    "single": ("abcd", "single"),
    "binary": ("abcd", "binary"),
    "nested": ("abcd", [["a", "c"], ["b", "d"]]),
    "deep": ("abcd", [[["d", "a"], "b"], "c"]),
    "seven under auto": ("abcdefg", "auto"),
    "seven binary": ("abcdefg", "binary"),
    "eight nested": ("abcdefgh", [["a", "b", "c"], ["d", "e"], "f", ["g", "h"]]),
}
KINDS = ["rows", "stream", "function", "range", "keys", "clustered", "ordered", "quarantine", "notices"]


class Streams:
    """Rows of several inputs, group of join values after group, of which every kind of promise is true."""

    def __init__(self, names: str, kind: str, text: bool) -> None:
        self.chance = random.Random(SEED)
        print("seed", SEED)
        self.names, self.kind, self.text = names, kind, text
        key = pa.string() if text else pa.int64()
        self.schemas = {n: pa.schema({"k": key, f"t{n}": pa.int64(), n: pa.string()}) for n in names}
        self.sent: dict[str, list[dict[str, Any]]] = {n: [] for n in names}

    def key(self, number: int) -> Any:
        return f"key {number:04d}" if self.text else number

    def rows(self, name: str, group: int) -> list[dict[str, Any]]:
        """The rows of an input for one group, in the order that its promise asks for."""
        numbers = []
        for number in range(group * GROUP, (group + 1) * GROUP):
            # What never comes in a unique or clustered input is not over there: most values come in all of them.
            least = 1 if self.kind in ("keys", "clustered") and self.chance.random() < 0.97 else 0
            numbers += [number] * self.chance.randint(least, 1 if self.kind == "keys" else 2)
        if self.kind == "clustered":
            order = self.chance.sample(range(GROUP), GROUP)
            numbers.sort(key=lambda number: order[number % GROUP])
        elif self.kind != "ordered":
            self.chance.shuffle(numbers)
        before = len(self.sent[name])
        found = [
            {"k": self.key(number), f"t{name}": 10 * group + self.chance.randrange(8), name: f"{name}{before + place}"}
            for place, number in enumerate(numbers)
        ]
        self.sent[name] += found
        return found

    def batch(self, name: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(rows, schema=self.schemas[name])

    def expected(self, width: int | None) -> list[dict[str, Any]]:
        first, *others = self.names
        times = None if width is None else {n: f"t{n}" for n in self.names}
        return multiway_oracle(self.sent, [((first, "k"), (n, "k")) for n in others], times=times, width=width)


def metadata_of(kind: str, names: str, **options: Any) -> Metadata:
    given: dict[str, Any] = {
        "keys": {"keys": list(names)},
        "clustered": {"clustered": list(names)},
        "ordered": {"ordered": dict.fromkeys(names, "ascending")},
        "quarantine": {"on_broken_promise": "quarantine"},
    }.get(kind, {})
    return Metadata(**given, purging="immediate", **options)


def tree_of(streams: Streams, plan: Any, width: int | None = None, **options: Any) -> MetadataTree:
    window = None if width is None else TimeWindow(width, {n: f"t{n}" for n in streams.names})
    spec = mjoin_spec(streams.schemas, on="k", budget="16MB", partitions=8, window=window)
    chosen = plan_multiway(spec.graph, force=plan)
    return MetadataTree(spec, chosen, metadata_of(streams.kind, streams.names, **options))


def end_group(tree: MetadataTree, streams: Streams, name: str, group: int) -> list[dict[str, Any]]:
    """What an input promises when a group is over."""
    numbers = list(range(group * GROUP, (group + 1) * GROUP))
    values = [streams.key(n) for n in numbers]
    if streams.kind in ("rows", "quarantine", "notices"):
        return rows_of(tree.punctuate_rows(name, pa.record_batch([pa.array(values)], names=["k"])))
    if streams.kind == "stream":
        times = np.full(len(values), 10 * group + 9)
        return rows_of(tree.punctuate_rows(name, pa.record_batch([pa.array(values)], names=["k"]), times))
    if streams.kind == "function":
        return rows_of(tree.punctuate(name, *(Punctuation({"k": value}) for value in values)))
    if streams.kind == "range":
        return rows_of(tree.punctuate(name, Punctuation.between("k", values[0], values[-1])))
    return []


@pytest.mark.parametrize("text", [False, True], ids=["integers", "text"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_promise_acts_in_every_node_and_changes_no_result(plan: str, kind: str, text: bool) -> None:
    names, tree_plan = PLANS[plan]
    streams = Streams(names, kind, text)
    width = 30 if kind == "stream" else None
    tree = tree_of(streams, tree_plan, width)
    out: list[dict[str, Any]] = []
    aside: list[Any] = []
    told: Counter[Any] = Counter()
    held = 0
    for group in range(GROUPS):
        for name in streams.chance.sample(names, len(names)):
            rows = streams.rows(name, group)
            out += rows_of(tree.offer(name, streams.batch(name, rows)))
        for name in names:
            out += end_group(tree, streams, name, group)
            if kind == "quarantine":
                again = {"k": streams.key(group * GROUP), f"t{name}": 0, name: "again"}
                out += rows_of(tree.offer(name, streams.batch(name, [again])))
                aside += tree.take_quarantined()
        if width is not None:
            out += rows_of(tree.advance(10 * (group + 1)))
        out += rows_of(tree.step(idle=True))
        for punctuation in tree.take_punctuations():
            told.update(_values_of(punctuation, streams))
        if group == GROUPS // 2:
            saved = through_storage(tree.snapshot())
            tree = tree_of(streams, tree_plan, width)
            tree.restore(saved)
        held = max(held, sum(tree.state_rows().values()))
    assert_same_rows(out, streams.expected(width), f"{plan} {kind}")
    assert all("~" not in column for row in out for column in row)
    assert tree.metrics.broken_promises == ({"punctuation": GROUPS * len(names)} if kind == "quarantine" else {})
    assert sorted((name, tuple(rows.schema.names)) for name, rows in aside) == sorted(
        [(name, ("k", f"t{name}", name, "__reason")) for name in names] * (GROUPS if kind == "quarantine" else 0)
    )
    # Every node has used what was promised: none holds more than the values that are still open.
    for join in tree.joins:
        assert join.metrics.dropped_on_arrival + join.metrics.closed_rows > 0, join.spec.names
    offered = sum(len(rows) for rows in streams.sent.values())
    assert held < offered / 2
    if kind in ("rows", "function", "range", "quarantine", "notices"):
        assert set(tree.state_rows().values()) == {0}
        # Each value that is over is told once, when no later result has it; ranges of text, once for each input.
        once = Counter(streams.key(n) for n in range(GROUPS * GROUP))
        assert (Counter(set(told)) if kind == "range" and text else told) == once


def _values_of(punctuation: Punctuation, streams: Streams) -> list[Any]:
    assert set(punctuation.columns) == {"k"}
    keys = pa.record_batch([pa.array([streams.key(n) for n in range(GROUPS * GROUP)])], names=["k"])
    found = BoundPunctuation.of(punctuation, "out", keys.schema).matches(keys)
    return keys.filter(pa.array(found)).column(0).to_pylist()


def test_punctuation_reaches_the_output_only_when_its_last_result_has() -> None:
    streams = Streams("abc", "rows", text=False)
    tree = tree_of(streams, [["a", "b"], "c"])

    def offer(name: str, key: int) -> list[dict[str, Any]]:
        return rows_of(tree.offer(name, streams.batch(name, [{"k": key, f"t{name}": 0, name: name}])))

    offer("a", 1)
    assert list(tree.punctuate("a", Punctuation({"k": 1}))) == []
    # The node below still holds the tuple that it speaks of.
    assert tree.take_punctuations() == []
    offer("b", 1)
    list(tree.punctuate("b", Punctuation({"k": 1})))
    # The pair is in the node above, where it can still meet tuples of c.
    assert tree.state_rows() == {"a": 0, "b": 0, "~join 0": 1, "c": 0}
    assert tree.take_punctuations() == []
    assert [row["c"] for row in offer("c", 1)] == ["c"]
    assert [row["c"] for row in offer("c", 1)] == ["c"]
    assert tree.state_rows()["c"] == 0, "c is dropped on arrival: no later pair has its value"
    list(tree.punctuate("c", Punctuation({"k": 1})))
    assert tree.take_punctuations() == [Punctuation({"k": 1})]
    assert set(tree.state_rows().values()) == {0}


def test_results_of_a_node_are_unique_where_all_its_inputs_are() -> None:
    streams = Streams("abc", "rows", text=False)
    for keys, held in ((["a", "b"], 0), (["a"], 1)):
        spec = mjoin_spec(streams.schemas, on="k", budget="1MB")
        plan = plan_multiway(spec.graph, force=[["a", "b"], "c"])
        tree = MetadataTree(spec, plan, Metadata(keys=keys, goal="memory"))
        for name in "abc":
            out = rows_of(tree.offer(name, streams.batch(name, [{"k": 1, f"t{name}": 0, name: name}])))
        assert len(out) == 1
        assert tree.state_rows()["c"] == held


def test_row_that_breaks_a_promise_is_named_by_its_own_input_and_columns() -> None:
    streams = Streams("abc", "keys", text=False)
    tree = tree_of(streams, [["a", "b"], "c"])
    row = {"k": 7, "ta": 0, "a": "first"}
    list(tree.offer("a", streams.batch("a", [row])))
    with pytest.raises(PromiseError, match=r"Input 'a' broke its promise with a row of k=7: it is a second row"):
        list(tree.offer("a", streams.batch("a", [row])))
    # Nothing of it was accepted, and the tree goes on.
    assert tree.state_rows()["a"] == 1
    assert list(tree.offer("b", streams.batch("b", [{"k": 7, "tb": 0, "b": "b"}]))) == []


@pytest.mark.parametrize("kind", ["keys", "clustered", "ordered", "rows"])
@pytest.mark.parametrize("plan", ["auto", "binary", "single", [["a", "b"], "c"]])
def test_promises_about_several_join_attributes_are_refused(kind: str, plan: Any) -> None:
    schemas = {"a": pa.schema({"x": pa.int64()}), "b": pa.schema({"x": pa.int64(), "y": pa.int64()})}
    spec = mjoin_spec({**schemas, "c": pa.schema({"y": pa.int64()})}, on=[("a.x", "b.x"), ("b.y", "c.y")], budget="1MB")
    with pytest.raises(
        PlanError, match=r"one join attribute that all inputs share.*joined on x \(a, b\) and y \(b, c\)"
    ):
        MetadataTree(spec, plan_multiway(spec.graph, force=plan), metadata_of(kind, "a"))


def test_snapshot_of_other_promises_or_of_a_plain_tree_is_refused() -> None:
    streams = Streams("abc", "keys", text=False)
    plain = tree_of(streams, [["a", "b"], "c"])
    other = MetadataTree(plain.spec, plain.plan, Metadata(keys=["a"]))
    for snapshot in (other.snapshot(), MJoinTree(plain.spec, plain.plan).snapshot()):
        with pytest.raises(StateError, match="another join or plan"):
            plain.restore(snapshot)
