"""The bitmap of a segment's deleted rows."""

import numpy as np
import numpy.typing as npt

from dovetail.core.errors import RelationCorrupt
from dovetail.relation.format import Deletions
from dovetail.storage.digests import digest_of
from dovetail.storage.files import RelationFiles

__all__ = ["load_deletions", "missing_file"]


def missing_file(path: str) -> RelationCorrupt:
    """The error for a file of an open version that is gone."""
    return RelationCorrupt(
        f"{path} is missing: it was vacuumed or deleted while in use. Open the newest version, or restore the file."
    )


def load_deletions(files: RelationFiles, shard: int, deletions: Deletions) -> npt.NDArray[np.uint8]:
    """Read and verify the bitmap of a segment's deleted rows."""
    name = f"data/{shard}/{deletions.name}"
    if files.size(name) is None:
        raise missing_file(files.path(name))
    data = files.read(name)
    if digest_of(data) != deletions.digest:
        raise RelationCorrupt(
            f"{files.path(name)} does not match its digest: it is damaged. Restore the file from a copy, or build the "
            "relation again."
        )
    return np.frombuffer(data, np.uint8)
