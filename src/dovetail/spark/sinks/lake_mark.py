"""The mark that a flow leaves in a table: the last micro-batch that it has published there.

A table commits rows and mark in one step, or neither. A receipt names the mark before its own. So a micro-batch is
published onto the one before it and onto nothing else: each step is a compare-and-set, whoever takes it, and two
drivers, two copies of a checkpoint, or an older copy cannot both succeed. A micro-batch without rows leaves no mark.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import StateError
from dovetail.storage.digests import canonical, digest_of

__all__ = ["Mark", "mark_of", "newest_mark", "require_known", "require_next"]

_DIGITS = 15
"""Hexadecimal digits of a digest that are kept: they fit a signed integer of 64 bits."""


@dataclass(frozen=True)
class Mark:
    """A published micro-batch: its number, and the digest of its receipt."""

    batch: int
    digest: str

    def as_dict(self) -> dict[str, Any]:
        return {"batch": self.batch, "digest": self.digest}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any] | None) -> "Mark | None":
        return None if document is None else cls(int(document["batch"]), str(document["digest"]))


def mark_of(receipt: Mapping[str, Any]) -> Mark | None:
    """The mark that publishing a receipt leaves; None if it has no rows.

    >>> mark_of({"batch": 4, "files": [], "last": None}) is None
    True
    """
    if not receipt["files"]:
        return None
    return Mark(receipt["batch"], digest_of(canonical(dict(receipt)))[:_DIGITS])


def newest_mark(receipt: Mapping[str, Any]) -> Mark | None:
    """The mark that the table has once this receipt is published."""
    return mark_of(receipt) or Mark.from_dict(receipt["last"])


def require_known(mark: Mark | None, batch: int | None, receipt: Mapping[str, Any] | None, where: str) -> None:
    """Refuse a table that has other micro-batches of this flow than its checkpoint knows, before a driver begins.

    ``mark`` is the table's; ``batch`` and ``receipt`` are the newest commit's, which may not be published yet.
    """
    if mark is None:
        return  # never published, or the table was made anew: what was published once does not come again
    if batch is None or mark.batch > batch:
        have = "no micro-batch" if batch is None else f"micro-batch {batch}"
        raise StateError(
            f"{where} has micro-batch {mark.batch} of this flow, the checkpoint has {have}: it is an older copy. Going "
            "on would publish rows again.",
            hint="Restore the newest copy of the checkpoint, or start with a new checkpoint and an empty table.",
        )
    if receipt is None or mark in (mark_of(receipt), Mark.from_dict(receipt["last"])):
        return
    known = newest_mark(receipt)
    if known is not None and mark.batch < known.batch and not _is_number_of(mark, receipt):
        raise StateError(
            f"{where} has micro-batch {mark.batch} of this flow as its last, the checkpoint has published later ones: "
            "the table is an older copy of itself.",
            hint="Restore table and checkpoint from copies of one moment, or start with a new checkpoint and an empty "
            "table.",
        )
    raise _other_run(mark, where)


def require_next(mark: Mark | None, receipt: Mapping[str, Any], where: str) -> bool:
    """Whether a receipt must still be published; a `StateError` if somebody else has published in its place."""
    own, last = mark_of(receipt), Mark.from_dict(receipt["last"])
    if mark is not None and mark == own:
        return False
    if mark is None or mark == last:
        return own is not None
    if mark.batch > receipt["batch"] or own is None:
        raise StateError(
            f"This driver was replaced: another one, or a copy of the checkpoint, has taken over {where} for this flow "
            f"and is at micro-batch {mark.batch}. What this one did was not published.",
            hint="Let the other driver run. To run the flow here, stop the other one and start the flow again.",
        )
    raise _other_run(mark, where)


def _is_number_of(mark: Mark, receipt: Mapping[str, Any]) -> bool:
    last = receipt["last"]
    return mark.batch == receipt["batch"] or (last is not None and mark.batch == last["batch"])


def _other_run(mark: Mark, where: str) -> StateError:
    return StateError(
        f"{where} has micro-batch {mark.batch} of this flow from another run than the checkpoint's: a copy of the "
        "checkpoint has taken over the table.",
        hint="Go on with the copy that published last, or start with a new checkpoint and an empty table.",
    )
