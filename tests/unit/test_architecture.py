"""The rules that keep the house in order: who may import Spark, and what no file may contain."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SPARK_FREE = [
    "errors",
    "kernels",
    "lab",
    "memory",
    "metrics",
    "model",
    "operators",
    "relation",
    "state",
    "testing",
    "warehouse",
    "workloads",
]
EXISTING = [name for name in SPARK_FREE if importlib.util.find_spec(f"dovetail.{name}") is not None]

# Imports every module of one subpackage, then tells which of the forbidden packages came along.
IMPORT_ALL = """
import importlib, pkgutil, sys
top = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(top, "__path__", []), top.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({name.split(".")[0] for name in sys.modules} & {"pyspark", "py4j", "pandas"}))
"""

SOURCES = ("src", "tests", "benchmarks", "examples", "docs", "scripts", ".ci")
GENERATED = {"__pycache__", ".pytest_cache", ".hypothesis", "spark-warehouse", "metastore_db"}
FOREIGN_TEXT = {
    "a directory of one machine": re.compile(r"(?<![\w.~-])/(?:home|root|work|Users)/\w"),
    "the address of a package registry": re.compile(
        r"https?://[^ \"]*(?:/simple(?:/|\"|$)|/packages/[0-9a-f]{2}/|/maven2|/-/[^ ]*\.tgz)", re.MULTILINE
    ),
    "a package index option": re.compile(r"--(?:(?:extra-)?index-url|find-links|trusted-host)\b"),
}


def project_files() -> Iterator[Path]:
    """Every file that is part of the project: those at the top, and all below the source directories."""
    yield from (path for path in PROJECT.iterdir() if path.is_file())
    for directory in SOURCES:
        for path in (PROJECT / directory).rglob("*"):
            is_generated = any(part in GENERATED or part.endswith(".egg-info") for part in path.parts)
            if path.is_file() and not is_generated:
                yield path


def foreign_text(text: str) -> list[str]:
    """Name each kind of text found that belongs to a machine and not to the project."""
    return [kind for kind, pattern in FOREIGN_TEXT.items() if pattern.search(text)]


def run_python(*arguments: str, environment: dict[str, str] | None = None) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize("name", EXISTING)
def test_layer_below_spark_never_imports_it(name: str) -> None:
    assert run_python("-c", IMPORT_ALL, f"dovetail.{name}") == "[]"


def test_spark_free_layers_are_looked_for_under_their_right_names() -> None:
    assert {"errors", "kernels", "memory", "metrics"} <= set(EXISTING)


def test_import_dovetail_needs_no_java(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    assert run_python("-c", "import dovetail; print(dovetail.__name__)", environment=nowhere) == "dovetail"


def test_no_file_names_a_machine_or_a_package_registry() -> None:
    found = {}
    for path in project_files():
        try:
            kinds = foreign_text(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # binary: nothing a person wrote
        if kinds:
            found[str(path.relative_to(PROJECT))] = kinds
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "home/ann/x.py",
        'path = "/' + 'work/data"',
        "https://registry.example/" + "simple/numpy",
        "https://mirror.example/" + "maven2/org",
        "pip install --index" + "-url x",
    ],
)
def test_text_of_a_machine_is_recognised(text: str) -> None:
    assert foreign_text(text) != []


@pytest.mark.parametrize("text", ["docs/" + "work/plan.md", "https://spark.apache.org/docs", "/tmp/x", "~/" + "work/x"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert foreign_text(text) == []
