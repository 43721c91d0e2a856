"""Folds of a flow's changes: once, in order, and against other writers."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import RelationConflict, StateError
from dovetail.relation import Relation
from dovetail.storage.files import RelationFiles
from dovetail.warehouse.folding import Origin, fold, is_folded

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
ORIGIN = Origin("flow", "1-upsert", 4, "states of 4")

Part = Callable[[], pa.Table]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return Relation.build(rows({1: 0, 2: 0}), tmp_path / "r", on="id", shards=2, unique=True).path


def rows(values: dict[int, int]) -> pa.Table:
    return pa.table({"id": list(values), "n": list(values.values())}, schema=SCHEMA)


def parts(*values: dict[int, int]) -> list[Part]:
    return [lambda one=one: rows(one) for one in values]  # type: ignore[misc]


def content(path: str) -> dict[int, int]:
    found = Relation.open(path).to_arrow().to_pylist()
    return {row["id"]: row["n"] for row in found}


def anything(relation: Relation) -> None:
    assert relation.schema == SCHEMA


def test_second_fold_of_the_same_changes_finds_the_first(path: str) -> None:
    first = fold(path, ORIGIN, parts({2: 1, 3: 1}), anything)
    assert (first.version, content(path)) == (2, {1: 0, 2: 1, 3: 1})
    assert is_folded(first, ORIGIN)
    assert fold(path, ORIGIN, parts({2: 9}), anything).version == 2
    later = fold(path, replace(ORIGIN, batch=5, changes="states of 5"), parts({3: 2}), anything)
    assert (later.version, content(path)) == (3, {1: 0, 2: 1, 3: 2})


def test_fold_that_died_between_its_parts_is_done_again(path: str) -> None:
    def die() -> pa.Table:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fold(path, ORIGIN, [*parts({2: 1, 3: 1}), die], anything)
    assert not is_folded(Relation.open(path), ORIGIN)
    fold(path, ORIGIN, parts({2: 1, 3: 1}, {3: 2, 4: 2}), anything)
    assert content(path) == {1: 0, 2: 1, 3: 2, 4: 2}
    assert is_folded(Relation.open(path), ORIGIN)


@pytest.mark.parametrize("change", [{"batch": 3}, {"changes": "other states of 4"}, {"batch": -1}])
def test_driver_that_is_behind_is_refused(path: str, change: dict[str, Any]) -> None:
    fold(path, ORIGIN, parts({1: 4}), anything)
    with pytest.raises(StateError, match="another driver runs the flow, or an older copy"):
        fold(path, replace(ORIGIN, **change), parts({1: 3}), anything)
    assert content(path) == {1: 4, 2: 0}


@pytest.mark.parametrize("change", [{"flow": "new checkpoint", "batch": 0}, {"step": "2-upsert", "batch": 0}])
def test_other_flow_begins_with_a_low_number(path: str, change: dict[str, Any]) -> None:
    fold(path, ORIGIN, parts({1: 4}), anything)
    fold(path, replace(ORIGIN, **change), parts({1: 5}), anything)
    assert content(path) == {1: 5, 2: 0}


def test_fold_is_planned_again_when_another_writer_was_first(path: str) -> None:
    interruptions = [rows({1: 7}), rows({9: 7})]

    def interrupted() -> pa.Table:
        # After the fold has read the latest version and before it commits its own.
        if interruptions:
            Relation.open(path).upsert(interruptions.pop())
        return rows({1: 1})

    found = fold(path, ORIGIN, [interrupted], anything)
    assert content(path) == {1: 1, 2: 0, 9: 7}
    assert found.version == 4
    assert is_folded(Relation.open(path), ORIGIN)


def test_driver_that_was_overtaken_while_it_folded_is_refused(path: str) -> None:
    later = replace(ORIGIN, batch=5, changes="states of 5")

    def overtaken() -> pa.Table:
        fold(path, later, parts({1: 5}), anything)
        return rows({1: 4})

    with pytest.raises(StateError, match="micro-batch 5"):
        fold(path, ORIGIN, [overtaken], anything)
    assert content(path) == {1: 5, 2: 0}


def test_fold_waits_for_the_lock(path: str) -> None:
    locked, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        with RelationFiles(path).writing():
            locked.set()
            assert waiting.wait(60)

    def prepared() -> pa.Table:
        attempts.append(1)
        if len(attempts) == 3:
            waiting.set()
        return rows({1: 1})

    attempts: list[int] = []
    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60)
    fold(path, ORIGIN, [prepared], anything)
    holder.join()
    assert content(path) == {1: 1, 2: 0}
    assert len(attempts) >= 3


def test_fold_gives_up_and_says_what_to_do(path: str) -> None:
    with (
        RelationFiles(path).writing(),
        pytest.raises(RelationConflict, match=r"Another writer is changing .* let the other writer or vacuum end"),
    ):
        fold(path, ORIGIN, parts({1: 1}), anything, patience_s=0.1)
    assert content(path) == {1: 0, 2: 0}
