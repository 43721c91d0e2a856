"""Random sequences of changes against a plain-Python model: every version is what the model says, for good."""

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import Relation
from dovetail.core.errors import RelationError
from dovetail.relation import compute_codes, local
from dovetail.testing.rows import assert_same_rows

pytestmark = pytest.mark.usefixtures("without_fsync")

Row = dict[str, Any]
Key = tuple[Any, ...]

NAN = float("nan")
OTHER_NAN = np.uint64(0x7FF8_0000_0000_BEEF).view(np.float64).item()

KEYS: dict[str, tuple[pa.Schema, dict[str, st.SearchStrategy[Any]]]] = {
    "long": (pa.schema([("k", pa.int64())]), {"k": st.sampled_from([None, -(2**63), -1, 0, 1, 2, 2**63 - 1])}),
    "string": (pa.schema([("k", pa.string())]), {"k": st.sampled_from([None, "", "a", "b", "é", "x" * 40])}),
    "double": (
        pa.schema([("k", pa.float64())]),
        {"k": st.sampled_from([None, NAN, OTHER_NAN, 0.0, -0.0, 1.5, math.inf, -math.inf])},
    ),
    "composite": (
        pa.schema([("k", pa.int32()), ("name", pa.string()), ("price", pa.decimal128(20, 2))]),
        {
            "k": st.sampled_from([None, 0, 1]),
            "name": st.sampled_from([None, "a", "b"]),
            "price": st.sampled_from([None, Decimal("0.00"), Decimal("-1.25")]),
        },
    ),
}


def key_of(row: Row, names: list[str]) -> Key | None:
    """The key as Spark compares it, or None if it has a NULL."""
    values = [row[name] for name in names]
    if any(value is None for value in values):
        return None
    return tuple(("NaN" if v != v else v + 0.0) if isinstance(v, float) else v for v in values)


@dataclass
class Model:
    """What a relation must hold, version by version."""

    key: list[str]
    unique: bool
    versions: dict[int, list[Row]] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.versions)

    def refuses(self, operation: str, rows: list[Row]) -> bool:
        keys = [key_of(row, self.key) for row in rows]
        if operation == "upsert" and None in keys:
            return True
        if not self.unique or operation == "delete":
            return False
        present = [key_of(row, self.key) for row in self.versions[self.newest]] if operation == "append" else []
        counts = Counter(key for key in keys + present if key is not None)
        return any(count > 1 for count in counts.values())

    def apply(self, operation: str, rows: list[Row]) -> None:
        before = self.versions[self.newest] if self.versions else []
        given_keys = {key_of(row, self.key) for row in rows} - {None}
        if operation in ("upsert", "delete"):
            before = [row for row in before if key_of(row, self.key) not in given_keys]
        self.versions[len(self.versions) + 1] = before + ([] if operation == "delete" else rows)


@st.composite
def histories(draw: st.DrawFn, kind: str) -> tuple[list[Row], list[tuple[str, list[Row]]]]:
    """The rows of a build and what is done after it."""
    _, values = KEYS[kind]
    rows = st.lists(st.fixed_dictionaries(values), max_size=10)
    operations = st.tuples(st.sampled_from(["append", "upsert", "delete"]), rows)
    return draw(rows), draw(st.lists(operations, max_size=5))


def all_the_same(rows: pa.Table, key: list[str]) -> pa.Array:
    """Codes of which there is only one: nothing but the keys themselves tells rows apart."""
    real = compute_codes(rows, key)
    return pa.array([None if code is None else 7 for code in real.to_pylist()], pa.int64())


def few(rows: pa.Table, key: list[str]) -> pa.Array:
    real = compute_codes(rows, key)
    return pa.array([None if code is None else code % 3 - 1 for code in real.to_pylist()], pa.int64())


def check_version(relation: Relation, rows: list[Row], key: list[str]) -> None:
    context = f"version {relation.version}"
    assert_same_rows(relation.to_arrow().to_pylist(), rows, context)
    keys = [key_of(row, key) for row in rows]
    stats = relation.stats
    assert (stats.rows, stats.null_key_rows) == (len(rows), keys.count(None)), context
    assert sum(shard.rows for shard in stats.shards) == len(rows), context
    counts = Counter(key for key in keys if key is not None)
    if relation.code_kind == "value":
        assert stats.distinct_codes == len(counts), context
        assert stats.max_multiplicity == max(counts.values(), default=0), context
    else:
        # Keys may share a code, so there may be fewer codes than keys, never more.
        assert stats.distinct_codes <= len(counts), context
        assert stats.max_multiplicity >= max(counts.values(), default=0), context
    assert stats.is_unique == (stats.max_multiplicity <= 1), context


def numbered(rows: list[Row], start: int) -> list[Row]:
    """Rows with a payload that tells each from every other, even with the same key."""
    return [{**row, "payload": f"{start + i}"} for i, row in enumerate(rows)]


def in_order(rows: list[Row], schema: pa.Schema) -> list[Row]:
    return [{name: row[name] for name in schema.names} for row in rows]


def run(kind: str, history: tuple[list[Row], list[tuple[str, list[Row]]]], shards: int, unique: bool) -> None:
    schema = KEYS[kind][0]
    key = schema.names
    schema = schema.append(pa.field("payload", pa.string()))
    model = Model(key, unique)
    built, changes = history
    root = Path(tempfile.mkdtemp())
    try:
        rows = in_order(numbered(built, 0), schema)
        table = pa.Table.from_pylist(rows, schema=schema)
        model.versions[0] = []
        refused = model.refuses("build", rows)
        del model.versions[0]
        if refused:
            with pytest.raises(RelationError, match="was declared unique"):
                Relation.build(table, root / "r", on=key, shards=shards, unique=unique)
            return
        relation = Relation.build(table, root / "r", on=key, shards=shards, unique=unique)
        model.apply("build", rows)
        for number, (operation, given_rows) in enumerate(changes, start=1):
            rows = in_order(numbered(given_rows, number * 100), schema)
            table = pa.Table.from_pylist(rows, schema=schema)
            change = getattr(relation, operation)
            if model.refuses(operation, rows):
                with pytest.raises(RelationError, match=r"was declared unique|have a NULL in the key"):
                    change(table)
                assert Relation.open(root / "r").version == model.newest
            else:
                model.apply(operation, rows)
                relation = change(table.select(key) if operation == "delete" else table)
                assert relation.version == model.newest
        for version, expected in model.versions.items():
            check_version(Relation.open(root / "r", version=version), expected, key)
        assert [info.version for info in relation.versions()] == list(model.versions)
        report = relation.vacuum(keep=1)
        assert report.versions == tuple(range(1, model.newest))
        check_version(Relation.open(root / "r"), model.versions[model.newest], key)
        assert relation.vacuum(keep=1) == type(report)((), 0, 0)
    finally:
        shutil.rmtree(root)


# An example writes up to six versions, so a few of them say as much as a hundred of a cheaper test. The fixtures only
# keep disks quiet: they hold for all examples alike.
many = settings(
    max_examples=max(5, settings().max_examples // 4),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("kind", KEYS)
@many
@given(data=st.data(), shards=st.integers(1, 4), unique=st.booleans())
def test_every_version_is_what_the_model_says(kind: str, data: st.DataObject, shards: int, unique: bool) -> None:
    run(kind, data.draw(histories(kind)), shards, unique)


@pytest.mark.parametrize("codes", [all_the_same, few], ids=["one code", "three codes"])
@pytest.mark.parametrize("kind", ["string", "double", "composite"])
@many
@given(data=st.data(), shards=st.integers(1, 3), unique=st.booleans())
def test_colliding_codes_never_touch_another_keys_row(
    kind: str,
    codes: Callable[[pa.Table, list[str]], pa.Array],
    data: st.DataObject,
    shards: int,
    unique: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "compute_codes", codes)
        run(kind, data.draw(histories(kind)), shards, unique)
