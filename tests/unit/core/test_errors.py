"""Every error is ours, is the built-in it resembles, and reads as one text."""

import inspect

import pytest

from dovetail.core import errors
from dovetail.core.errors import BudgetError, DovetailError

ALL_ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_error_has_message_then_hint_as_one_line(kind: type[DovetailError]) -> None:
    error = kind("It broke.", hint="Mend it.")
    assert isinstance(error, DovetailError)
    assert str(error) == "It broke. Mend it."
    assert (error.message, error.hint) == ("It broke.", "Mend it.")


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_error_without_hint_is_its_message(kind: type[DovetailError]) -> None:
    assert str(kind("It broke.")) == "It broke."
    assert kind("It broke.").hint is None


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.PlanError, ValueError),
        (errors.SchemaError, ValueError),
        (errors.BudgetError, ValueError),
        (errors.RelationNotFound, FileNotFoundError),
        (errors.RelationReadOnly, PermissionError),
        (errors.SpillError, OSError),
        (errors.InternalError, RuntimeError),
    ],
)
def test_error_is_also_the_builtin_it_resembles(kind: type[DovetailError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="It broke"):
        raise kind("It broke.")


@pytest.mark.parametrize(
    "kind",
    [errors.RelationNotFound, errors.RelationCorrupt, errors.RelationConflict, errors.RelationReadOnly],
)
def test_relation_errors_share_a_parent(kind: type[DovetailError]) -> None:
    assert issubclass(kind, errors.RelationError)


def test_all_lists_every_error_of_the_module() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("kind", [kind for kind in ALL_ERRORS if kind is not DovetailError])
def test_error_documents_cause_and_remedy(kind: type[DovetailError]) -> None:
    text = inspect.getdoc(kind)
    assert text is not None
    assert "Cause" in text
    assert "What to do" in text or "remedy" in text


def test_budget_error_carries_the_minimum() -> None:
    assert BudgetError("Too small.", minimum_bytes=7).minimum_bytes == 7
    assert BudgetError("Unreadable.").minimum_bytes is None
