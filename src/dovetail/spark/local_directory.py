"""Where a task may put files of its own."""

import os
import tempfile

__all__ = ["local_directory"]


def local_directory() -> str:
    """The executor's own directory, which goes with the application; a temporary one where no executor runs."""
    # Spark tells its Python workers; several disks are separated by commas.
    first = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return first if first and os.path.isdir(first) else tempfile.gettempdir()
