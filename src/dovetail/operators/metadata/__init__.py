"""Joins that use what their inputs promise: punctuations, unique keys, clustered and ordered arrival."""

from dovetail.operators.metadata.join import REASON_COLUMN, MetadataJoin
from dovetail.operators.metadata.metrics import MetadataMetrics
from dovetail.operators.metadata.patterns import Range
from dovetail.operators.metadata.punctuation import Punctuation
from dovetail.operators.metadata.scheduling import Schedule, ScheduledJoin
from dovetail.operators.metadata.spec import Metadata, Order

__all__ = [
    "REASON_COLUMN",
    "Metadata",
    "MetadataJoin",
    "MetadataMetrics",
    "Order",
    "Punctuation",
    "Range",
    "Schedule",
    "ScheduledJoin",
]
