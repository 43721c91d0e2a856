"""The transformations of an active warehouse, as functions of Arrow data: no Spark is needed to import it.

A *kept relation* is one that a flow owns: its current rows are those of a version on disk, overlaid by what the flow
has changed since, which is the flow's state (`kept_rows`). From time to time the driver folds the changes into a new
version.
"""
