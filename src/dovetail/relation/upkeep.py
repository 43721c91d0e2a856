"""What keeps a relation current from outside: methods of `Relation` that other packages do the work of."""

import importlib
from typing import TYPE_CHECKING, Any

from dovetail.storage.files import RelationFiles, storage_errors

if TYPE_CHECKING:
    from dovetail.relation.erasing import ErasureReport

__all__ = ["Upkeep"]


class Upkeep:
    """Methods that are imported when they are called: reading a relation must require neither Spark nor them."""

    _files: RelationFiles

    def follow(self, source: Any, **options: Any) -> Any:
        """Keep this relation current with a table, from a stream of its changes; see `dovetail.follow`.

        Parameters
        ----------
        source
            A streaming DataFrame with a row per change, such as those of `dovetail.sources`.
        options
            ``checkpoint=`` and the others of `dovetail.follow`; ``keys=`` is this relation's key by default.

        Returns
        -------
        FlowQuery
            The running flow. Its versions are seen by `Relation.open`; this object stays at its own.
        """
        return importlib.import_module("dovetail.spark.steps.follow").follow(self, source, **options)

    def erase(self, keys: Any) -> "ErasureReport":
        """Remove all rows of some keys from every version and every file of the relation, for good.

        Segments with such rows, also deleted ones, are written again without them, and the manifests of their versions
        are replaced; versions keep their numbers. What others have copied is not reached: the report names it. An
        erasure that was interrupted is completed by repeating it.

        Queries that run may fail once, because files that they read were removed; they find the new ones when they
        open the relation again.

        Parameters
        ----------
        keys
            Values of the key; for a key of several columns, tuples of them; or an Arrow table with the key's columns.

        Examples
        --------
        >>> import tempfile, pyarrow as pa
        >>> from dovetail.relation import Relation
        >>> first = Relation.build(pa.table({"k": ["ann", "bob"], "n": [1, 2]}), tempfile.mkdtemp() + "/r", on="k")
        >>> second = first.upsert(pa.table({"k": ["ann"], "n": [3]}))
        >>> report = second.erase(["ann"])
        >>> report.rows, report.versions
        (2, (1, 2))
        >>> [Relation.open(first.path, version).to_arrow().to_pylist() for version in (1, 2)]
        [[{'k': 'bob', 'n': 2}], [{'k': 'bob', 'n': 2}]]
        """
        erasing = importlib.import_module("dovetail.relation.erasing")
        with storage_errors(self._files.writable()):
            report: ErasureReport = erasing.erase(self._files, keys)
        return report
