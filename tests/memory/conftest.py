"""The nursery of the processes that are measured, and the relations that they join."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.relation import Relation

PROGRAM = Path(__file__).with_name("joining_process.py")

# What is freed goes back to the system at once, so that anonymous memory is what is in use: Arrow allocates with
# malloc, and malloc maps everything above 32 KiB on its own. With its usual allocator Arrow keeps some 15 MB for later,
# whatever the budget; see test_strategies.py for that.
GIVING_BACK = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_MMAP_THRESHOLD_": "32768"}


class Nursery:
    """Measures joins, each in a process of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self._answer() == {"ready": True}

    def measure(self, kind: str, budget: int, relation: Relation, **how: Any) -> dict[str, Any]:
        """Join with a strategy; tells what came out, and how much memory the process took above its floor.

        See `joining_process.measure`. By default: 400,000 uniform tuples, then as many by Zipf's law, each until a
        second has passed.
        """
        usual = {"io": "map", "how": "inner", "batch_rows": 4_096, "text_bytes": 0, "streams": ["uniform", "zipf"]}
        usual |= {"distinct": 600_000, "tuples": 400_000, "least": 0, "seconds": 600.0}
        request = {**usual, "kind": kind, "budget": budget, "relation": str(relation.path), **how}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        measured = self._answer()
        assert "failure" not in measured, measured["failure"]
        name = ", ".join([kind, *(f"{key}={value}" for key, value in how.items() if key in ("io", "how"))])
        print(f"\n{name}: budget {budget / 1e6:.1f} MB, measured above the floor {measured['above'] / 1e6:.1f} MB")
        return measured

    def close(self) -> None:
        """End the process that forks the others."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Processes whose allocators keep nothing."""
    made = Nursery(GIVING_BACK)
    yield made
    made.close()


@pytest.fixture(scope="session")
def usual_nursery() -> Iterator[Nursery]:
    """Processes with the allocators that they have anywhere."""
    made = Nursery({})
    yield made
    made.close()


def keys_of(rows: int) -> np.ndarray:
    """The keys of the large relation: every tenth row has a key that others have too."""
    numbers = np.arange(rows)
    return np.where(numbers % 10 == 0, numbers // 100, numbers)


@pytest.fixture(scope="session")
def large_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """600,000 rows of 120 bytes, 72 MB."""
    numbers = np.arange(600_000)
    digits = pa.array(np.char.zfill(numbers.astype("U6"), 6))
    pay = pa.compute.binary_join_element_wise("x" * 97, digits, "")
    rows = pa.table({"id": keys_of(numbers.size), "n": numbers, "pay": pay})
    return Relation.build(rows, tmp_path_factory.mktemp("large") / "r", on="id", shards=1)


def documents(directory: Path, size: int, shards: int = 1) -> Relation:
    """2,000 rows of which the one with key 0 has a document of so many bytes."""
    ids = np.arange(2_000)
    pay = ["d" * size] + ["x" * 100] * (ids.size - 1)
    return Relation.build(pa.table({"id": ids, "n": ids, "pay": pay}), directory, on="id", shards=shards)


@pytest.fixture(scope="session")
def wide_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """A hot key with a document of 250 kB."""
    return documents(tmp_path_factory.mktemp("wide") / "r", 250_000)


@pytest.fixture(scope="session")
def too_wide_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """A hot key with a document of 20 MB."""
    return documents(tmp_path_factory.mktemp("too_wide") / "r", 20_000_000)
