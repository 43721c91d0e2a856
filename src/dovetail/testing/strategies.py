"""Hypothesis strategies: small streams and relations that cover every awkward case, and schedules that shrink.

Keys are skewed (one of them hot), repeated on both sides, missing from the relation, NULL, NaN, -0.0, at the limits of
their type; codes are real or collide. Needs the package ``hypothesis``.

Examples
--------
>>> from hypothesis import find
>>> case = find(join_cases(max_stream_rows=5, max_relation_rows=5), lambda case: len(case.expected("anti")) > 0)
>>> [batch.num_rows for batch in case.batches()] == [len(case.stream_rows)]
True
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from hypothesis import strategies as st

from dovetail.relation.keys import code_kind, compute_codes
from dovetail.testing.batches import colliding_code, stream_batches
from dovetail.testing.oracle import Condition, JoinType, join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import Row
from dovetail.testing.schedules import Action, Call
from dovetail.testing.shard import MemoryShard

__all__ = ["JoinCase", "KeyKind", "join_cases", "schedules"]

KeyKind = Literal["integer", "text", "double", "composite"]

# The last two of each kind are never in a relation, so their stream tuples stay unmatched.
_KEYS: dict[KeyKind, list[tuple[Any, ...]]] = {
    "integer": [(number,) for number in (1, 0, -1, 2**63 - 1, -(2**63), 128, 7, 8)],
    "text": [(text,) for text in ("a", "", "aa", "ä", "b" * 40, "A", "unmatched", "a ")],
    "double": [(number,) for number in (0.0, -0.0, float("nan"), 1.5, -1.5, float("inf"), 5e-324, float("-inf"))],
    "composite": [(1, "a"), (1, "b"), (2, "a"), (0, ""), (-1, "ab"), (2, "b"), (1, "c"), (3, "a")],
}
_UNMATCHED_KEYS = 2
_KEY_TYPES: dict[KeyKind, list[pa.DataType]] = {
    "integer": [pa.int64()],
    "text": [pa.string()],
    "double": [pa.float64()],
    "composite": [pa.int32(), pa.string()],
}


@dataclass(frozen=True)
class JoinCase:
    """A stream and a relation, and the expected results of their joins.

    Stream rows have the key, ``t`` (their number) and ``x``; relation rows have the key, ``v`` (unique), ``low`` and
    ``high``. ``x``, ``low`` and ``high`` are small integers or NULL, for residual conditions. The schemas have no code.
    """

    stream_rows: list[dict[str, Any]]
    relation_rows: list[dict[str, Any]]
    stream_schema: pa.Schema
    relation_schema: pa.Schema
    on: tuple[tuple[str, str], ...]  # (stream name, relation name)
    distinct_codes: int | None  # so few that keys collide; None: real codes

    @property
    def stream_key(self) -> list[str]:
        return [name for name, _ in self.on]

    @property
    def relation_key(self) -> list[str]:
        return [name for _, name in self.on]

    @property
    def code_kind(self) -> Literal["value", "xxhash64"]:
        """``"value"`` if the code is the key, ``"xxhash64"`` if keys with equal codes must be compared."""
        if self.distinct_codes is not None:
            return "xxhash64"
        return code_kind(self.stream_schema, self.stream_key)

    def batches(self, seed: int | None = None, max_batch_rows: int = 8) -> list[pa.RecordBatch]:
        """The stream as coded batches; see `stream_batches`."""
        code_of = None if self.distinct_codes is None else colliding_code(self.stream_key, self.distinct_codes)
        return stream_batches(self.stream_rows, self.stream_key, self.stream_schema, seed, max_batch_rows, code_of)

    def relation_table(self) -> pa.Table:
        return pa.Table.from_pylist(self.relation_rows, schema=self.relation_schema)

    @property
    def batch_rows(self) -> int | None:
        """Rows per record batch of the shard if blocks are read in place; None in a quarter of the cases."""
        return (None, 1, 4, 7)[len(self.relation_rows) % 4]

    def shard(self, columns: Sequence[str] | None = None) -> MemoryShard:
        return MemoryShard(self.relation_table(), self.relation_codes(), columns, batch_rows=self.batch_rows)

    def relation_codes(self) -> list[int | None]:
        if self.distinct_codes is None:
            codes: list[int | None] = compute_codes(self.relation_table(), self.relation_key).to_pylist()
            return codes
        code_of = colliding_code(self.relation_key, self.distinct_codes)
        return [code_of(row) for row in self.relation_rows]

    def expected(
        self, how: JoinType, condition: Condition | None = None, select: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The oracle's result; see `join_oracle`."""
        columns = self.relation_schema.names if select is None else select
        return join_oracle(self.stream_rows, self.relation_rows, self.on, how, condition, select=columns)

    def expected_groups(
        self, how: JoinType, condition: Condition | None = None, select: Sequence[str] | None = None
    ) -> list[list[dict[str, Any]]]:
        """The oracle's result in stream order; see `join_oracle_by_tuple`."""
        columns = self.relation_schema.names if select is None else select
        return join_oracle_by_tuple(self.stream_rows, self.relation_rows, self.on, how, condition, select=columns)

    def in_range(self, stream_row: Row, relation_row: Row) -> bool | None:
        """The condition ``low <= x < high``, NULL if one of them is NULL."""
        low, x, high = relation_row["low"], stream_row["x"], relation_row["high"]
        return None if low is None or x is None or high is None else bool(low <= x < high)


@st.composite
def join_cases(
    draw: st.DrawFn,
    max_stream_rows: int = 30,
    max_relation_rows: int = 20,
    key_kinds: Sequence[KeyKind] = ("integer", "text", "double", "composite"),
) -> JoinCase:
    """A small stream and a small relation; either may be empty."""
    kind = draw(st.sampled_from(key_kinds))
    keys, types = _KEYS[kind], _KEY_TYPES[kind]
    stream_names = [f"k{number}" for number in range(len(types))]
    relation_names = [f"r{name}" for name in stream_names] if draw(st.booleans()) else stream_names
    small = st.none() | st.integers(0, 5)
    # About every third key is the hot one.
    hot = draw(st.integers(0, len(keys) - 1 - _UNMATCHED_KEYS))
    stream_picks = st.just(hot) | st.integers(0, len(keys) - 1) | st.none()
    relation_picks = st.just(hot) | st.integers(0, len(keys) - 1 - _UNMATCHED_KEYS) | st.none()
    stream = draw(st.lists(st.tuples(stream_picks, small), max_size=max_stream_rows))
    relation = draw(
        st.lists(
            st.tuples(relation_picks, small, small),
            max_size=max_relation_rows,
            unique_by=(lambda row: row[0]) if draw(st.booleans()) else None,
        )
    )
    stream_keys = [_key_columns(stream_names, keys, pick) for pick, _ in stream]
    relation_keys = [_key_columns(relation_names, keys, pick) for pick, _, _ in relation]
    return JoinCase(
        stream_rows=[key | {"t": t, "x": row[1]} for t, (key, row) in enumerate(zip(stream_keys, stream, strict=True))],
        relation_rows=[
            key | {"v": f"r{number}", "low": row[1], "high": row[2]}
            for number, (key, row) in enumerate(zip(relation_keys, relation, strict=True))
        ],
        stream_schema=pa.schema([*zip(stream_names, types, strict=True), ("t", pa.int64()), ("x", pa.int64())]),
        relation_schema=pa.schema(
            [
                *zip(relation_names, types, strict=True),
                ("v", pa.string()),
                ("low", pa.int64()),
                ("high", pa.int64()),
            ]
        ),
        on=tuple(zip(stream_names, relation_names, strict=True)),
        distinct_codes=draw(st.none() | st.integers(1, 3)),
    )


@st.composite
def schedules(
    draw: st.DrawFn,
    n_batches: int,
    snapshots: bool = True,
    calls: Sequence[Call] = (),
    max_actions_between: int = 4,
    give_ups: bool = False,
) -> list[Action]:
    """A schedule that offers all batches in order and drains at the end, with other actions in between.

    Like `random_schedule`, but drawn piece by piece, so that a failure shrinks to the few actions that matter.
    """
    kinds: list[Action] = [("step",), ("drain",)]
    if give_ups:
        kinds += [("step", 1), ("step", 2), ("drain", 1), ("drain", 3)]
    if snapshots:
        kinds.append(("snapshot_restore",))
    kinds.extend(("call", change) for change in calls)
    between = st.lists(st.sampled_from(kinds), max_size=max_actions_between)
    schedule: list[Action] = []
    offers_taken = st.sampled_from([None, 1, 2]) if give_ups else st.none()
    for number in range(n_batches):
        after = draw(offers_taken)
        schedule += [*draw(between), ("offer", number) if after is None else ("offer", number, after)]
    return [*schedule, *draw(between), ("drain",)]


def _key_columns(names: Sequence[str], keys: Sequence[tuple[Any, ...]], pick: int | None) -> dict[str, Any]:
    """The key columns of a row. In a composite key one NULL is enough, so the others have a value."""
    if pick is None:
        return dict(zip(names, [None, *keys[0][1:]], strict=True))
    return dict(zip(names, keys[pick], strict=True))
