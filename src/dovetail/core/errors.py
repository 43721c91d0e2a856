"""Exception classes, one per cause.

Every exception that Dovetail raises on purpose is a `DovetailError`, so one ``except`` clause catches them all. Where
a built-in exception has the same meaning, the class also inherits from it: code that expects ``ValueError`` or
``FileNotFoundError`` keeps working.

=====================  ==========================================  ==========================================
class                  cause                                       what to do
=====================  ==========================================  ==========================================
`PlanError`            the request is invalid                      change the call as the message says
`SchemaError`          columns or types do not fit                 rename, cast or add the named column
`BudgetError`          not enough declared memory                  raise the budget to the named minimum
`RelationError`        a relation on disk cannot be used           see its four subclasses
`StateError`           saved state is damaged or foreign           restore the checkpoint, or start a new one
`SpillError`           the spill directory cannot be written       free space there, or raise the budget
`PromiseError`         an input broke its own promise              correct the input or the promise
`InternalError`        a defect in Dovetail                        report it with the message
=====================  ==========================================  ==========================================

Examples
--------
>>> try:
...     raise PlanError("how='outer' is not a join type of enrich.", hint="Use inner, left, semi or anti.")
... except ValueError as error:
...     print(error)
how='outer' is not a join type of enrich. Use inner, left, semi or anti.
"""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "BudgetError",
    "DovetailError",
    "InternalError",
    "PlanError",
    "PromiseError",
    "RelationConflict",
    "RelationCorrupt",
    "RelationError",
    "RelationNotFound",
    "RelationReadOnly",
    "SchemaError",
    "SpillError",
    "StateError",
]


class DovetailError(Exception):
    """Base class of every error that Dovetail raises on purpose.

    Parameters
    ----------
    message
        What was wrong, and where.
    hint
        What would work instead; printed after the message.

    Examples
    --------
    >>> error = DovetailError("The lock is held by another process.", hint="Wait for it to finish.")
    >>> str(error)
    'The lock is held by another process. Wait for it to finish.'
    >>> error.message, error.hint
    ('The lock is held by another process.', 'Wait for it to finish.')
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"

    def as_dict(self) -> dict[str, Any]:
        """The error as a document, sent from a task to the driver: Spark would bury the exception in its own text."""
        return {"class": type(self).__name__, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "DovetailError":
        """The error that `as_dict` described."""
        fields = dict(document)
        error: DovetailError = globals()[fields.pop("class")](fields.pop("message"), **fields)
        return error


class PlanError(DovetailError, ValueError):
    """The request cannot be carried out as written; no data was read or written.

    Cause: an unknown option, an invalid combination of options, or a join that Spark does not support. What to do:
    change the call; the message names the option or column and what would work.
    """


class SchemaError(DovetailError, ValueError):
    """Columns or types do not match: one is missing, unsupported, or has changed.

    Cause: a key column that does not exist or whose type cannot be a key; an upsert or a stream batch whose schema
    differs from the declared one. What to do: rename, cast or add the column that the message names.
    """


class BudgetError(DovetailError, ValueError):
    """The declared memory is too small, or the budget cannot be parsed.

    Cause: a budget that is not an amount of memory, is below the minimum of the operator and relation, or was reduced
    below what is reserved. What to do: declare at least `minimum_bytes`, the smallest budget that would be accepted, if
    known.
    """

    def __init__(self, message: str, *, hint: str | None = None, minimum_bytes: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.minimum_bytes = minimum_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "minimum_bytes": self.minimum_bytes}


class RelationError(DovetailError):
    """A relation on disk cannot be read or written; the last committed version is unchanged.

    Cause: see the subclasses; this class is for causes that none names, such as a path that contains other files.

    What to do: as the message says.
    """


class RelationNotFound(RelationError, FileNotFoundError):  # noqa: N818 -- a public name, read as a sentence
    """There is no relation at this path, or it does not have the requested version.

    Cause: a wrong path, or a version that was vacuumed or never existed. What to do: check the path;
    `Relation.versions` lists the versions that can be opened.
    """


class RelationCorrupt(RelationError):  # noqa: N818 -- a public name, read as a sentence
    """A file of the relation is truncated, altered or missing; none of its rows were returned.

    Cause: a disk fault, an interrupted copy, or a manual edit. What to do: open an older version that does not use the
    named file, or build the relation again.
    """


class RelationConflict(RelationError):  # noqa: N818 -- a public name, read as a sentence
    """Another writer committed the version that this writer was about to commit. Nothing was changed.

    Cause: two concurrent writers. What to do: open the relation again and repeat the change on top of the other one.
    """


class RelationReadOnly(RelationError, PermissionError):  # noqa: N818 -- a public name, read as a sentence
    """This path can be read but not written.

    Cause: the file system does not allow writing, or cannot create a file exclusively, which a safe commit needs.

    What to do: build on a local disk or through Spark, or obtain write permission.
    """


class StateError(DovetailError):
    """Saved operator state is damaged, or belongs to something else; the operator's current state is unchanged.

    Cause: a truncated or altered state file, or a snapshot of another operator, relation version, shard count or
    format. What to do: restore the checkpoint from a copy, or start with a new one.
    """


class SpillError(DovetailError, OSError):
    """Tuples that exceed the memory budget cannot be written to the spill directory. They are still in memory.

    Cause: the disk is full or read-only. What to do: free space or raise the budget, and restart a flow with the same
    checkpoint. Code that drives an operator itself submits the rest of the batch again; ``metrics.tuples_in`` counts
    the accepted tuples.
    """


class PromiseError(DovetailError):
    """An input broke a promise it made: a punctuation, a key constraint, a declared order.

    Cause: the tuple named in the message contradicts a declaration about its input. What to do: correct the source,
    remove the promise, or have such tuples quarantined.
    """


class InternalError(DovetailError, RuntimeError):
    """A defect in Dovetail: an internal invariant does not hold.

    Cause: a bug, not the caller. What to do: report it with the message and the steps that led to it.
    """
