"""All experiments, paper by paper.

A paper's experiments are a module of this package with a tuple ``EXPERIMENTS``; it is named here, and each of its
figures has a line in ``docs/lab/README.md``.
"""

from functools import cache
from importlib import import_module

from dovetail.errors import InternalError, PlanError
from dovetail.lab.experiment import Experiment

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
        found.extend(import_module(f"dovetail.lab.{name}").EXPERIMENTS)
    names = [experiment.name for experiment in found]
    if len(set(names)) != len(names):
        raise InternalError(f"Two experiments have the same name: {sorted(n for n in names if names.count(n) > 1)}.")
    return tuple(found)


def find(name: str) -> Experiment:
    """The experiment of that name.

    Examples
    --------
    >>> find("meshjoin-fig6b").figure
    '6b'
    >>> find("meshjoin-fig9")
    Traceback (most recent call last):
    dovetail.errors.PlanError: There is no experiment 'meshjoin-fig9'. dovetail lab list names them all.
    """
    for experiment in experiments():
        if experiment.name == name:
            return experiment
    raise PlanError(f"There is no experiment {name!r}.", hint="dovetail lab list names them all.")
