"""Directories of table formats whose Parquet files are not all rows of the table."""

import os

__all__ = ["table_format_of"]


def table_format_of(directory: str) -> str | None:
    """The table format that a local directory is in: ``"Delta"``, ``"Iceberg"``, or None.

    Its files also hold rows that were deleted or replaced; only its log says which.
    """
    if os.path.isdir(os.path.join(directory, "_delta_log")):
        return "Delta"
    metadata = os.path.join(directory, "metadata")
    if os.path.isdir(metadata) and any(name.endswith(".metadata.json") for name in os.listdir(metadata)):
        return "Iceberg"
    return None
