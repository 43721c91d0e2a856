"""All experiments, paper by paper.

The experiments of a paper are a module of this package with a tuple ``EXPERIMENTS``. The module is listed here, and
each of its figures has a line in ``docs/lab/experiments.md``.
"""

from functools import cache
from importlib import import_module

from dovetail.core.errors import InternalError, PlanError
from dovetail_lab.experiment import Experiment

__all__ = ["experiments", "find"]

_MODULES = ("meshjoin", "ssbj", "hybridjoin", "multiway", "metadata")


@cache
def experiments() -> tuple[Experiment, ...]:
    """Every experiment, in the order of the papers.

    Examples
    --------
    >>> len({experiment.name for experiment in experiments()}) == len(experiments())
    True
    """
    found: list[Experiment] = []
    for name in _MODULES:
        found.extend(import_module(f"dovetail_lab.{name}").EXPERIMENTS)
    names = [experiment.name for experiment in found]
    if len(set(names)) != len(names):
        raise InternalError(f"Two experiments have the same name: {sorted(n for n in names if names.count(n) > 1)}.")
    return tuple(found)


def find(name: str) -> Experiment:
    """Return the experiment with this name.

    Examples
    --------
    >>> find("meshjoin-fig6b").figure
    '6b'
    >>> find("meshjoin-fig9")
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: There is no experiment 'meshjoin-fig9'. dovetail lab list names them all.
    """
    for experiment in experiments():
        if experiment.name == name:
            return experiment
    raise PlanError(f"There is no experiment {name!r}.", hint="dovetail lab list names them all.")
