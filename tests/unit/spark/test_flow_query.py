"""How a flow's query ends, against a model of the order in which Spark ends one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.errors import StateError
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.flow.recording import FlowRecorder
from dovetail.storage.running import RunnerLock


class EndingQuery:
    """Spark's `StreamExecution` between the two moments of a failure: the cause is set, the query has not ended yet.

    `awaitTermination` raises the cause in both; `isActive` changes in the second, which a wait without a limit reaches.
    """

    def __init__(self) -> None:
        self.isActive = True

    def awaitTermination(self, timeout: float | None = None) -> None:  # noqa: N802 -- Spark's name
        if timeout is None:
            self.isActive = False
        raise RuntimeError("Spark's text, with a plan of many lines")

    def exception(self) -> Exception | None:
        return None if self.isActive else RuntimeError("Spark's text, with a plan of many lines")


def query_on(spark: Any, root: Path) -> FlowQuery:
    def fails(df: Any, batch: int) -> None:
        raise StateError("This driver was replaced.")

    protocol: Any = SimpleNamespace(run=fails, checkpoint=root, settle=lambda: None)
    query = FlowQuery(protocol, "orders", RunnerLock(root, "query"), FlowRecorder(root / "dovetail", "orders"))
    query._query = spark  # without the threads of `attach`, which would end it at a moment of their own
    return query


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_error_of_the_micro_batch_is_raised_also_while_spark_is_still_ending(
    tmp_path: Path, timeout: float | None
) -> None:
    query = query_on(EndingQuery(), tmp_path)
    with pytest.raises(Exception, match="StateError: This driver was replaced"):
        query.run_batch(SimpleNamespace(), 0)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="This driver was replaced"):
        query.awaitTermination(timeout)
