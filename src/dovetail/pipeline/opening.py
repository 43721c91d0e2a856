"""`dt.pipeline`: a pipeline file in Python."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.core.notebook import html_text
from dovetail.pipeline.checks import CheckedPipeline, check_pipeline
from dovetail.pipeline.loading import parse_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dovetail.pipeline.runner import PlannedPipeline
    from dovetail.spark.flow.query import FlowQuery
    from dovetail.spark.steps.stream import Flow, FlowExplanation

__all__ = ["OpenedPipeline", "open_pipeline"]


def open_pipeline(path: str | os.PathLike[str], variables: Mapping[str, str] | None = None) -> "OpenedPipeline":
    """Open a pipeline file and check it; Spark is not started.

    Parameters
    ----------
    path
        A pipeline file, as for ``dovetail run``.
    variables
        The values of ``${NAME}``; by default the environment.

    Raises
    ------
    PipelineError
        With file, line and a hint for every problem.

    Examples
    --------
    >>> import dovetail as dt, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "orders.yaml"
    >>> _ = file.write_text("name: o\\ncheckpoint: c\\nsources:\\n  o: {format: rate}\\nsink: {format: console}\\n")
    >>> dt.pipeline(file)
    Pipeline('o': o -> console; columns timestamp, value)

    ``dt.pipeline(file).start()`` runs it in the current Spark session, and returns a `FlowQuery`.
    """
    return OpenedPipeline(check_pipeline(*parse_pipeline(path, variables)))


class OpenedPipeline:
    """A pipeline file that was checked; made by ``dt.pipeline(path)``."""

    def __init__(self, checked: CheckedPipeline) -> None:
        self._checked = checked

    @property
    def name(self) -> str:
        """The flow's name."""
        return self._checked.pipeline.name

    @property
    def checkpoint(self) -> str:
        """Where the flow's checkpoint is."""
        return self._checked.path(self._checked.pipeline.checkpoint)

    def flow(self, spark: "SparkSession | None" = None) -> "Flow":
        """The flow that the file describes. Relations that are missing are built.

        ``spark`` is the session; by default the active one, or a new one.
        """
        return self._planned(spark).flow

    def explain(self, spark: "SparkSession | None" = None) -> "FlowExplanation":
        """How its stateful steps will run; see `dovetail.explain`."""
        return self.flow(spark).explanation()

    def start(
        self, spark: "SparkSession | None" = None, *, trigger: str | None = None, resume_from: str | None = None
    ) -> "FlowQuery":
        """Run it, or continue it from its checkpoint.

        Parameters
        ----------
        spark
            The session; by default the active one, or a new one.
        trigger
            Instead of the file's: ``"5 seconds"``, or ``"available-now"``.
        resume_from
            The checkpoint of an older form of this pipeline.
        """
        return self._planned(spark).start(trigger, resume_from)

    def _planned(self, spark: "SparkSession | None") -> "PlannedPipeline":
        # A file can be checked without Spark.
        from pyspark.sql import SparkSession

        from dovetail.pipeline.runner import plan_pipeline

        return plan_pipeline(spark or SparkSession.builder.getOrCreate(), self._checked)

    def __repr__(self) -> str:
        columns = "" if self._checked.columns is None else f"; columns {', '.join(self._checked.columns)}"
        return f"Pipeline({self.name!r}: {self._checked.outline()}{columns})"

    def _repr_html_(self) -> str:
        return html_text(repr(self))
