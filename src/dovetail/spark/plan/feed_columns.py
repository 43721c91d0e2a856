"""The columns by which a source of changes tells `follow` what its rows mean, besides the table's own."""

__all__ = ["FEED_COLUMNS", "OPERATION", "PROBLEM", "SEQUENCE"]

OPERATION = "_operation"
"""``"d"`` deletes the key; every other value writes the row."""
SEQUENCE = "_sequence"
"""A whole number that orders the changes of a key."""
PROBLEM = "_problem"
"""Why the row is no change, as text; NULL if it is one."""

FEED_COLUMNS = (OPERATION, SEQUENCE, PROBLEM)
