"""The reference in the documents is what the models say."""

from pathlib import Path

from dovetail.pipeline.reference import reference_text
from dovetail.pipeline.step_models import STEP_KINDS

REFERENCE = Path(__file__).parents[3] / "docs" / "pipeline-reference.md"


def test_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == reference_text(), (
        "run: python -m dovetail.pipeline.reference > docs/pipeline-reference.md"
    )


def test_every_kind_of_step_is_in_the_reference() -> None:
    text = reference_text()
    for kind in STEP_KINDS:
        assert f"| `{kind}` |" in text
