"""The directory for a task's own files."""

import os
from pathlib import Path

__all__ = ["local_directory"]


def local_directory() -> Path | None:
    """The executor's local directory, deleted with the application; None outside an executor.

    Spark passes it to its Python workers; several disks are separated by commas.
    """
    first = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return Path(first) if first and os.path.isdir(first) else None
