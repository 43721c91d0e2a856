"""Dovetail: exact joins of fast streams with tables far larger than memory.

>>> import dovetail as dt
>>> import pyarrow as pa, tempfile
>>> relation = dt.Relation.build(pa.table({"k": [1, 2], "name": ["a", "b"]}), tempfile.mkdtemp() + "/r", on="k")
>>> relation.stats.rows
2
"""

from dovetail import errors
from dovetail.relation import Relation, SimulatedDisk

__version__ = "0.1.0"

__all__ = ["Relation", "SimulatedDisk", "__version__", "errors"]
