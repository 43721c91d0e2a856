"""Pipeline files: a dataflow in one YAML file, validated before anything starts.

>>> import tempfile, pathlib
>>> file = pathlib.Path(tempfile.mkdtemp()) / "orders.yaml"
>>> _ = file.write_text("name: orders\\ncheckpoint: ckpt\\nsources:\\n  o: {format: rate}\\nsink: {format: consol}\\n")
>>> load_pipeline(file)
Traceback (most recent call last):
dovetail.pipeline.problems.PipelineError: ...orders.yaml:5: sink.format: 'consol' is not a known format. Did you mean \
'console'?
"""

from dovetail.pipeline.loading import json_schema, load_pipeline
from dovetail.pipeline.models import Pipeline
from dovetail.pipeline.problems import PipelineError, Problem

__all__ = ["Pipeline", "PipelineError", "Problem", "json_schema", "load_pipeline"]
