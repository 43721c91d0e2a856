"""How long a unique key is remembered: until the watermark has passed the window of its row, and not less."""

import random
from typing import Any

import pyarrow as pa
import pytest

from dovetail.joins.multiway import TimeWindow, TupleWindow, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.joins.promises import Metadata, MetadataTree, Punctuation
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

SEED = 70_117
WIDTH, LATENESS = 10, 5
KEYS = Metadata(keys=["a"], on_broken_promise="count", goal="memory")
WINDOW = TimeWindow(WIDTH, {"a": "ta", "b": "tb"}, LATENESS)


@pytest.mark.parametrize("keys", ["integer", "text"])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(("watermark", "is_reported"), [(0, True), (9, True), (10, True), (11, False), (500, False)])
def test_second_row_is_reported_until_the_watermark_has_passed_the_window_of_the_first(
    script: Any, watermark: int, is_reported: bool, restarts: bool, keys: str
) -> None:
    key = "k" if keys == "text" else 1

    def make() -> Any:
        return script("ab", KEYS, keys=keys, time=True, window=WINDOW)

    join = make()
    join.offer("a", (key, 0, "a1"))
    join.labels(join.join.advance(watermark))
    if restarts:
        saved = through_storage(join.join.snapshot())
        join = make()
        join.join.restore(saved)
    # The window of the first row ends at 10, which is still within it.
    join.offer("a", (key, watermark + 3, "a2"))
    found = join.offer("b", (key, watermark + 3, "b"))
    assert join.join.metrics.broken_promises == ({"unique": 1} if is_reported else {})
    # Beyond its horizon the second row is taken as a first one; before that it is never joined.
    assert ("a2", "b") not in found if is_reported else found == [("a2", "b")]


def test_lateness_is_part_of_the_horizon_as_the_watermark_is_behind_by_it(script: Any) -> None:
    join = script("ab", KEYS, time=True, window=WINDOW)
    join.offer("a", (1, 0, "a1"))
    for time, is_reported in ((WIDTH + LATENESS, True), (WIDTH + LATENESS + 1, False)):
        # Both inputs have come this far: the watermark follows by the lateness.
        join.offer("a", (100 + time, time, "other"))
        join.offer("b", (100 + time, time, "other"))
        join.labels(join.join.advance(join.join.watermark_reached()))
        before = join.join.metrics.broken_promises.get("unique", 0)
        join.offer("a", (1, time, "again"))
        assert (join.join.metrics.broken_promises["unique"] - before == 1) is is_reported


def test_window_of_tuples_remembers_a_key_for_as_many_tuples(script: Any) -> None:
    for others, is_reported in ((39, True), (100, False)):
        join = script("ab", KEYS, window=TupleWindow(40))
        join.offer("a", (1, "a1"))
        for n in range(others):
            join.offer("b", (2 + n, "b"))
        join.offer("a", (1, "a2"))
        assert join.join.metrics.broken_promises == ({"unique": 1} if is_reported else {})


def test_second_row_of_a_value_that_all_others_have_closed_joins_nothing(script: Any) -> None:
    # The first row has gone, since nothing could meet it any more; so the second is not known for one.
    for how, found in (("inner", []), ("left", [("a2", None)])):
        join = script("ab", KEYS, how=how)
        join.offer("b", (1, "b"))
        assert join.offer("a", (1, "a1")) == [("a1", "b")]
        join.promise("b", 1)
        assert join.held() == (0, 0)
        assert join.offer("a", (1, "a2")) == found
        assert join.join.metrics.broken_promises == {}


@pytest.mark.parametrize("plan", ["single", [["a", "b"], "c"], [["b", "c"], "a"]], ids=["single", "a below", "a above"])
@pytest.mark.parametrize("text", [False, True], ids=["integers", "text"])
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_oracle_repetitions_within_the_horizon_change_no_result(seed: int, text: bool, plan: Any) -> None:
    """Rows of a come again, in any order, while the watermark has not passed the window of the first."""
    print("seed", seed)
    chance = random.Random(seed)
    kind = pa.string() if text else pa.int64()
    schemas = {n: pa.schema({"k": kind, f"t{n}": pa.int64(), n: pa.string()}) for n in "abc"}
    window = TimeWindow(WIDTH, {n: f"t{n}" for n in "abc"}, LATENESS)
    spec = mjoin_spec(schemas, on="k", budget="4MB", window=window, partitions=8)
    metadata = Metadata(keys=["a"], on_broken_promise="count", purging=chance.choice(["immediate", "batched"]))
    tree = MetadataTree(spec, plan_multiway(spec.graph, force=plan), metadata)
    sent: dict[str, list[dict[str, Any]]] = {n: [] for n in "abc"}
    first_times: dict[int, int] = {}
    out, again, watermark, over = [], 0, 0, -1

    def offer(name: str, number: int, time: int, label: str) -> dict[str, Any]:
        row = {"k": f"key {number}" if text else number, f"t{name}": time, name: label}
        out.extend(rows_of(tree.offer(name, pa.RecordBatch.from_pylist([row], schema=schemas[name]))))
        return row

    for step in range(300):
        time = watermark + chance.randrange(LATENESS + 3)
        name = chance.choice("aabc")
        number = chance.randrange(step // 10, step // 10 + 8)
        if name != "a":
            if name == "c" and number <= over:
                continue
            sent[name].append(offer(name, number, time, f"{name}{step}"))
        elif number not in first_times:
            first_times[number] = time
            sent["a"].append(offer("a", number, time, f"a{step}"))
        elif first_times[number] >= watermark - WIDTH:
            again += 1
            offer("a", number, time, "again")
        if step % 10 == 9:
            watermark += chance.randrange(3)
            out += rows_of(tree.advance(watermark))
            over = step // 10 - 4
            out += rows_of(tree.punctuate("c", Punctuation.between("k", 0, over))) if over >= 0 and not text else []
    assert again > 5
    equalities = [(("a", "k"), (n, "k")) for n in "bc"]
    expected = multiway_oracle(sent, equalities, times={n: f"t{n}" for n in "abc"}, width=WIDTH)
    assert len(expected) > 5
    assert_same_rows(out, expected, f"seed {seed}")
    assert 0 < tree.metrics.broken_promises["unique"] <= again


def test_repetition_beyond_the_horizon_is_no_error_about_results_inside_a_tree() -> None:
    """The node above may still hold the first result, which has expired, among others of its chunk that have not."""
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.string()}) for n in "abc"}
    window = TimeWindow(WIDTH, {n: f"t{n}" for n in "abc"})
    spec = mjoin_spec(schemas, on="k", budget="1MB", window=window)
    tree = MetadataTree(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]), Metadata(keys=["a", "b"]))

    def offer(name: str, rows: list[tuple[int, int]]) -> list[dict[str, Any]]:
        found = [{"k": k, f"t{name}": time, name: f"{name}{time}"} for k, time in rows]
        return rows_of(tree.offer(name, pa.RecordBatch.from_pylist(found, schema=schemas[name])))

    offer("b", [(1, 0)])
    offer("b", [(5, 9), (6, 9), (7, 9)])
    offer("a", [(1, 0), (2, 0), (3, 0), (4, 0), (5, 9), (6, 9), (7, 9)])
    assert list(tree.advance(12)) == []
    # A chunk is written again when half of it has expired.
    assert tree.state_rows() == {"a": 3, "b": 3, "~join 0": 4, "c": 0}
    offer("a", [(1, 13)])
    offer("b", [(1, 13)])
    assert tree.state_rows()["~join 0"] == 5
    assert [row["a"] for row in offer("c", [(1, 13)])] == ["a13"]
    assert tree.metrics.broken_promises == {}
