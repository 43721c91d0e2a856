"""Joins that use what their inputs promise: punctuations, unique keys, clustered and ordered arrival."""

from dovetail.joins.promises.join import REASON_COLUMN, MetadataJoin
from dovetail.joins.promises.metrics import MetadataMetrics
from dovetail.joins.promises.patterns import Range
from dovetail.joins.promises.punctuation import Punctuation
from dovetail.joins.promises.scheduling import Schedule, ScheduledJoin
from dovetail.joins.promises.spec import Metadata, Order
from dovetail.joins.promises.tree import MetadataTree

__all__ = [
    "REASON_COLUMN",
    "Metadata",
    "MetadataJoin",
    "MetadataMetrics",
    "MetadataTree",
    "Order",
    "Punctuation",
    "Range",
    "Schedule",
    "ScheduledJoin",
]
