"""`enrich` through Spark Connect, against a server of its own: the same rows as plain Python gives."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = 300
CITY_OF = {key: f"c{key % 7}" for key in range(0, KEYS, 2)}
ORDERS = [(n % 50 * 6 + n % 2, n) for n in range(KEYS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client saw. A process of its own, since a session is classic or remote for good."""
    root = tmp_path_factory.mktemp("connect")
    program = Path(__file__).with_name("connect_client.py")
    done = subprocess.run([sys.executable, program, root], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULTS "))
    return found


def expected(how: str) -> list[list[Any]]:
    rows: dict[str, list[list[Any]]] = {
        "inner": [[k, n, CITY_OF[k]] for k, n in ORDERS if k in CITY_OF],
        "left": [[k, n, CITY_OF.get(k)] for k, n in ORDERS],
        "leftsemi": [[k, n] for k, n in ORDERS if k in CITY_OF],
        "leftanti": [[k, n] for k, n in ORDERS if k not in CITY_OF],
    }
    return sorted(rows[how], key=str)


def test_session_is_remote(results: dict[str, Any]) -> None:
    assert results["session"].startswith("pyspark.sql.connect")


@pytest.mark.parametrize("how", ["inner", "left", "leftsemi", "leftanti"])
def test_batch_equals_plain_python(results: dict[str, Any], how: str) -> None:
    assert 0 < len(expected(how)) <= KEYS
    assert results[how] == expected(how)


def test_stream_equals_plain_python(results: dict[str, Any]) -> None:
    assert results["streaming"] == expected("left")


@pytest.mark.parametrize("source", ["built by Spark", "a DataFrame as the relation"])
def test_relation_may_come_from_the_server(results: dict[str, Any], source: str) -> None:
    assert results[source] == expected("inner")


def test_explain_knows_the_join(results: dict[str, Any]) -> None:
    assert "inner on k" in results["explain"]


def test_flow_is_refused_with_what_to_do_instead(results: dict[str, Any]) -> None:
    assert "Spark Connect" in results["flow"]
    assert "classic session" in results["flow"]
