"""The Python workers of a Spark of its own: what they take while wide rows pass, in `enrich` and in flows."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.relation import Relation

PROGRAM = Path(__file__).with_name("spark_process.py")
BUDGET = 64_000_000
# Modules that a case is the first to load, the readers of Spark's streams and their buffers: whatever the budget.
CONSTANT_BYTES = 16_000_000
# Spark's own batch, which no budget counts: 1,000 rows in these tests, and the next one is read beside it.
BATCH_ROWS = 1_000


class Spark:
    """The other process."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Allocators that keep nothing for later; see conftest.py.
            env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_MMAP_THRESHOLD_": "32768"},
        )
        assert self._answer() == {"ready": True}

    def run(self, case: str, relation: Relation, **how: Any) -> dict[str, Any]:
        """Run a case; see `spark_process`."""
        usual = {"strategy": "auto", "budget": BUDGET, "text_bytes": 20_000}
        request = {**usual, "case": case, "relation": str(relation.path), **how}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        told = self._answer()
        print(
            f"\n{case} on Spark: budget {request['budget'] / 1e6:.1f} MB, floor of a worker {told['floor'] / 1e6:.0f} "
            f"MB, most above it {told['above'] / 1e6:.1f} MB, {told['seconds']:.1f} s"
        )
        return told

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"Spark has ended; its log: {self._log.name}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def other_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    started = Spark(tmp_path_factory.mktemp("spark") / "log")
    yield started
    started.close()


def documents(directory: Path, size: int) -> Relation:
    """2,000 rows of which the one with key 0 has a document of so many bytes."""
    ids = np.arange(2_000)
    pay = ["d" * size] + ["x" * 100] * (ids.size - 1)
    return Relation.build(pa.table({"id": ids, "n": ids, "pay": pay}), directory, on="id", shards=2)


@pytest.fixture(scope="module")
def hot_documents(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return documents(tmp_path_factory.mktemp("hot") / "r", 250_000)


@pytest.fixture(scope="module")
def huge_document(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return documents(tmp_path_factory.mktemp("huge") / "r", 20_000_000)


# 20,000 tuples in two partitions: undivided, a task's 10,000 results would be 2.5 GB, more than an Arrow array holds.
@pytest.mark.parametrize(("case", "tuples"), [("enrich", 20_000), ("flow", 2_000), ("wait_for", 2_000)])
def test_hot_key_with_wide_documents(other_spark: Spark, hot_documents: Relation, case: str, tuples: int) -> None:
    told = other_spark.run(case, hot_documents, tuples=tuples)
    assert told.get("found") == [tuples, tuples * 250_000], told
    # Two tasks run at once, and each may have half of the budget; all of it is what no worker may exceed.
    assert told["above"] <= BUDGET + CONSTANT_BYTES
    assert told["samples"] >= 10


@pytest.mark.parametrize("case", ["waiting", "upsert"])
def test_wide_tuples(other_spark: Spark, hot_documents: Relation, case: str) -> None:
    # A micro-batch of 160 MB for two tasks. Before it was cut by bytes, a worker held its half of it three times.
    tuples, changes = 8_000, 2 if case == "upsert" else 1
    told = other_spark.run(case, hot_documents, tuples=tuples)
    assert told.get("found") == [changes * tuples, changes * tuples * 20_000], told
    assert told["above"] <= BUDGET + 2 * BATCH_ROWS * 20_000 + CONSTANT_BYTES


@pytest.mark.parametrize(
    ("case", "strategy"), [("enrich", "auto"), ("enrich", "balanced"), ("flow", "auto"), ("flow", "mesh")]
)
def test_document_wider_than_the_budget_is_refused(
    other_spark: Spark, huge_document: Relation, case: str, strategy: str
) -> None:
    told = other_spark.run(case, huge_document, tuples=10, strategy=strategy, budget=8_000_000)
    assert "BudgetError" in told["error"]["class"] + told["error"]["text"]
    minima = [int(number) for number in re.findall(r"raise it to at least (\d+) bytes", told["error"]["text"])]
    # There are two parts of the budget, and a document must fit each.
    assert minima
    assert min(minima) > 2 * 20_000_000
    assert told["above"] <= 8_000_000 + CONSTANT_BYTES


def test_minimum_that_lookups_name_is_enough(other_spark: Spark, huge_document: Relation) -> None:
    told = other_spark.run("enrich", huge_document, tuples=10, budget=8_000_000)
    (minimum,) = {int(number) for number in re.findall(r"raise it to at least (\d+) bytes", told["error"]["text"])}
    told = other_spark.run("enrich", huge_document, tuples=10, budget=minimum)
    assert told.get("found") == [10, 10 * 20_000_000], told
