"""Problems of a pipeline file: file, line, message, hint."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import PlanError

__all__ = ["PipelineError", "Problem", "nearest", "one_of"]


@dataclass(frozen=True, order=True)
class Problem:
    """One problem."""

    line: int  # from 1; 0 for the file as a whole
    place: str  # path of keys: ``steps[0].enrich.budget``
    message: str
    hint: str = ""

    def text(self, path: Path) -> str:
        """The problem as one line."""
        where = f"{path}:{self.line}" if self.line else str(path)
        told = f"{self.message} {self.hint}".strip()
        return f"{where}: {self.place}: {told}" if self.place else f"{where}: {told}"


class PipelineError(PlanError):
    """A pipeline file that cannot be run. Nothing was started.

    >>> raise PipelineError(Path("p.yaml"), [Problem(2, "name", "It is missing.", "Add name: orders.")])
    Traceback (most recent call last):
    dovetail.pipeline.problems.PipelineError: p.yaml:2: name: It is missing. Add name: orders.
    """

    def __init__(self, path: Path, problems: Iterable[Problem]) -> None:
        self.path, self.problems = path, sorted(set(problems))
        super().__init__("\n".join(problem.text(path) for problem in self.problems))


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most similar to ``name``."""
    folded = {other.casefold(): other for other in known}
    found = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.55)
    return folded[found[0]] if found else None


def one_of(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown name.

    >>> one_of("budgt", ["budget", "on"])
    "Did you mean 'budget'?"
    >>> one_of("xyz", ["budget", "on"])
    'Known are: budget, on.'
    """
    meant = nearest(name, known)
    if meant is not None:
        return f"Did you mean {meant!r}?"
    return f"Known are: {', '.join(known)}." if known else "There are none."
