"""The transformations of an active warehouse, as functions on Arrow data. Importing it does not need Spark.

A *kept relation* is owned by a flow. Its current rows are those of a version on disk, overlaid with the changes since
then, which are part of the flow's state (`kept_rows`). The driver regularly folds the changes into a new version.
"""
