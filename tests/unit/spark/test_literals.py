"""The literal types of options name exactly what is accepted, so that a type checker is neither wrong nor silent."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from dovetail.core.errors import PlanError
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins.shedding import SHEDDING
from dovetail.spark.plan.join_plan import _JOIN_TYPES, JoinName, _join_type
from dovetail.spark.steps.enrich import enrich
from dovetail.spark.steps.stream import Flow, ShedName


def test_every_name_of_a_join_type_is_accepted_and_every_accepted_one_is_named() -> None:
    assert {name.replace("_", "") for name in get_args(JoinName)} == set(_JOIN_TYPES)
    assert {_join_type(name) for name in get_args(JoinName)} == {"inner", "left", "semi", "anti"}
    with pytest.raises(PlanError, match="lefft"):
        _join_type("lefft")


def test_shedding_policies_are_those_that_there_are() -> None:
    assert set(get_args(ShedName)) == set(SHEDDING)


@pytest.mark.parametrize("verb", [enrich, Flow.enrich])
def test_public_verbs_have_literal_types_and_unchanged_defaults(verb: Callable[..., Any]) -> None:
    hints, parameters = get_type_hints(verb), inspect.signature(verb).parameters
    assert (hints["how"], hints["strategy"], hints["objective"]) == (JoinName, Strategy, Objective)
    assert get_args(hints["refresh"]) == ("query", "batch")
    defaults = [parameters[name].default for name in ("how", "strategy", "objective", "refresh")]
    assert defaults == ["inner", "auto", "rate", "query"]
