"""Changes that are in no version of their relation yet take no more memory than their budget allows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.relation import Relation
from dovetail.runtime import kept
from dovetail.runtime.kept import needs_folding
from dovetail.warehouse.kept_rows import KeptRows
from dovetail.warehouse.transformations import ChangeDetection, SurrogateKeys

Make = Callable[..., Any]
KEYS = pa.schema([("id", pa.int64()), ("sk", pa.int64())])


def surrogate_keys() -> SurrogateKeys:
    return SurrogateKeys((("id", "id"),), False, ("id",), "sk")


def memory_of(here: Any) -> list[int]:
    """What each shard held in the last micro-batch."""
    return [sum(report["memory"].values()) for report in here.reports]


def test_steady_growth_is_folded_before_it_passes_the_budget(plant: Make) -> None:
    here = plant(KEYS, ["id"], surrogate_keys())
    here.budget_bytes = 12_000
    numbers: dict[int, int] = {}
    folds = 0
    for batch in range(40):
        ids = np.arange(batch * 90, batch * 90 + 120)
        if here.reports and needs_folding(here.reports, here.budget_bytes):
            here.fold()
            folds += 1
        for row in here.run(pa.table({"id": ids})):
            assert numbers.setdefault(row["id"], row["__number"]) == row["__number"]
        assert max(memory_of(here)) <= here.budget_bytes, f"micro-batch {batch}"
        assert all(report["counters"]["spilled_bytes"] == 0 for report in here.reports)
    assert 2 <= folds <= 20, "it folds, and not every time"
    assert len(set(numbers.values())) == len(numbers) == 39 * 90 + 120


def test_burst_goes_to_a_file_and_is_folded_next(plant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_CHUNK_ROWS", 50)
    here = plant(KEYS, ["id"], surrogate_keys(), shards=1)
    here.budget_bytes = 4_000
    first = {row["id"]: row["__number"] for row in here.run(pa.table({"id": np.arange(20)}))}
    assert not needs_folding(here.reports, here.budget_bytes)
    burst = {row["id"]: row["__number"] for row in here.run(pa.table({"id": np.arange(3_000)}))}
    assert burst.items() >= first.items()
    assert memory_of(here)[0] <= here.budget_bytes
    assert here.reports[0]["counters"]["spilled_bytes"] > 10 * here.budget_bytes
    assert needs_folding(here.reports, here.budget_bytes)
    # A replay, or a flow that goes on without a fold, finds all of it in the state.
    again = {row["id"]: row["__number"] for row in here.run(pa.table({"id": np.arange(3_000)}))}
    assert again == burst
    here.fold()
    assert {row["id"]: row["sk"] for row in Relation.open(here.relation.path).to_arrow().to_pylist()} == burst
    assert {row["id"]: row["__number"] for row in here.run(pa.table({"id": np.arange(3_000)}))} == burst
    assert not needs_folding(here.reports, here.budget_bytes)


def test_key_that_changes_within_a_burst_keeps_its_last_row(plant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_CHUNK_ROWS", 5)
    schema = pa.schema([("id", pa.int64()), ("city", pa.string()), ("row_hash", pa.int64())])
    logic = ChangeDetection(
        (("id", "id"),), False, ("id", "n"), "h", "row_hash", (("city", "city"),), ("inserted", "changed", "unchanged")
    )
    here = plant(schema, ["id"], logic, ["n"], shards=1)
    here.budget_bytes = 200
    rows = 400
    number = np.arange(rows)
    table = pa.table(
        {"id": number % 7, "n": number, "city": [f"city {n // 30}" for n in number], "h": (number // 30).astype("i8")}
    )
    here.run(table)
    assert here.reports[0]["counters"]["spilled_bytes"] > 0
    last = {int(n % 7): f"city {n // 30}" for n in number}
    assert {row["id"]: row["city"] for row in here.current()} == last


def test_rows_put_beyond_the_room_are_found_on_disk(tmp_path: Path) -> None:
    relation = Relation.build(KEYS.empty_table(), tmp_path / "r", on="id", shards=1)
    kept = KeptRows(relation.shard(0), [], ["id"], False, 300, tmp_path)
    for first in range(0, 200, 10):
        codes = np.arange(first, first + 10)
        kept.put(codes, pa.record_batch({"id": codes, "sk": codes + 1_000}))
        assert kept.size_bytes <= 300
        asked = np.arange(0, first + 15)
        queries, rows = kept.find(asked, [pa.array(asked)])
        assert sorted(queries.tolist()) == list(range(first + 10))
        assert np.array_equal(rows.column("sk").to_numpy(), asked[queries] + 1_000)
    assert kept.spilled_bytes > 3_000
    assert [path.name for path in tmp_path.iterdir()] == ["r"], "the file has no name that a crash could leave behind"
