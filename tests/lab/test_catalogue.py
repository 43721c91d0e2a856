"""The list of experiments, against the table of the papers' figures in docs/lab."""

import re
from pathlib import Path

from dovetail_lab import experiments

TABLE = Path(__file__).parents[2] / "docs" / "lab" / "experiments.md"
_LINE = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([a-z0-9-]+) \|$", re.MULTILINE)


def test_every_figure_of_the_table_has_its_experiment_and_no_experiment_is_missing_from_it() -> None:
    _, *in_table = [match.groups() for match in _LINE.finditer(TABLE.read_text(encoding="utf-8"))]
    assert [(e.paper, e.figure, e.name) for e in experiments()] == in_table
    assert len(in_table) == 39


def test_an_experiment_says_what_it_shows_and_how_it_is_judged() -> None:
    for experiment in experiments():
        assert experiment.title, experiment.name
        assert experiment.claim.endswith("."), experiment.name
        assert experiment.check.endswith("."), experiment.name
