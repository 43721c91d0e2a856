"""What is held after a promise: nothing of a closed join value, by rows and by bytes, in memory and on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.joins.multiway import TimeWindow, mjoin_spec
from dovetail.joins.multiway.snapshots import named_tables
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation
from dovetail.testing.snapshots import through_storage

AT_ONCE = Metadata(goal="memory")


@pytest.mark.parametrize("keys", ["integer", "text"])
def test_closing_punctuations_leave_nothing_of_a_key_by_rows_and_bytes(script: Any, keys: str) -> None:
    key = (lambda k: f"k{k}") if keys == "text" else (lambda k: k)
    join, other = script("ab", AT_ONCE, keys=keys), script("ab", AT_ONCE, keys=keys)
    for name in "ab":
        join.offer(name, (key(1), "x" * 50), (key(2), "y"), (key(1), "x" * 70))
        # What is left must be what a join holds that never saw the key.
        other.offer(name, (key(2), "y"))
    join.promise("a", key(1))
    assert join.held() == (3, 1)
    join.promise("b", key(1))
    assert join.held() == (1, 1)
    assert join.state_bytes() == other.state_bytes()
    assert join.join.metrics.closed_rows == 4
    join.promise("a", key(2))
    join.promise("b", key(2))
    assert (join.held(), join.state_bytes()) == ((0, 0), 0)


@pytest.mark.parametrize("keys", ["integer", "text"])
@pytest.mark.parametrize("how", ["inner", "full"])
def test_purge_writes_what_was_closed_and_is_as_complete_after_a_restart(script: Any, keys: str, how: str) -> None:
    key = (lambda k: f"k{k}") if keys == "text" else (lambda k: k)
    metadata = Metadata(purging="batched", purge_count=5, propagate=True)
    options = {"keys": keys, "how": how, "budget": "4MB"}
    join, rows = script("ab", metadata, **options), 3000
    stored: dict[str, pa.Table] = {}
    out = join.offer("a", *[(key(k), f"a{k}" + "x" * 40) for k in range(rows)])
    out += join.offer("b", *[(key(k), f"b{k}" + "x" * 40) for k in range(0, rows, 2)])
    chance, closed, sizes = np.random.default_rng(18), set(), []
    for number in range(40):
        some = [int(k) for k in chance.integers(0, rows, 10)]
        for name in "ab":
            out += join.promise(name, *[key(k) for k in some if k not in closed])
        closed |= set(some)
        snapshot = through_storage(join.join.snapshot(have=frozenset(stored)))
        in_state = {name for name in snapshot.tables if name[0].isdigit() or name.startswith(("gone", "done"))}
        sizes.append(sum(snapshot.tables[name].nbytes for name in in_state))
        stored |= {name: table for name, table in snapshot.tables.items() if table.num_rows}
        stored = {n: t for n, t in stored.items() if n.removesuffix(".index") in named_tables(snapshot.values)}
        join.join.refer_to_stored(snapshot, stored.__getitem__)
        if number % 10 == 9:
            again = script("ab", metadata, **options)
            again.join.restore(replace(snapshot, tables={}), stored.__getitem__)
            assert again.held() == join.held()
            join = again
    held = [k for k in range(rows) if k not in closed]
    assert join.held() == (len(held), sum(k % 2 == 0 for k in held))
    assert max(sizes[1:]) < sizes[0] / 20, "no chunk is written again for ten keys"
    for k in held[:50]:
        out += join.offer("b", (key(k), "later"))
    pairs = [(f"a{k}" + "x" * 40, f"b{k}" + "x" * 40) for k in range(0, rows, 2)]
    pairs += [(f"a{k}" + "x" * 40, "later") for k in held[:50]]
    for name in "ab":
        join.join.finish(name)
    out += join.labels(join.join.drain())
    matched = {pair[0] for pair in pairs}
    alone = [(f"a{k}" + "x" * 40, None) for k in range(rows) if f"a{k}" + "x" * 40 not in matched]
    assert sorted(out, key=str) == sorted(pairs + (alone if how == "full" else []), key=str)


def test_memory_of_what_was_purged_is_used_before_anything_spills(script: Any) -> None:
    join = script("ab", AT_ONCE, budget="400kB")
    join.offer("a", *[(k, "x" * 100) for k in range(800)])
    before = join.state_bytes()
    for name in "ab":
        join.promise(name, *range(350))
    assert join.held() == (450, 0)
    # No spill directory: there is room for as many as were purged.
    for start in range(1000, 1600, 50):
        join.offer("a", *[(k, "x" * 100) for k in range(start, start + 50)])
    assert join.state_bytes() < 2 * before


def test_tuple_of_three_inputs_goes_when_all_others_are_closed_or_one_closed_one_has_no_match(script: Any) -> None:
    join = script("abc", AT_ONCE)
    for name in "abc":
        join.offer(name, (1, f"{name}1"))
    join.offer("a", (2, "a2"))
    join.offer("b", (2, "b2"))
    join.promise("b", 1)
    assert join.held() == (2, 2, 1)
    join.promise("c", 1)
    # Of value 1, a's tuple is in no later result; those of b and c wait for further ones of a.
    assert join.held() == (1, 2, 1)
    join.promise("a", 1)
    assert join.held() == (1, 1, 0)
    # c will not send value 2 and holds none, so no tuple of it can be in a result.
    join.promise("c", 2)
    assert join.held() == (0, 0, 0)
    assert join.offer("a", (2, "too late to matter")) == []
    assert join.held() == (0, 0, 0)
    assert join.join.metrics.dropped_on_arrival == 1


def test_input_that_has_ended_is_closed_for_everything(script: Any) -> None:
    join = script("ab", Metadata())
    join.offer("a", (1, "a1"))
    join.offer("b", (1, "b1"), (2, "b2"))
    join.join.finish("b")
    join.labels(join.join.step(idle=True))
    assert join.held() == (0, 2)
    assert join.offer("a", (2, "a2")) == [("a2", "b2")]
    assert join.held() == (0, 2)


@pytest.mark.parametrize(("how", "expected"), [("left", [("a2", None)]), ("anti", [("a2",)]), ("semi", [])])
def test_row_without_a_match_comes_out_when_its_value_is_closed(script: Any, how: str, expected: Any) -> None:
    join = script("ab", AT_ONCE, how=how)
    join.offer("a", (1, "a1"), (2, "a2"))
    join.offer("b", (1, "b1"))
    assert join.promise("b", 1) == []
    assert join.promise("b", 2) == expected
    assert join.held()[0] == 0
    # One that arrives now comes out at once.
    assert join.offer("a", (2, "a2")) == expected


def test_punctuations_of_a_left_join_are_passed_on_by_its_driving_input_only(script: Any) -> None:
    join = script("ab", AT_ONCE, how="left")
    join.promise("b", 1)
    assert join.passed_on() == []
    assert join.offer("a", (1, "a1")) == [("a1", None)]
    join.promise("a", 1)
    assert join.passed_on() == ["k = 1"]
    full = script("ab", AT_ONCE, how="full")
    full.promise("a", 1, 2)
    assert full.passed_on() == []
    full.promise("b", 2, 3)
    assert full.passed_on() == ["k = 2"]


def test_window_frees_a_punctuation_that_waited_for_its_tuples(script: Any) -> None:
    join = script("ab", AT_ONCE, time=True, window=TimeWindow(10, {"a": "ta", "b": "tb"}))
    join.offer("a", (1, 100, "a1"))
    join.promise("a", 1)
    assert join.passed_on() == []
    join.labels(join.join.advance(111))
    assert join.passed_on() == ["k = 1"]


def test_punctuation_of_its_own_stream_takes_effect_when_the_watermark_has_passed_it(script: Any) -> None:
    window = TimeWindow(1000, {"a": "ta", "b": "tb"})
    join = script("ab", AT_ONCE, time=True, window=window)
    join.offer("a", (1, 100, "a1"), (2, 100, "a2"))
    ends = pa.record_batch({"k": [1, 2, None]})
    assert join.labels(join.join.punctuate_rows("b", ends, np.array([150, 250, 10]))) == []
    # It came before the data that it speaks of.
    assert join.offer("b", (1, 140, "b1")) == [("a1", "b1")]
    join.labels(join.join.advance(150))
    assert join.held() == (2, 1)
    again = script("ab", AT_ONCE, time=True, window=window)
    again.join.restore(through_storage(join.join.snapshot()))
    again.labels(again.join.advance(151))
    assert again.held() == (1, 1)
    assert again.passed_on() == []
    again.labels(again.join.advance(300))
    assert again.held() == (0, 1)
    assert again.passed_on() == ["k = 2"]


def test_rows_of_some_columns_are_punctuations_in_which_null_is_any_value(script: Any) -> None:
    window = TimeWindow(1000, {"a": "ta", "b": "tb"})
    metadata = Metadata(goal="memory", on_broken_promise="quarantine")

    def new() -> Any:
        return script("ab", metadata, time=True, window=window)

    join = new()
    join.offer("a", (1, 100, "a1"), (2, 100, "a2"))
    rows = pa.record_batch({"k": pa.array([1, None, None], pa.int64()), "b": ["gone", "never", None]})
    # The row of NULLs says nothing; the others wait for the watermark, also across a restart.
    assert join.labels(join.join.punctuate_rows("b", rows, np.array([150, 250, 150]), ["k", "b"])) == []
    again = new()
    again.join.restore(through_storage(join.join.snapshot()))
    assert again.offer("b", (1, 140, "gone"), (2, 140, "never")) == [("a1", "gone"), ("a2", "never")]
    again.labels(again.join.advance(200))
    assert again.offer("b", (1, 210, "gone"), (2, 210, "gone"), (2, 210, "never")) == [("a2", "gone"), ("a2", "never")]
    again.labels(again.join.advance(300))
    assert again.offer("b", (1, 310, "x"), (2, 310, "never")) == [("a1", "x")]
    assert again.join.metrics.broken_promises == {"punctuation": 2}
    assert again.join.metrics.punctuations_in == 2
    # None of them closes a join value.
    assert again.held()[0] == 2


def test_rows_of_a_part_of_the_key_close_all_values_that_have_it() -> None:
    schemas = {n: pa.schema({"k": pa.string(), "j": pa.int64(), n: pa.string()}) for n in "ab"}
    spec = mjoin_spec(schemas, on=["k", "j"], budget="1MB")
    join = MetadataJoin(spec, Metadata(goal="memory"))
    rows = [("x", 1), ("x", 2), ("y", 1)]
    batch = pa.RecordBatch.from_pylist([{"k": k, "j": j, "a": "a"} for k, j in rows], schema=schemas["a"])
    assert list(join.offer("a", spec.with_codes("a", batch))) == []
    assert list(join.punctuate_rows("b", pa.record_batch({"k": ["x"]}), columns=["k"])) == []
    assert join.state_rows() == {"a": 1, "b": 0}
    assert list(join.punctuate_rows("b", pa.record_batch({"k": ["y"], "j": [1]}))) == []
    assert join.state_rows() == {"a": 0, "b": 0}


@pytest.mark.parametrize("flushing", ["coordinated", "random"])
def test_spilled_partition_goes_unread_where_the_punctuation_covers_it(
    script: Any, tmp_path: Path, flushing: str
) -> None:
    join = script("ab", AT_ONCE, spill_directory=tmp_path, flushing=flushing)
    for name in "ab":
        join.offer(name, *[(k, f"{name}{k}") for k in range(40)])
    join.join.flush("a", "b")
    assert join.held() == (40, 40)
    before = join.join.metrics.bytes_read
    join.promise("b", Punctuation.between("k", None, 100))
    assert join.held() == (0, 40)
    join.promise("a", Punctuation.between("k", -5, 39))
    assert join.held() == (0, 0)
    assert join.join.metrics.unread_pieces > 0
    assert join.join.metrics.bytes_read == before
    assert list(tmp_path.iterdir()) == []
    # The partitions are in memory again.
    assert join.offer("a", (200, "a")) == []
    assert join.offer("b", (200, "b")) == [("a", "b")]


@pytest.mark.parametrize("flushing", ["coordinated", "random"])
@pytest.mark.parametrize("keys", ["integer", "text"])
def test_spilled_tuples_of_single_keys_go_and_their_files_with_them(
    script: Any, tmp_path: Path, flushing: str, keys: str
) -> None:
    key = (lambda k: f"k{k}") if keys == "text" else (lambda k: k)
    join = script("ab", AT_ONCE, spill_directory=tmp_path, flushing=flushing, keys=keys)
    for name in "ab":
        join.offer(name, *[(key(k), f"{name}{k}") for k in range(40)])
    join.join.flush("a", "b")
    for k in range(40):
        join.promise("b", key(k))
        join.promise("a", key(k))
    assert join.held() == (0, 0)
    assert (join.state_bytes(), list(tmp_path.iterdir())) == (0, [])
    passed = {value for p in join.join.take_punctuations() for value in _values(p)}
    assert passed == {key(k) for k in range(40)}


def _values(punctuation: Punctuation) -> list[Any]:
    [value] = punctuation.columns.values()
    if isinstance(value, Punctuation.Range):
        return list(range(value.low, value.high + 1))
    return value if isinstance(value, list) else [value]


def test_restart_keeps_promises_and_what_waits_to_be_passed_on(script: Any) -> None:
    join = script("ab", Metadata(keys=["a"], purge_count=10))
    join.offer("a", (1, "a1"), (2, "a2"))
    join.offer("b", (3, "b3"))
    join.promise("b", 1, 3, Punctuation({"b": "x"}))
    again = script("ab", Metadata(keys=["a"], purge_count=10))
    again.join.restore(through_storage(join.join.snapshot()))
    assert again.join.purge_lag == 2
    assert again.join.metrics.punctuations_in == 3
    again.labels(again.join.step(idle=True))
    assert again.held() == (1, 1)
    assert sorted(again.passed_on()) == ["b = x", "k = 1"]
    third = script("ab", Metadata(keys=["a"], purge_count=10))
    third.join.restore(through_storage(again.join.snapshot()))
    # Passed on before the restart, so not again; value 3 when its news has come.
    assert third.passed_on() == []
    assert third.offer("a", (3, "a3")) == [("a3", "b3")]
    third.labels(third.join.step(idle=True))
    assert third.passed_on() == ["k = 3"]


def test_group_is_closed_once_whichever_inputs_promise_it(script: Any) -> None:
    join = script("abc", AT_ONCE)
    join.promise("a", 1)
    join.promise("b", 1, 2)
    join.promise("c", Punctuation.between("k", 1, 3))
    assert join.passed_on() == ["k in [1, 3]"]
    text = script("ab", AT_ONCE, keys="text")
    text.promise("a", "x")
    assert text.passed_on() == ["k = x"]
    text.promise("b", "x", "y")
    assert text.passed_on() == ["k = y"]
