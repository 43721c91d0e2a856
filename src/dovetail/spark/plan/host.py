"""What the driver knows about the hosts: their costs, and how many tasks run at once."""

import os
from functools import cache

from pyspark.sql import SparkSession

from dovetail.costs.host import HostCosts
from dovetail.joins.calibration import host_costs

__all__ = ["concurrent_tasks", "planned_costs"]


@cache
def planned_costs() -> HostCosts:
    """The costs of this host, measured quickly if there is no calibration; executors are assumed to be alike."""
    return host_costs()


def concurrent_tasks(spark: SparkSession) -> int:
    """How many tasks share a budget: as many as the cluster runs at once."""
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none
    if context is None:
        return max(1, os.cpu_count() or 1)
    return max(1, int(context.defaultParallelism))
