"""A pipeline file as data, with the line number of every key and item.

The YAML dialect is restricted: only ``true`` and ``false`` are booleans, so ``on`` is a plain name; a repeated key is
an error; anchors and tags are not supported.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dovetail.core.errors import PlanError
from dovetail.pipeline.problems import PipelineError, Problem

__all__ = ["Document", "Location", "load_document", "place_of"]

Location = tuple[str | int, ...]

_MOST_BYTES = 1 << 20
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|(\{[^}]*\}?))")
_SECRET_NAME = re.compile(r"passw|secret|token|credential|api_?key", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?$")


@dataclass(frozen=True)
class Document:
    """The content of a file."""

    path: Path
    data: Any
    lines: Mapping[Location, int]  # the line of each key and item, by its path of keys

    def line_of(self, location: Location) -> int:
        """The line of a path of keys, or of the nearest enclosing one in the file."""
        here: Location = ()
        for part in location:
            if (*here, part) in self.lines:
                here = (*here, part)
        return self.lines.get(here, 1)

    def in_file(self, location: Location) -> Location:
        """Remove the parts of a path of keys that are not in the file, except for a missing last one."""
        here: Location = ()
        for number, part in enumerate(location):
            if (*here, part) in self.lines or number == len(location) - 1:
                here = (*here, part)
        return here

    def problem(self, location: Location, message: str, hint: str = "") -> Problem:
        return Problem(self.line_of(location), place_of(self.in_file(location)), message, hint)


def place_of(location: Location) -> str:
    """Format a path of keys.

    >>> place_of(("steps", 0, "enrich", "on"))
    'steps[0].enrich.on'
    """
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def load_document(path: str | os.PathLike[str], variables: Mapping[str, str] | None = None) -> Document:
    """Read a file; ``${NAME}`` and ``${NAME:-default}`` come from ``variables``, by default the environment."""
    file = Path(path)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise PlanError(f"{file} has {file.stat().st_size:,} bytes, which is too large for a pipeline file.")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{file} is not UTF-8 text.", hint="Name a pipeline file.") from None
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}.", hint="Name a pipeline file.") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 0 if mark is None else mark.line + 1
        why = " ".join(part for part in (error.problem, error.context) if part)
        raise PipelineError(file, [Problem(line, "", f"This is not YAML: {why}.")]) from None
    except yaml.YAMLError as error:
        raise PipelineError(file, [Problem(0, "", f"This is not YAML: {str(error).splitlines()[0]}.")]) from None
    reader = _Reader(os.environ if variables is None else variables)
    data = None if root is None else reader.value(root, ())
    if not reader.problems and not isinstance(data, dict):
        reader.problems.append(Problem(1, "", "The file is empty, or not a mapping.", "Start with name: and sources:."))
    if reader.problems:
        raise PipelineError(file, reader.problems)
    return Document(file, data, reader.lines)


class _Reader:
    """Converts YAML nodes to data."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._variables = variables

    def value(self, node: yaml.Node, at: Location) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*at, number)) for number, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, at)

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._wrong(key, at, "A key must be a name.")
                continue
            here = (*at, str(key.value))
            if key.value in found:
                self._wrong(key, here, "This key is given twice.", f"The first one is in line {self.lines[here]}.")
                continue
            self.lines[here] = key.start_mark.line + 1
            found[key.value] = self.value(value, here)
        return found

    def _scalar(self, node: yaml.ScalarNode, at: Location) -> Any:
        text = str(node.value)
        if node.style is not None:
            return self._substituted(text, node, at)
        if text in ("", "~", "null"):
            return None
        if "$" in text:
            text = self._substituted(text, node, at)
        if text in ("true", "false"):
            return text == "true"
        if _INTEGER.match(text):
            return int(text.replace("_", ""))
        return float(text) if _NUMBER.match(text) else text

    def _substituted(self, text: str, node: yaml.Node, at: Location) -> str:
        def replaced(match: re.Match[str]) -> str:
            dollar, name, default, other = match.groups()
            if dollar:
                return "$"
            if other is not None:
                self._wrong(
                    node, at, f"${other} is not a variable.", "Write ${NAME} or ${NAME:-default}; $$ is a dollar."
                )
                return ""
            if _SECRET_NAME.search(name):
                self._wrong(
                    node,
                    at,
                    f"${{{name}}} would put a secret into plain text.",
                    f"Write {{env: {name}}} or {{file: PATH}} where a password is expected.",
                )
                return ""
            if name in self._variables:
                return self._variables[name]
            if default is None:
                self._wrong(node, at, f"The environment has no variable {name}.", f"Set it, or write ${{{name}:-...}}.")
            return default or ""

        return _VARIABLE.sub(replaced, text)

    def _wrong(self, node: yaml.Node, at: Location, message: str, hint: str = "") -> None:
        self.problems.append(Problem(node.start_mark.line + 1, place_of(at), message, hint))
