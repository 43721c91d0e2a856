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

if TYPE_CHECKING:
    from dovetail.model import calibrate
    from dovetail.operators.metadata import Punctuation
    from dovetail.relation import Relation, SimulatedDisk
    from dovetail.spark import sinks
    from dovetail.spark.enrich import enrich
    from dovetail.spark.explain import explain
    from dovetail.spark.flow import stream
    from dovetail.spark.multi_join import multi_join

__version__ = "0.1.0"

__all__ = [
    "Punctuation",
    "Relation",
    "SimulatedDisk",
    "__version__",
    "calibrate",
    "enrich",
    "errors",
    "explain",
    "multi_join",
    "sinks",
    "stream",
]

_HOME = {
    "Punctuation": "dovetail.operators.metadata",
    "Relation": "dovetail.relation",
    "SimulatedDisk": "dovetail.relation",
    "calibrate": "dovetail.model",
    "enrich": "dovetail.spark.enrich",
    "explain": "dovetail.spark.explain",
    "sinks": "dovetail.spark.sinks",
    "multi_join": "dovetail.spark.multi_join",
    "stream": "dovetail.spark.flow",
}


def __getattr__(name: str) -> Any:
    # Names are imported when they are first used: `dovetail --help` must not wait for numba, nor a Spark worker for
    # what its task does not need.
    if name not in _HOME:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    if name == "sinks":
        return importlib.import_module("dovetail.spark.sinks")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
