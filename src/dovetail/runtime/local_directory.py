"""Where a task may put files of its own."""

import os
from pathlib import Path

__all__ = ["local_directory"]


def local_directory() -> Path | None:
    """The executor's own directory, which goes with the application; None where no executor runs.

    Spark tells its Python workers; several disks are separated by commas.
    """
    first = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return Path(first) if first and os.path.isdir(first) else None
