"""What keeps a relation current from outside: methods of `Relation` that other packages do the work of."""

import importlib
from typing import Any

__all__ = ["Upkeep"]


class Upkeep:
    """Methods that are imported when they are called: reading a relation must require neither Spark nor them."""

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
