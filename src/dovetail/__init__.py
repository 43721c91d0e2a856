"""Dovetail: exact joins of fast streams with tables far larger than memory.

>>> import dovetail as dt
>>> import pyarrow as pa, tempfile
>>> relation = dt.Relation.build(pa.table({"k": [1, 2], "name": ["a", "b"]}), tempfile.mkdtemp() + "/r", on="k")
>>> relation.stats.rows
2
"""

import importlib
from typing import TYPE_CHECKING, Any

from dovetail import errors
from dovetail.core.version import __version__

if TYPE_CHECKING:
    from dovetail.joins.calibration import calibrate
    from dovetail.joins.promises import Punctuation
    from dovetail.pipeline.opening import open_pipeline as pipeline
    from dovetail.relation import Relation, SimulatedDisk
    from dovetail.spark import sinks, sources
    from dovetail.spark.flow.query import FlowQuery
    from dovetail.spark.flow.step import Step
    from dovetail.spark.steps.enrich import enrich
    from dovetail.spark.steps.explain import explain
    from dovetail.spark.steps.follow import follow
    from dovetail.spark.steps.multi_join import multi_join
    from dovetail.spark.steps.stream import Flow, stream
    from dovetail.web import metrics
    from dovetail.web.serving import serve

__all__ = [
    "Flow",
    "FlowQuery",
    "Punctuation",
    "Relation",
    "SimulatedDisk",
    "Step",
    "__version__",
    "calibrate",
    "enrich",
    "errors",
    "explain",
    "follow",
    "metrics",
    "multi_join",
    "pipeline",
    "serve",
    "sinks",
    "sources",
    "stream",
]

_HOME = {
    "Flow": "dovetail.spark.steps.stream",
    "FlowQuery": "dovetail.spark.flow.query",
    "Punctuation": "dovetail.joins.promises",
    "Relation": "dovetail.relation",
    "SimulatedDisk": "dovetail.relation",
    "Step": "dovetail.spark.flow.step",
    "calibrate": "dovetail.joins.calibration",
    "enrich": "dovetail.spark.steps.enrich",
    "explain": "dovetail.spark.steps.explain",
    "follow": "dovetail.spark.steps.follow",
    "metrics": "dovetail.web.metrics",
    "serve": "dovetail.web.serving",
    "sinks": "dovetail.spark.sinks",
    "sources": "dovetail.spark.sources",
    "multi_join": "dovetail.spark.steps.multi_join",
    "pipeline": "dovetail.pipeline",
    "stream": "dovetail.spark.steps.stream",
}


def __getattr__(name: str) -> Any:
    # Names are imported when they are first used: `dovetail --help` must not wait for numba, nor a Spark worker for
    # what its task does not need.
    if name not in _HOME:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    if name in ("metrics", "pipeline", "sinks", "sources"):
        return importlib.import_module(_HOME[name])
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
