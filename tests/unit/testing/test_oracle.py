"""The oracle against the definition of each join, written out as two nested loops or by hand."""

import itertools
import random
from typing import Any, get_args

import pytest

from dovetail.testing.oracle import JoinType, join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import Row, as_multiset

NAN = float("nan")


def _matches_by_definition(stream_row: Row, relation_row: Row, names: list[str]) -> bool:
    for name in names:
        left, right = stream_row[name], relation_row[name]
        if left is None or right is None:
            return False
        both_nan = left != left and right != right
        if not both_nan and left != right:
            return False
    return True


def _nested_loops(stream: list[Row], relation: list[Row], names: list[str], how: str) -> list[dict[str, Any]]:
    output = []
    for stream_row in stream:
        matches = [row for row in relation if _matches_by_definition(stream_row, row, names)]
        if how in ("inner", "left"):
            output += [{**stream_row, "v": row["v"]} for row in matches]
        if how == "left" and not matches:
            output.append({**stream_row, "v": None})
        if (how == "semi" and matches) or (how == "anti" and not matches):
            output.append(dict(stream_row))
    return output


@pytest.mark.parametrize("how", get_args(JoinType))
@pytest.mark.parametrize("seed", range(15))
def test_oracle_equals_nested_loops(how: JoinType, seed: int) -> None:
    print(f"seed={seed}")
    chance = random.Random(seed)
    values = [None, NAN, 0.0, -0.0, 1.5, 2.5]
    stream = [{"j": chance.choice(values), "k": chance.choice("ab"), "t": t} for t in range(chance.randrange(25))]
    relation = [{"j": chance.choice(values), "k": chance.choice("ab"), "v": v} for v in range(1, 25)]
    got = join_oracle(stream, relation, on=["j", "k"], how=how)
    assert as_multiset(got) == as_multiset(_nested_loops(stream, relation, ["j", "k"], how))


def test_inner_join_by_hand_many_to_many() -> None:
    stream = [{"k": "a", "t": 1}, {"k": "b", "t": 2}, {"k": "a", "t": 3}]
    relation = [{"k": "a", "v": 10}, {"v": 20, "k": "a"}, {"k": "c", "v": 30}]
    assert join_oracle(stream, relation, on="k") == [
        {"k": "a", "t": 1, "v": 10},
        {"k": "a", "t": 1, "v": 20},
        {"k": "a", "t": 3, "v": 10},
        {"k": "a", "t": 3, "v": 20},
    ]


@pytest.mark.parametrize(
    ("stream_key", "relation_key", "is_match"),
    [
        (None, None, False),
        (None, 1, False),
        (NAN, float("nan"), True),
        (NAN, 0.0, False),
        (0.0, -0.0, True),
        ("", None, False),
        (b"\x00", b"\x00", True),
        ("1", 1, False),
    ],
)
def test_key_rules_of_spark(stream_key: Any, relation_key: Any, is_match: bool) -> None:
    stream, relation = [{"k": stream_key}], [{"k": relation_key, "v": 1}]
    assert len(join_oracle(stream, relation, on="k")) == is_match
    assert len(join_oracle(stream, relation, on="k", how="semi")) == is_match
    assert len(join_oracle(stream, relation, on="k", how="anti")) == (not is_match)
    assert len(join_oracle(stream, relation, on="k", how="left")) == 1


@pytest.mark.parametrize(("stream_null", "relation_null"), list(itertools.product((False, True), repeat=2)))
def test_one_null_in_a_composite_key_is_enough(stream_null: bool, relation_null: bool) -> None:
    stream = [{"a": 1, "b": None if stream_null else 2}]
    relation = [{"a": 1, "b": None if relation_null else 2, "v": 1}]
    is_match = not stream_null and not relation_null
    assert len(join_oracle(stream, relation, on=["a", "b"])) == is_match


def test_join_columns_carry_the_streams_name_and_value() -> None:
    (row,) = join_oracle([{"x": -0.0, "t": 1}], [{"y": 0.0, "v": 2}], on=[("x", "y")])
    assert list(row) == ["x", "t", "v"]
    assert str(row["x"]) == "-0.0"


def test_join_columns_come_first_in_the_order_asked_for() -> None:
    stream, relation = [{"t": 1, "a": 2, "b": 3}], [{"v": 4, "y": 2, "b": 3}]
    on = ["b", ("a", "y")]
    assert [list(row) for row in join_oracle(stream, relation, on=on)] == [["b", "a", "t", "v"]]
    assert [list(row) for row in join_oracle(stream, relation, on=on, how="semi")] == [["b", "a", "t"]]
    assert [list(row) for row in join_oracle(stream, [], on=on, how="left", select=["v"])] == [["b", "a", "t", "v"]]


def test_condition_restricts_matches_and_null_is_no_match() -> None:
    stream = [{"k": 1, "ts": 5}, {"k": 1, "ts": None}]
    relation = [
        {"k": 1, "low": 0, "v": "old"},
        {"k": 1, "low": 4, "v": "new"},
        {"k": 1, "low": 9, "v": "later"},
    ]

    def valid(s: Row, r: Row) -> bool | None:
        return None if s["ts"] is None else r["low"] <= s["ts"]

    assert [row["v"] for row in join_oracle(stream, relation, on="k", condition=valid)] == ["old", "new"]
    assert [row["v"] for row in join_oracle(stream, relation, on="k", how="left", condition=valid)] == [
        "old",
        "new",
        None,
    ]
    assert join_oracle(stream, relation, on="k", how="anti", condition=valid) == [{"k": 1, "ts": None}]


def test_condition_without_equality_sees_every_pair_even_with_nulls() -> None:
    stream, relation = [{"x": None}, {"x": 1}], [{"y": None}, {"y": 2}]
    pairs = join_oracle(stream, relation, equi=False, condition=lambda s, r: True)
    assert pairs == [{"x": x, "y": y} for x in (None, 1) for y in (None, 2)]


@pytest.mark.parametrize("verdict", [1, 0, "yes"])
def test_condition_that_is_no_truth_value_is_refused(verdict: Any) -> None:
    with pytest.raises(TypeError, match="True, False or None"):
        join_oracle([{"k": 1}], [{"k": 1}], on="k", condition=lambda s, r: verdict)


def test_select_projects_the_relation_in_the_order_given() -> None:
    relation = [{"k": 1, "v": 1, "w": 2, "x": 3}]
    assert [list(row) for row in join_oracle([{"k": 1}], relation, on="k", select=["x", "k", "v"])] == [["k", "x", "v"]]


def test_empty_relation_in_a_left_join_needs_its_columns() -> None:
    assert join_oracle([{"k": 1}], [], on="k", how="left", select=["k", "v"]) == [{"k": 1, "v": None}]
    with pytest.raises(ValueError, match="pass select="):
        join_oracle([{"k": 1}], [], on="k", how="left")
    assert join_oracle([{"k": 1}], [], on="k", how="anti") == [{"k": 1}]
    assert join_oracle([{"k": 1}], [], on="k") == []


def test_same_column_on_both_sides_is_refused_only_where_both_come_out() -> None:
    stream, relation = [{"k": 1, "v": 1}], [{"k": 1, "v": 2}]
    with pytest.raises(ValueError, match="'v'"):
        join_oracle(stream, relation, on="k")
    assert join_oracle(stream, relation, on="k", how="semi") == stream
    assert join_oracle(stream, relation, on="k", select=["k"]) == stream


@pytest.mark.parametrize(
    "arguments",
    [
        {"on": "k", "how": "outer"},
        {},
        {"equi": False},
        {"equi": False, "on": "k", "condition": lambda s, r: True},
    ],
)
def test_senseless_requests_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        join_oracle([{"k": 1}], [{"k": 1}], **arguments)


def test_by_tuple_has_one_group_per_stream_row_in_stream_order() -> None:
    stream = [{"k": 2}, {"k": 9}, {"k": 1}, {"k": None}]
    relation = [{"k": 1, "v": "a"}, {"k": 2, "v": "b"}, {"k": 1, "v": "c"}]
    groups = join_oracle_by_tuple(stream, relation, on="k", how="left")
    assert groups == [
        [{"k": 2, "v": "b"}],
        [{"k": 9, "v": None}],
        [{"k": 1, "v": "a"}, {"k": 1, "v": "c"}],
        [{"k": None, "v": None}],
    ]
    assert join_oracle(stream, relation, on="k", how="left") == [row for group in groups for row in group]


def test_oracle_leaves_its_input_alone() -> None:
    stream, relation = [{"k": 1}], [{"k": 1, "v": 1}]
    join_oracle(stream, relation, on="k")[0]["k"] = 99
    join_oracle(stream, relation, on="k", how="semi")[0]["k"] = 99
    assert (stream, relation) == ([{"k": 1}], [{"k": 1, "v": 1}])
