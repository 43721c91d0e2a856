"""Keys in, one list of the relation's rows per tuple out, against a join in plain Python."""

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, InternalError
from dovetail.core.memory import Budget
from dovetail.joins.conditions import Comparison, Condition
from dovetail.relation import Relation
from dovetail.runtime.enrich import LookupTask
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.runtime.keys_only import KeysOnlyTask, RowLists
from dovetail.runtime.metrics_row import COUNTERS, METRICS_COLUMN

HOWS = ["inner", "left", "semi", "anti"]
COUNTED = pa.struct([*((name, pa.int64()) for name in COUNTERS), ("relation_version", pa.int64())])


def relation_of(path: Path, duplicates: int, width: int = 5) -> Relation:
    """Even keys, each so many times, with texts of different lengths."""
    keys = [key for key in range(0, 60, 2) for _ in range(duplicates)]
    texts = [f"{number}" + "é" * (number * width % 40) for number in range(len(keys))]
    rows = pa.table({"k": keys, "text": texts, "low": list(range(len(keys)))})
    return Relation.build(rows, path, on="k", shards=2)


def task_of(
    relation: Relation, how: Any, budget: str = "8MB", condition: Condition | None = None, reports: bool = False
) -> KeysOnlyTask:
    select = ("text", "low") if how in ("inner", "left") else ()
    columns = ("text", "low") if condition is not None or select else ()
    recipe = JoinRecipe(
        path=relation.path,
        filesystem=None,
        relation_id=relation.relation_id,
        version=relation.version,
        relation_columns=columns,
        relation_schema=relation.schema,
        key=relation.key,
        code_kind=relation.code_kind,
        num_shards=relation.num_shards,
        on=(("s0", "k"),),
        code_from="s0",
        how=how,
        select=select,
        condition=condition,
        io="map",
        emitted=("row", *select),
    )
    lookup = LookupTask(recipe, "query", "test", lambda: None, Budget.parse(budget), reports_metrics=reports)
    names = ["s0"] if condition is None else ["s0", "s1"]
    fields = [relation.schema.field(name) for name in select] or [pa.field("marker", pa.bool_())]
    if reports:
        fields.append(pa.field(METRICS_COLUMN, COUNTED))
    schema = pa.schema([("__code", pa.int64()), *((name, pa.int64()) for name in names), ("row", pa.int64())])
    returned = pa.list_(pa.field("element", pa.struct(fields), nullable=False))
    return KeysOnlyTask(lookup, schema, tuple(names), "row", returned)


def expected(relation: Relation, tuples: list[tuple[int | None, int]], how: str, has_condition: bool) -> list[Any]:
    """The list of each tuple, computed one by one."""
    rows = defaultdict(list)
    for row in relation.to_arrow().to_pylist():
        rows[row["k"]].append({"text": row["text"], "low": row["low"]})
    lists = []
    for key, value in tuples:
        matches = [] if key is None else [r for r in rows.get(key, []) if not has_condition or value > r["low"]]
        if how in ("semi", "anti"):
            lists.append([{"marker": None}] if bool(matches) == (how == "semi") else [])
        elif how == "left" and not matches:
            lists.append([{"text": None, "low": None}])
        else:
            lists.append(matches)
    return lists


def passed(tuples: list[tuple[int | None, int]], sizes: list[int], has_condition: bool) -> Iterator[tuple[Any, ...]]:
    """The columns that Spark passes, in batches of these sizes."""
    start = 0
    for size in sizes:
        part = tuples[start : start + size]
        keys = pa.array([key for key, _ in part], pa.int64())
        yield (keys, pa.array([value for _, value in part], pa.int64())) if has_condition else (keys,)
        start += size


def some_tuples(count: int, seed: int) -> list[tuple[int | None, int]]:
    draw = random.Random(seed)
    keys: list[int | None] = [None, *range(-3, 70)]
    return [(draw.choice(keys), draw.randrange(100)) for _ in range(count)]


def ordered(lists: list[Any]) -> list[Any]:
    return [sorted(given, key=str) for given in lists]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("duplicates", [1, 3])
@pytest.mark.parametrize("has_condition", [False, True])
@pytest.mark.parametrize("reports", [False, True])
def test_every_tuple_gets_the_list_of_its_rows(
    tmp_path: Path, how: str, duplicates: int, has_condition: bool, reports: bool
) -> None:
    relation = relation_of(tmp_path / "r", duplicates)
    condition = Comparison("s1", ">", "low") if has_condition else None
    task = task_of(relation, how, condition=condition, reports=reports)
    tuples = some_tuples(500, seed=duplicates)
    given = [one for array in task(passed(tuples, [1, 0, 7, 92, 400], has_condition)) for one in array.to_pylist()]
    counters = [element.pop(METRICS_COLUMN) for one in given for element in one] if reports else []
    reported = [row for row in counters if row is not None]
    if reports:
        assert len(given[-1]) > 0, "the last list has the counters"
        given[-1].pop()
    wanted = expected(relation, tuples, how, has_condition)
    assert ordered(given) == ordered(wanted)
    if reports:
        assert len(reported) == 1
        matched = sum(map(bool, expected(relation, tuples, "semi", has_condition)))
        assert reported[0]["stream_tuples_in"] == 500
        assert reported[0]["null_key_tuples"] == sum(key is None for key, _ in tuples)
        assert (reported[0]["matched_tuples"], reported[0]["unmatched_tuples"]) == (matched, 500 - matched)
        assert reported[0]["output_rows"] == sum(map(len, wanted))
        assert reported[0]["relation_version"] == 1


def test_wide_hot_row_makes_batches_smaller_and_not_larger(tmp_path: Path) -> None:
    rows = pa.table({"k": list(range(50)), "text": ["x" * 100_000] * 50, "low": list(range(50))})
    relation = Relation.build(rows, tmp_path / "r", on="k", shards=1)
    task = task_of(relation, "inner", budget="4MB")
    keys = pa.array([7] * 3_000, pa.int64())
    sizes = [(len(lists), lists.nbytes) for lists in task(iter([(keys,)]))]
    assert sum(count for count, _ in sizes) == 3_000
    assert max(size for _, size in sizes) < 4_000_000, "300 MB would have been one batch"


def test_counters_of_several_batches_add_up(tmp_path: Path) -> None:
    relation = relation_of(tmp_path / "r", 1)
    task = task_of(relation, "anti", budget="300KB", reports=True)
    tuples = some_tuples(20_000, seed=5)
    elements = [
        element
        for array in task(passed(tuples, [10_000, 10_000], has_condition=False))
        for one in array.to_pylist()
        for element in one
    ]
    reported = [element[METRICS_COLUMN] for element in elements if element[METRICS_COLUMN] is not None]
    assert len(reported) > 1, "the budget cuts the stream into several batches of lookups"
    assert sum(row["stream_tuples_in"] for row in reported) == 20_000
    assert sum(row["output_rows"] for row in reported) == len(elements) - len(reported)


def test_partition_without_rows_gives_nothing(tmp_path: Path) -> None:
    relation = relation_of(tmp_path / "r", 1)
    assert list(task_of(relation, "left")(iter([]))) == []
    assert list(task_of(relation, "left")(iter([(pa.array([], pa.int64()),)]))) == []


def test_strings_with_other_offsets_come_back_as_spark_expects_them(tmp_path: Path) -> None:
    rows = pa.table({"k": [0, 1], "text": pa.array(["a", "b"], pa.large_string()), "low": [5, 6]})
    relation = Relation.build(rows, tmp_path / "r", on="k", shards=1)
    task = task_of(relation, "inner")
    task.returned = pa.list_(
        pa.field("element", pa.struct([("text", pa.string()), ("low", pa.int64())]), nullable=False)
    )
    (lists,) = task(iter([(pa.array([1, 0], pa.int64()),)]))
    assert lists.type == task.returned
    assert lists.to_pylist() == [[{"text": "b", "low": 6}], [{"text": "a", "low": 5}]]


# -------------------------------------------------------------------- lists


def lists_of(rows: int, *pieces: list[int], keeps_last: bool = False, last: Any = None) -> list[Any]:
    """The lists of pieces, in which the elements of tuple n are n."""
    lists = RowLists(pa.list_(pa.int64()), rows, most_bytes=1_000, keeps_last=keeps_last)
    given: list[Any] = []
    for piece in pieces:
        for array in lists.add(np.array(piece, np.int64), pa.array(piece, pa.int64())):
            given += array.to_pylist()
    for array in lists.finish(None if last is None else pa.array([last], pa.int64())):
        given += array.to_pylist()
    return given


def test_tuple_alone_in_several_pieces_is_one_list() -> None:
    assert lists_of(5, [0, 1], [3], [3], [3], [4]) == [[0], [1], [], [3, 3, 3], [4]]
    assert lists_of(3, [1], [1, 1]) == [[], [1, 1, 1], []]
    assert lists_of(2) == [[], []]


def test_additional_element_is_the_end_of_the_last_list() -> None:
    assert lists_of(3, [0, 1, 2, 2], keeps_last=True, last=9) == [[0], [1], [2, 2, 9]]
    assert lists_of(3, [0, 1], keeps_last=True, last=9) == [[0], [1], [9]]
    assert lists_of(3, [1], keeps_last=True, last=9) == [[], [1], [9]]
    assert lists_of(1, [0], [0], keeps_last=True, last=9) == [[0, 0, 9]]
    assert lists_of(2, keeps_last=True, last=9) == [[], [9]]


def test_only_result_of_a_tuple_is_not_held() -> None:
    lists = RowLists(pa.list_(pa.int64()), 3, most_bytes=1, keeps_last=True, is_single=True)
    given = [list(lists.add(np.array([row]), pa.array([row]))) for row in range(3)]
    assert [[array.to_pylist() for array in arrays] for arrays in given] == [[[[0]]], [[[1]]], []]
    assert [array.to_pylist() for array in lists.finish(pa.array([9]))] == [[[2, 9]]]


def test_list_larger_than_a_task_can_hold_is_a_clear_error() -> None:
    with pytest.raises(BudgetError, match=r"(?s)more than a task can hold.*Start the query again"):
        lists_of(2, [1], [1] * 100, [1] * 100)


def test_results_out_of_order_are_an_error_and_not_another_tuples() -> None:
    with pytest.raises(InternalError, match="tuple 1"):
        lists_of(4, [0, 1, 2], [1, 3])
