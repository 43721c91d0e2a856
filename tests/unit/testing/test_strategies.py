"""The strategies reach every awkward case, and what they give is consistent."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dovetail.testing.batches import CODE_COLUMN
from dovetail.testing.oracle import JoinType
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.strategies import JoinCase, join_cases, schedules


def _stream_codes(case: JoinCase) -> list[tuple[Any, Any]]:
    rows = rows_of(case.batches())
    return [(row[CODE_COLUMN], tuple(row[name] for name in case.stream_key)) for row in rows]


def _has_collision(case: JoinCase) -> bool:
    keys_of_code: dict[int, set[Any]] = {}
    for code, key in _stream_codes(case):
        if code is not None:
            keys_of_code.setdefault(code, set()).add(repr(key))
    return any(len(keys - {"(0.0,)"}) > 1 for keys in keys_of_code.values())


AWKWARD: dict[str, Callable[[JoinCase], bool]] = {
    "empty stream": lambda case: not case.stream_rows and bool(case.relation_rows),
    "empty relation": lambda case: bool(case.stream_rows) and not case.relation_rows,
    "many to many": lambda case: sum(len(group) >= 2 for group in case.expected_groups("inner")) >= 2,
    "unmatched key": lambda case: (
        bool(case.relation_rows)
        and any(all(row[name] is not None for name in case.stream_key) for row in case.expected("anti"))
    ),
    "null in the stream": lambda case: any(row[case.stream_key[0]] is None for row in case.stream_rows),
    "null on both sides": lambda case: (
        any(row[case.stream_key[0]] is None for row in case.stream_rows)
        and any(row[case.relation_key[0]] is None for row in case.relation_rows)
    ),
    "only part of a composite key is null": lambda case: (
        len(case.on) == 2 and any(row["k0"] is None and row["k1"] is not None for row in case.stream_rows)
    ),
    "nan matches": lambda case: any(row["k0"] != row["k0"] for row in case.expected("semi")),
    "minus zero matches zero": lambda case: (
        any(str(row["k0"]) == "-0.0" for row in case.expected("semi"))
        and any(str(row[case.relation_key[0]]) == "0.0" for row in case.relation_rows)
    ),
    "hot key": lambda case: (
        len(case.stream_rows) >= 6
        and max(Counter(repr(row["k0"]) for row in case.stream_rows).values()) >= len(case.stream_rows) / 2
    ),
    "colliding codes": _has_collision,
    "real codes": lambda case: case.code_kind == "value" and bool(case.expected("inner")),
    "hashed real codes": lambda case: case.code_kind == "xxhash64" and case.distinct_codes is None,
    "other names in the relation": lambda case: case.stream_key != case.relation_key,
    "range condition holds for some matches only": lambda case: (
        0 < len(case.expected("inner", case.in_range)) < len(case.expected("inner"))
    ),
}


def test_strategy_reaches_every_awkward_case() -> None:
    unreached = dict(AWKWARD)

    @settings(max_examples=500, derandomize=True, database=None, phases=[Phase.generate])
    @given(join_cases(max_stream_rows=8, max_relation_rows=6))
    def look_at(case: JoinCase) -> None:
        for situation in [name for name, is_reached in unreached.items() if is_reached(case)]:
            del unreached[situation]

    look_at()
    assert list(unreached) == []


@given(join_cases(), st.integers(0, 99), st.sampled_from(["inner", "left", "semi", "anti"]))
def test_case_joined_by_its_codes_and_keys_equals_its_oracle(case: JoinCase, seed: int, how: JoinType) -> None:
    shard = case.shard()
    output: list[dict[str, Any]] = []
    for row in rows_of(case.batches(seed)):
        code = row.pop(CODE_COLUMN)
        candidates = [] if code is None else shard.gather(shard.lookup(np.array([code]))[1]).to_pylist()
        matches = [r for r in candidates if all(_is_same(row[s], r.pop(n)) for s, n in case.on)]
        empty = dict.fromkeys(["v", "low", "high"])
        if how in ("semi", "anti"):
            output += [row] if bool(matches) == (how == "semi") else []
        else:
            output += [row | match for match in matches or ([empty] if how == "left" else [])]
    assert_same_rows(output, case.expected(how), context=f"seed={seed} how={how}")


def _is_same(left: Any, right: Any) -> bool:
    return bool(left == right or (left != left and right != right))


@given(join_cases())
def test_relation_table_and_shard_hold_the_same_rows(case: JoinCase) -> None:
    table = case.relation_table()
    assert table.schema == case.relation_schema
    keyed = [row for row in case.relation_rows if all(row[name] is not None for name in case.relation_key)]
    assert_same_rows(rows_of([case.shard().read_block(0, 1000).rows]), keyed)


@given(st.data(), st.integers(0, 5), st.booleans())
def test_schedule_offers_everything_once_and_drains(data: st.DataObject, n_batches: int, snapshots: bool) -> None:
    schedule = data.draw(schedules(n_batches, snapshots=snapshots, calls=[len]))
    assert [action[1] for action in schedule if action[0] == "offer"] == list(range(n_batches))
    assert schedule[-1] == ("drain",)
    assert snapshots or ("snapshot_restore",) not in schedule
