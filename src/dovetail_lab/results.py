"""Results as JSON files, one per experiment: measurement, time, machine, versions and verdict."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from dovetail.core.errors import PlanError
from dovetail.core.version import __version__
from dovetail_lab.experiment import Axis, Experiment, Measured, Panel, Series
from dovetail_lab.verdicts import Half, Verdict

__all__ = ["Result", "environment", "read_results"]

FORMAT = 2
_FIRST_FORMAT = 1  # without commit, load and revision; its repeats were of one seed
_PACKAGES = ("numba", "numpy", "pyarrow", "pyspark", "duckdb")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of an experiment.

    Examples
    --------
    >>> panel = Panel("p", Axis("x"), Axis("y"), (Series("s", (1,), (2.0,)),))
    >>> result = Result(experiment="e", size="quick", seed=1, repeats=1, started_at="2026-01-01T00:00:00+00:00",
    ...                 seconds=0.5, machine={}, versions={}, measured=Measured((panel,), {"rows": 10}),
    ...                 verdict=Verdict("confirmed", "2 of 2"))
    >>> Result.from_dict(result.as_dict()) == result
    True
    """

    experiment: str
    size: str
    seed: int
    repeats: int
    started_at: str
    seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    measured: Measured
    verdict: Verdict
    revision: int = 1  # of the experiment's definition
    commit: str = ""  # unknown for results of format 1
    source: str = ""  # digest of the code; see `source_digest`
    load: tuple[float, float] | None = None  # of the machine, before and after
    repeats_are: str = "independent runs with other seeds"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        fields = asdict(self)
        measured = fields.pop("measured")
        verdict = fields.pop("verdict")
        document = {"format": FORMAT, **fields, "verdict": verdict, **measured}
        return {name: _plain(value) for name, value in document.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Read the output of `as_dict`."""
        if document.get("format") not in (_FIRST_FORMAT, FORMAT):
            raise PlanError(f"A result of format {document.get('format')} cannot be read.", hint="Run it again.")
        verdict = dict(document["verdict"])
        verdict["halves"] = tuple(Half(**half) for half in verdict.get("halves", ()))
        if document["format"] == _FIRST_FORMAT:
            later: dict[str, Any] = {"repeats_are": "spans or runs with one seed"}
        else:
            later = {name: document[name] for name in ("revision", "commit", "source", "repeats_are")}
            later["load"] = None if document["load"] is None else tuple(document["load"])
        panels = tuple(_panel_of(panel) for panel in document["panels"])
        names = ("experiment", "size", "seed", "repeats", "started_at", "seconds", "machine", "versions")
        return cls(
            **{name: document[name] for name in names},
            measured=Measured(panels, document["parameters"]),
            verdict=Verdict(**verdict),
            **later,
        )

    def judged_by(self, experiment: Experiment) -> Self:
        """The same measurement, judged by the current experiment; as it was if that measures something else by now."""
        if self.revision != experiment.revision:
            return self
        return replace(self, verdict=experiment.judge(self.measured))

    def write(self, directory: Path) -> Path:
        """Write it atomically; an existing result of the experiment is replaced."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.experiment}.json"
        draft = directory / f".{self.experiment}.{os.getpid()}"
        draft.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)
        return path


def read_results(directory: Path) -> dict[str, Result]:
    """All results in a directory, by experiment name."""
    found = {}
    for path in sorted(directory.glob("*.json")):
        try:
            result = Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, PlanError) as error:
            raise PlanError(
                f"{path} is not a result of the lab: {error}", hint="Remove it, or run it again."
            ) from error
        found[result.experiment] = result
    return found


def environment() -> tuple[dict[str, Any], dict[str, str]]:
    """The current machine and versions, recorded with a result.

    Examples
    --------
    >>> machine, versions = environment()
    >>> machine["cores"] >= 1, "numpy" in versions
    (True, True)
    """
    machine = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    versions = {"dovetail": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return machine, versions


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _panel_of(document: Mapping[str, Any]) -> Panel:
    series = tuple(
        Series(s["name"], *(tuple(s[name]) for name in ("x", "y", "low", "high"))) for s in document["series"]
    )
    return Panel(document["title"], Axis(**document["x"]), Axis(**document["y"]), series, document["mark"])


def _plain(value: Any) -> Any:
    """Round numbers to the precision of a measurement; convert tuples to lists, and numpy numbers to Python's."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
