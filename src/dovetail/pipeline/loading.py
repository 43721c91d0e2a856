"""Reading a file into a checked `Pipeline`; pydantic's errors become sentences with a line number."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dovetail.pipeline.documents import Document, Location, load_document
from dovetail.pipeline.models import Pipeline
from dovetail.pipeline.problems import PipelineError, Problem, one_of

__all__ = ["json_schema", "load_pipeline", "parse_pipeline"]

_WANTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def parse_pipeline(
    path: str | os.PathLike[str], variables: Mapping[str, str] | None = None
) -> tuple[Pipeline, Document]:
    """Read and validate a file, without checking the files and services that it names. The error has all problems."""
    document = load_document(path, variables)
    try:
        return Pipeline.model_validate(document.data, by_alias=True, by_name=False), document
    except ValidationError as error:
        problems = [_located(document, dict(detail)) for detail in error.errors(include_url=False)]
    raise PipelineError(document.path, _innermost(problems))


def load_pipeline(path: str | os.PathLike[str], variables: Mapping[str, str] | None = None) -> Pipeline:
    """Read a pipeline file and check it, including the files that it names; see `dovetail.pipeline.checks`.

    ``variables`` are the values of ``${NAME}``; by default the environment. Raises a `PipelineError` with file, line,
    the problem and a hint.
    """
    from dovetail.pipeline.checks import check_pipeline

    pipeline, document = parse_pipeline(path, variables)
    check_pipeline(pipeline, document)
    return pipeline


def json_schema() -> dict[str, Any]:
    """The JSON schema of pipeline files, for editors.

    >>> sorted(json_schema()["properties"])[:3]
    ['checkpoint', 'keep_commits', 'name']
    """
    schema = Pipeline.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Dovetail pipeline"}


# What pydantic calls a type: str, list[str], dict[str,str], constrained-str, function-after[...].
_OF_A_TYPE = re.compile(r"(str|int|float|bool)|(list|dict|tuple|union|constrained|function|nullable|lax)[-\[].*")


def _located(document: Document, detail: dict[str, Any]) -> tuple[Problem, bool]:
    """The problem, and whether it is that of one of several types that the value may have."""
    location = _in_file(document, detail["loc"])
    return _problem(document, location, detail), len(location) < len(detail["loc"])


def _problem(document: Document, location: Location, detail: dict[str, Any]) -> Problem:
    kind = str(detail["type"])
    if kind == "extra_forbidden":
        known = _keys_beside(location[:-1], document)
        return document.problem(location, "There is no such key.", one_of(str(location[-1]), known))
    if kind == "missing":
        return document.problem(location, "This key is missing.", _what_it_is(location, document))
    if kind == "union_tag_not_found":
        return document.problem((*location, "format"), "This key is missing.", "Name the format.")
    if kind == "union_tag_invalid":
        given, known = str(detail["ctx"]["tag"]), str(detail["ctx"]["expected_tags"]).replace("'", "").split(", ")
        return document.problem((*location, "format"), f"{given!r} is not a known format.", one_of(given, known))
    if kind == "literal_error":
        known = str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        return document.problem(location, f"{detail['input']!r} is not known.", one_of(str(detail["input"]), known))
    if kind == "value_error":
        return document.problem(location, str(detail["ctx"]["error"]))
    if kind in _WANTED:
        return document.problem(location, f"This must be {_WANTED[kind]}, not {_shown(detail['input'])}.")
    if kind == "too_short":
        return document.problem(location, "There must be at least one.", _what_it_is(location, document))
    message = str(detail["msg"]).removeprefix("Input should be ")
    return document.problem(location, f"This must be {message}." if message != detail["msg"] else f"{message}.")


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)


def _in_file(document: Document, location: Sequence[int | str]) -> Location:
    """A location without the names that pydantic gives to the types that a value may have."""
    here: Location = ()
    for part in location:
        if (*here, part) in document.lines or not (isinstance(part, str) and _OF_A_TYPE.fullmatch(part)):
            here = (*here, part)
    return here


def _innermost(problems: Sequence[tuple[Problem, bool]]) -> list[Problem]:
    """Keep one problem per value: if a value matches none of several types, each of them reports an error.

    ``problems`` say whether they are of one of several types. The type that fits best is the one that complains about a
    part of the value.
    """
    found: dict[tuple[int, str], tuple[Problem, bool]] = {}
    for problem, is_of_a_type in problems:
        found.setdefault((problem.line, problem.place), (problem, is_of_a_type))
    inner = [problem.place for problem, is_of_a_type in found.values() if is_of_a_type]
    return [
        problem
        for problem, is_of_a_type in found.values()
        if not (is_of_a_type and any(other.startswith((f"{problem.place}.", f"{problem.place}[")) for other in inner))
    ]


def _what_it_is(location: Location, document: Document) -> str:
    model = _model_at(location[:-1], document)
    for name, field in () if model is None else model.model_fields.items():
        if (field.alias or name) == location[-1] and field.description:
            return field.description
    return ""


def _keys_beside(location: Location, document: Document) -> list[str]:
    model = _model_at(location, document)
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def _model_at(location: Location, document: Document) -> type[BaseModel] | None:
    """The model of the mapping at a pydantic location, in which a format follows the key that it discriminates."""
    candidates: list[type[BaseModel]] = [Pipeline]
    for part in location:
        named = [model for model in candidates if part in _formats(model)]
        if named:
            candidates = named
            continue
        inner: list[type[BaseModel]] = []
        for model in candidates:
            for name, field in model.model_fields.items():
                if (field.alias or name) == part:
                    inner = _models_in(field.annotation)
        # A name chosen by the user, or the number of an item, does not select a model.
        candidates = inner or candidates
    return candidates[0] if candidates else None


def _formats(model: type[BaseModel]) -> tuple[str, ...]:
    field = model.model_fields.get("format")
    return () if field is None else get_args(field.annotation)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
