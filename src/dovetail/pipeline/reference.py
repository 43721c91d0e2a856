"""The reference of pipeline files, generated from the models: ``python -m dovetail.pipeline.reference``."""

import sys
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.pipeline import models, step_models
from dovetail.pipeline.secrets import Secret

__all__ = ["reference_text"]

_SECTIONS: dict[str, list[tuple[str, type[BaseModel]]]] = {
    "The file": [("", models.Pipeline)],
    "Sources": [
        ("json, csv, parquet, xml, orc", models.FileSource),
        ("kafka", models.KafkaSource),
        ("rate", models.RateSource),
        ("bursty", models.BurstySource),
        ("debezium", models.DebeziumSource),
        ("delta", models.DeltaSource),
        ("iceberg", models.IcebergSource),
    ],
    "Relations": [
        ("", models.RelationEntry),
        ("build from json, csv, parquet, xml, orc", models.TableFiles),
        ("build from jdbc", models.JdbcTable),
    ],
    "Steps": [
        ("", step_models.Step),
        ("enrich", step_models.EnrichModel),
        ("multi_join", step_models.MultiJoinModel),
        ("surrogate_key", step_models.SurrogateKeyModel),
        ("deduplicate", step_models.DeduplicateModel),
        ("detect_changes", step_models.DetectChangesModel),
        ("upsert", step_models.UpsertModel),
        ("history", step_models.HistoryModel),
        ("follow", step_models.FollowModel),
        ("wait_for", step_models.WaitForModel),
    ],
    "Sinks": [
        ("parquet", models.ParquetSink),
        ("delta", models.DeltaSink),
        ("iceberg", models.IcebergSink),
        ("postgres", models.PostgresSink),
        ("kafka", models.KafkaSink),
        ("console", models.ConsoleSink),
        ("noop", models.NoopSink),
    ],
    "Small things": [
        ("watermark", models.Watermark),
        ("dead_letter", models.DeadLetter),
        ("expired, shed_to, late, quarantine", step_models.SideOutput),
        ("statistics", step_models.StatisticsModel),
        ("a punctuation", step_models.PunctuationModel),
        ("a secret", Secret),
    ],
}


def reference_text() -> str:
    """The reference as Markdown."""
    lines = ["# Pipeline reference", "", "Generated from the models by `python -m dovetail.pipeline.reference`. See"]
    lines[-1] += " [pipelines](pipelines.md) for an introduction."
    for section, parts in _SECTIONS.items():
        lines += ["", f"## {section}"]
        for title, model in parts:
            lines += ["", *([f"### {title}", ""] if title else []), *_table(model)]
    return "\n".join(lines) + "\n"


def _table(model: type[BaseModel]) -> list[str]:
    summary = (model.__doc__ or "").strip().splitlines()[0]
    lines = [summary, "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if field.description is None and name != "format":
            continue
        meaning = (field.description or "Selects the kind.").replace("|", "\\|")
        lines.append(f"| `{field.alias or name}` | {_kind(field.annotation)} | {_default(field)} | {meaning} |")
    return lines


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, UnionType):
        parts = [_kind(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin is list:
        return f"list of {_kind(get_args(annotation)[0])}"
    if origin is dict:
        return f"mapping to {_kind(get_args(annotation)[1])}"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _kind(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`{env: NAME}` or `{file: PATH}`" if annotation is Secret else "mapping"
    return {str: "text", int: "number", float: "number", bool: "`true`, `false`"}.get(annotation, "any")


if __name__ == "__main__":
    sys.stdout.write(reference_text())
