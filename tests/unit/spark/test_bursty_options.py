"""Options of the bursty source: wrong ones are refused by name."""

import pytest

from dovetail.errors import PlanError
from dovetail.spark.bursty_source import _Options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key": "5"}, "no option 'key'"),
        ({"keys": "many"}, "keys='many'"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"stepMillis": "0"}, "stepsPerBatch"),
        ({"stepMillis": "-1"}, "stepMillis"),
        ({"partitions": "0"}, "partitions"),
        ({"steps": "0"}, "steps=0"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        _Options.parse(options)


def test_names_are_read_without_case() -> None:
    options = _Options.parse({"stepsperbatch": "5", "STEPMILLIS": "0", "Seed": "3"})
    assert (options.stepsPerBatch, options.stepMillis, options.seed) == (5, 0.0, 3)
