"""Steps that keep a relation, as a pipeline file may say them."""

from pathlib import Path

import pytest

from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.problems import PipelineError

FILE = """\
name: kept
checkpoint: ckpt
sources:
  s: {format: rate, select: [value, timestamp, value AS city]}
relations:
  keys: {path: keys}
  dim: {path: dim}
steps:
  - deduplicate: {relation: keys, on: value, mark: again}
  - history: {relation: dim, on: {value: id}, time: timestamp}
sink: {format: noop}
"""


def check(tmp_path: Path, text: str) -> list[str] | None:
    (tmp_path / "p.yaml").write_text(text)
    columns = check_pipeline(*parse_pipeline(tmp_path / "p.yaml")).columns
    return None if columns is None else list(columns)


def test_columns_after_each_step_are_known(tmp_path: Path) -> None:
    assert check(tmp_path, FILE) == ["id", "city", "again", "valid_from", "valid_to"]
    longer = FILE.replace("sink:", "  - upsert: {relation: more, on: id}\nsink:").replace(
        "  dim:", "  more: {path: m}\n  dim:"
    )
    assert check(tmp_path, longer) == ["id", "city", "again", "valid_from", "valid_to", "change"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("relation: dim", "relation: keys", "Two steps write this relation"),
        ("on: value,", "on: valu,", "no column 'valu'"),
        ("mark: again", "mark: city", "There is already a column 'city'"),
        ("time: timestamp", "time: city2", "no column 'city2'"),
        ("mark: again", "marks: again", "Did you mean 'mark'"),
        ("relation: keys", "relation: kees", "no relation 'kees'"),
    ],
)
def test_what_is_wrong_with_them_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(PipelineError) as raised:
        check(tmp_path, FILE.replace(old, new))
    assert told in str(raised.value)
