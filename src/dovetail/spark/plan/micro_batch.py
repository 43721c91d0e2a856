"""The micro-batch and the run of the current task, from Spark's task context."""

from pyspark import TaskContext

from dovetail.core.errors import InternalError

__all__ = ["BATCH_ID_PROPERTY", "QUERY_ID_PROPERTY", "current_micro_batch", "current_run"]

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


def current_micro_batch() -> tuple[str, int] | None:
    """The ids of the query and micro-batch of this task; None outside a streaming query."""
    context = TaskContext.get()
    if context is None:
        raise InternalError("a version can be pinned only inside a Spark task.")
    query, batch = (context.getLocalProperty(name) for name in (QUERY_ID_PROPERTY, BATCH_ID_PROPERTY))
    return None if query is None or batch is None else (query, int(batch))


def current_run() -> tuple[int, int]:
    """The numbers of the partition that this task computes and of this run of it; later runs have higher numbers."""
    context = TaskContext.get()
    if context is None:
        raise InternalError("only a Spark task computes a partition.")
    return context.partitionId(), context.taskAttemptId()
