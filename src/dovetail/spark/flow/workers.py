"""Checks, before any data moves, that workers on other hosts see the checkpoint.

A checkpoint is readable by its user only, and must be the same directory everywhere. On a cluster one small job checks
this before a flow starts. It has as many tasks as run at once, which may not reach all hosts: then the first
micro-batch on such a host fails, before its commit.
"""

import json
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from dovetail.core.errors import StateError
from dovetail.spark.flow.store import FlowStore

__all__ = ["require_shared_checkpoint"]

_SAME, _OTHER_USER, _OTHER_DIRECTORY = "same", "other user", "other directory"


def require_shared_checkpoint(spark: SparkSession, store: FlowStore) -> None:
    """Refuse a cluster whose workers do not see this checkpoint, or may not use it."""
    context = spark.sparkContext
    if context.master.startswith("local["):
        return  # the workers are this process's own
    look = _Look(str(store.root), store.flow_id)
    tasks = context.defaultParallelism
    found = context.parallelize(range(tasks), tasks).mapPartitions(look).collect()
    for what, host, user in found:
        if what == _OTHER_USER:
            raise StateError(
                f"Workers on {host} run as {user}, who may not use {store.root}. A checkpoint is for one user only.",
                hint="Run driver and workers as one user, or start with a checkpoint directory that you have created "
                "yourself, writable by a group that both are in.",
            )
        if what == _OTHER_DIRECTORY:
            raise StateError(
                f"Workers on {host} do not see the flow in {store.root}. Nothing was committed.",
                hint="On a cluster, checkpoint and target must be directories that the driver and all workers mount.",
            )


class _Look:
    """Runs on workers: whether the checkpoint is there, is this flow's, and can be used."""

    def __init__(self, root: str, flow_id: str) -> None:
        self.root, self.flow_id = root, flow_id

    def __call__(self, numbers: Iterator[int]) -> Iterator[tuple[str, str, str]]:
        yield (self._found(), socket.gethostname(), _user())

    def _found(self) -> str:
        root = Path(self.root)
        try:
            identity = json.loads((root / "identity.json").read_text())["id"]
        except PermissionError:
            return _OTHER_USER
        except OSError:
            return _OTHER_DIRECTORY
        if identity != self.flow_id:
            return _OTHER_DIRECTORY
        return _SAME if os.access(root / "state", os.W_OK | os.X_OK) else _OTHER_USER


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
