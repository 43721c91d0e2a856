"""The rules that keep the house in order: who may import Spark, and what no file may contain."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

# Who may import whom. A package imports only packages listed above it, and of those only those named here; the test
# reads every import statement, also those inside functions. "spark" is split into its rooms, "joins" too.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "storage": {"core"},
    "kernels": {"core"},
    "relation": {"core", "storage", "kernels"},
    "costs": {"core", "kernels"},
    "joins": {"core", "kernels", "relation", "costs"},
    "joins.calibration": {"core", "kernels", "relation", "costs", "joins"},
    "joins.multiway": {"core", "storage", "kernels", "relation", "joins"},
    "joins.promises": {"core", "kernels", "relation", "joins", "joins.multiway"},
    "warehouse": {"core", "kernels", "relation"},
    "runtime": {
        "core",
        "storage",
        "kernels",
        "relation",
        "costs",
        "joins",
        "joins.multiway",
        "joins.promises",
        "warehouse",
    },
    "spark.plan": {"core", "relation", "costs", "joins", "joins.calibration", "runtime"},
    "spark.flow": {"core", "storage", "relation", "runtime", "spark.plan"},
    "spark.steps": {
        "core",
        "storage",
        "relation",
        "costs",
        "joins",
        "joins.multiway",
        "joins.promises",
        "warehouse",
        "runtime",
        "spark.plan",
        "spark.flow",
    },
    "spark.sinks": {"core", "storage", "spark.plan", "spark.flow"},
    "spark.sources": {"core", "runtime", "spark.plan"},
    "pipeline": {
        "core",
        "relation",
        "joins",
        "joins.multiway",
        "joins.promises",
        "spark.plan",
        "spark.flow",
        "spark.steps",
        "spark.sinks",
        "spark.sources",
    },
    "web": {"core", "storage", "relation", "spark.flow", "pipeline"},
    "cli": {"core", "storage", "relation", "costs", "joins.calibration", "spark.plan", "spark.flow", "pipeline", "web"},
    "testing": {"core", "storage", "kernels", "relation", "joins", "spark.flow"},
    "dovetail_lab": {
        "core",
        "kernels",
        "relation",
        "costs",
        "joins",
        "joins.calibration",
        "joins.multiway",
        "joins.promises",
        "runtime",
        "cli",
        "testing",
    },
}
SPARK_FREE = [
    "core",
    "storage",
    "kernels",
    "relation",
    "costs",
    "joins",
    "warehouse",
    "runtime",
    "operators",
    "web",
    "testing",
]
MOST_FILES = 26
"""Files in a folder, `__init__.py` not counted."""

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


@pytest.mark.parametrize("name", SPARK_FREE)
def test_layer_below_spark_never_imports_it(name: str) -> None:
    assert run_python("-c", IMPORT_ALL, f"dovetail.{name}") == "[]"


def modules() -> dict[str, Path]:
    """Every module of the product and the lab, with its file."""
    found = {}
    for top in ("dovetail", "dovetail_lab"):
        for path in (PROJECT / "src" / top).rglob("*.py"):
            parts = path.relative_to(PROJECT / "src").with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str | None:
    """The row of the table that a module belongs to; None for the public names at the top."""
    top, *rest = module.split(".")
    if top == "dovetail_lab":
        return top
    named = [".".join(rest[:depth]) for depth in (2, 1)]
    return next((name for name in named if name in ALLOWED), None)


def imported_by(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("dovetail", "dovetail_lab"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ("dovetail", "dovetail_lab"))


def test_packages_import_only_what_the_table_allows() -> None:
    known = modules()
    forbidden, used = [], set()
    for module, path in known.items():
        room = room_of(module)
        if room is None:
            continue
        for name in imported_by(path, known):
            other = room_of(name)
            if other == room:
                continue
            used.add((room, other))
            if other not in ALLOWED[room]:
                forbidden.append(f"{module} imports {name}")
    assert forbidden == []
    unused = [(room, other) for room, others in ALLOWED.items() for other in others if (room, other) not in used]
    assert unused == [], "the table allows what nobody needs"


def test_table_of_packages_has_no_cycle_and_names_every_package() -> None:
    rooms = list(ALLOWED)
    for room, others in ALLOWED.items():
        assert all(rooms.index(other) < rooms.index(room) for other in others), room
    public = {"dovetail", "dovetail.errors", "dovetail.spark", "dovetail.operators"}
    homeless = [module for module in modules() if room_of(module) is None and module not in public]
    assert [module for module in homeless if not module.startswith("dovetail.operators.")] == []


def test_folders_can_be_taken_in_at_a_glance() -> None:
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_import_dovetail_needs_no_java(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "JAVA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    assert run_python("-c", "import dovetail; print(dovetail.__name__)", environment=nowhere) == "dovetail"


def test_import_dovetail_starts_no_web_server() -> None:
    loaded = run_python(
        "-c", "import dovetail, sys; print({'starlette', 'uvicorn', 'prometheus_client'} & {*sys.modules})"
    )
    assert loaded == "set()"


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
