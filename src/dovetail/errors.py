"""What can go wrong, one class per cause.

Everything that Dovetail raises on purpose is a `DovetailError`, so one ``except`` clause catches it all; the
class says whose turn it is to act. Where a built-in exception means the same, ours is also that built-in, so
code that expects ``ValueError`` or ``FileNotFoundError`` keeps working.

=====================  ==========================================  ==========================================
class                  cause                                       what to do
=====================  ==========================================  ==========================================
`PlanError`            the request cannot be carried out           change the call as the message says
`SchemaError`          columns or types do not fit                 rename, cast or add the named column
`BudgetError`          not enough declared memory                  raise the budget to the named minimum
`RelationError`        a relation on disk cannot be used           see its four children
`StateError`           saved state is damaged or foreign           restore the checkpoint, or start a new one
`SpillError`           the spill directory takes no more           make room there, or raise the budget
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
    """Root of every error that Dovetail raises on purpose.

    Parameters
    ----------
    message
        One or two sentences: what was wrong, and where.
    hint
        What would work instead. Printed after the message; kept apart for user interfaces.

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


class PlanError(DovetailError, ValueError):
    """The request cannot be carried out as it was written; no data has moved.

    Cause: an unknown option, a combination of options that has no meaning, a join that Spark would refuse.
    What to do: change the call; the message names the option or column and what would work.

    Examples
    --------
    >>> raise PlanError("shards=0: a relation has at least one shard.", hint="Pass shards=1 or more.")
    Traceback (most recent call last):
    dovetail.errors.PlanError: shards=0: a relation has at least one shard. Pass shards=1 or more.
    """


class SchemaError(DovetailError, ValueError):
    """Columns or types do not fit: one is missing, unsupported, or not what it was before.

    Cause: a key column that does not exist or whose type cannot be a key, an upsert or a stream batch whose
    schema differs from the one declared.
    What to do: rename, cast or add the column that the message names.

    Examples
    --------
    >>> raise SchemaError("Key column 'id' is string here, bigint in the relation.", hint="Cast it first.")
    Traceback (most recent call last):
    dovetail.errors.SchemaError: Key column 'id' is string here, bigint in the relation. Cast it first.
    """


class BudgetError(DovetailError, ValueError):
    """Not enough declared memory, or a budget that cannot be read.

    Cause: a budget that is not an amount of memory, one below the minimum that the operator and relation
    need, or one reduced to below what is held at that moment.
    What to do: declare at least the minimum that the message names; `minimum_bytes` has it as a number.

    Parameters
    ----------
    message, hint
        As for `DovetailError`.
    minimum_bytes
        The smallest budget that would have been accepted, where that is known.

    Examples
    --------
    >>> error = BudgetError("budget='4 kB' is below the minimum of 80 kB.", minimum_bytes=80_000)
    >>> error.minimum_bytes
    80000
    """

    def __init__(self, message: str, *, hint: str | None = None, minimum_bytes: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.minimum_bytes = minimum_bytes


class RelationError(DovetailError):
    """A relation on disk cannot be read or written; the last good version is untouched.

    Cause and remedy differ: see `RelationNotFound`, `RelationCorrupt`, `RelationConflict` and
    `RelationReadOnly`. The
    class itself is raised for what none of them covers, such as a path that holds something else.

    Examples
    --------
    >>> raise RelationError("'data/orders' holds files that are not a relation.", hint="Choose another.")
    Traceback (most recent call last):
    dovetail.errors.RelationError: 'data/orders' holds files that are not a relation. Choose another.
    """


class RelationNotFound(RelationError, FileNotFoundError):  # noqa: N818 -- a public name, read as a sentence
    """There is no relation at this path, or not the version asked for.

    Cause: a wrong path, a version that was vacuumed or never existed.
    What to do: check the path; `Relation.versions` lists the versions that can be opened.

    Examples
    --------
    >>> raise RelationNotFound("'data/customers' has no version 7.", hint="Versions 3 to 6 exist.")
    Traceback (most recent call last):
    dovetail.errors.RelationNotFound: 'data/customers' has no version 7. Versions 3 to 6 exist.
    """


class RelationCorrupt(RelationError):  # noqa: N818 -- a public name, read as a sentence
    """A file of the relation is damaged: truncated, altered, or missing. No row of it was returned.

    Cause: a disk fault, an interrupted copy, somebody edited the files.
    What to do: open an older version that does not use the named file, or build the relation again.

    Examples
    --------
    >>> raise RelationCorrupt("Segment 's0-1.arrow' is 100 bytes long, its manifest says 140.")
    Traceback (most recent call last):
    dovetail.errors.RelationCorrupt: Segment 's0-1.arrow' is 100 bytes long, its manifest says 140.
    """


class RelationConflict(RelationError):  # noqa: N818 -- a public name, read as a sentence
    """Another writer committed the version that this writer was about to commit; nothing was mixed.

    Cause: two writers at once.
    What to do: open the relation again and repeat the change, which then applies on top of the other one.

    Examples
    --------
    >>> raise RelationConflict("Version 4 was committed by another writer.", hint="Open again and repeat.")
    Traceback (most recent call last):
    dovetail.errors.RelationConflict: Version 4 was committed by another writer. Open again and repeat.
    """


class RelationReadOnly(RelationError, PermissionError):  # noqa: N818 -- a public name, read as a sentence
    """This path can be read but not written.

    Cause: the file system cannot create a file exclusively, which a safe commit needs, or forbids writing.
    What to do: build on a local disk or through Spark, or ask for permission to write.

    Examples
    --------
    >>> raise RelationReadOnly("'data/ro' cannot create files exclusively, so it is read-only.")
    Traceback (most recent call last):
    dovetail.errors.RelationReadOnly: 'data/ro' cannot create files exclusively, so it is read-only.
    """


class StateError(DovetailError):
    """Saved operator state is damaged, or belongs to something else.

    Cause: a truncated or altered state file; a snapshot of another operator, relation version, shard count or
    format.
    What to do: restore the checkpoint from a copy, or start with a new one. Operator state is unchanged by
    the attempt.

    Examples
    --------
    >>> raise StateError("This snapshot is of 'mesh', the operator is 'hybrid'.", hint="Make a 'mesh'.")
    Traceback (most recent call last):
    dovetail.errors.StateError: This snapshot is of 'mesh', the operator is 'hybrid'. Make a 'mesh'.
    """


class SpillError(DovetailError, OSError):
    """The spill directory cannot take what memory has no room for; the tuples are still in memory.

    Cause: the disk is full, or forbids writing.
    What to do: make room there, or raise the budget. A flow is started again with the same checkpoint; whoever drives
    an operator offers the rest of the batch again: ``metrics.tuples_in`` tells how many tuples were accepted.

    Examples
    --------
    >>> raise SpillError("The spill directory 'spill' is full.")
    Traceback (most recent call last):
    dovetail.errors.SpillError: The spill directory 'spill' is full.
    """


class PromiseError(DovetailError):
    """An input broke a promise that it made: a punctuation, a key constraint, a declared order.

    Cause: the tuple named in the message contradicts what was declared about its input.
    What to do: correct the source, withdraw the promise, or ask for such tuples to be quarantined.

    Examples
    --------
    >>> raise PromiseError("Input 'a' sent k=3 after the punctuation k <= 5.")
    Traceback (most recent call last):
    dovetail.errors.PromiseError: Input 'a' sent k=3 after the punctuation k <= 5.
    """


class InternalError(DovetailError, RuntimeError):
    """A defect in Dovetail: an invariant of ours does not hold.

    Cause: not the caller's.
    What to do: report it with the message and what led to it.

    Examples
    --------
    >>> raise InternalError("The window counts 3 tuples and holds 2.")
    Traceback (most recent call last):
    dovetail.errors.InternalError: The window counts 3 tuples and holds 2.
    """
