"""Pipeline files: a dataflow in one YAML file, validated before anything starts.

>>> import tempfile, pathlib
>>> file = pathlib.Path(tempfile.mkdtemp()) / "orders.yaml"
>>> _ = file.write_text("name: orders\\ncheckpoint: ckpt\\nsources:\\n  o: {format: rate}\\nsink: {format: consol}\\n")
>>> load_pipeline(file)
Traceback (most recent call last):
dovetail.pipeline.problems.PipelineError: ...orders.yaml:5: sink.format: 'consol' is not a known format. Did you mean \
'console'?
"""

import sys
from types import ModuleType
from typing import Any

from dovetail.pipeline.loading import json_schema, load_pipeline
from dovetail.pipeline.models import Pipeline
from dovetail.pipeline.opening import OpenedPipeline, open_pipeline
from dovetail.pipeline.problems import PipelineError, Problem

__all__ = [
    "OpenedPipeline",
    "Pipeline",
    "PipelineError",
    "Problem",
    "json_schema",
    "load_pipeline",
    "open_pipeline",
]


class _CallableModule(ModuleType):
    """`dt.pipeline` is this package, whatever was imported first; so the package itself opens files."""

    def __call__(self, *arguments: Any, **named: Any) -> OpenedPipeline:
        return open_pipeline(*arguments, **named)


sys.modules[__name__].__class__ = _CallableModule
