"""The experiments of SSBJ (Naeem et al., 2018): a cache of join values against MESHJOIN."""

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail_lab.experiment import ChangedCheck, Context, Experiment, Measured, Verdict
from dovetail_lab.paper import with_points, with_ratio
from dovetail_lab.ssbj.common import MESH, PAPER, SSBJ
from dovetail_lab.ssbj.memory import (
    judge_memory_by_rate,
    judge_memory_by_rows,
    memory_by_rate,
    memory_by_rows,
)
from dovetail_lab.ssbj.other_data import judge_reports, judge_tpch, reports, tpch
from dovetail_lab.ssbj.rates import (
    by_memory,
    by_rows,
    by_skew,
    cache_role,
    judge_by_memory,
    judge_by_rows,
    judge_by_skew,
    judge_cache_role,
)
from dovetail_lab.ssbj.sensitivity import buffer, cost, judge_buffer, judge_cost, judge_switching, switching

__all__ = ["EXPERIMENTS"]


def _experiment(
    figure: str,
    title: str,
    claim: str,
    check: str,
    run: Callable[[Context], Measured],
    judge: Callable[[Measured], Verdict],
    **more: Any,
) -> Experiment:
    return Experiment(
        name=f"ssbj-fig{figure}",
        paper=PAPER,
        figure=figure,
        title=title,
        claim=claim,
        check=check,
        run=run,
        judge=judge,
        **more,
    )


EXPERIMENTS = (
    _experiment(
        "4a",
        "Memory for an arrival rate",
        "MESHJOIN uses about 7 times as much memory as SSBJ at every arrival rate.",
        "MESHJOIN's memory over SSBJ's is above 1.2 everywhere and nearly constant; at least 5 for the paper's factor.",
        memory_by_rate,
        judge_memory_by_rate,
        paper_says="MESHJOIN needs 7 times the memory",
        shown=partial(with_ratio, upper=MESH, lower=SSBJ, everywhere=7.0),
    ),
    _experiment(
        "4b",
        "Memory for a fixed service rate by the size of R",
        "The ratio of the memory that MESHJOIN and SSBJ use falls from 7 to 5 as R grows four times.",
        "The ratio is above 1.2 everywhere and lower for the largest R; at least 4 for the paper's factor.",
        memory_by_rows,
        judge_memory_by_rows,
        paper_says="7 times the memory, falling to 5",
        shown=partial(with_ratio, upper=MESH, lower=SSBJ, ends=(7.0, 5.0)),
    ),
    _experiment(
        "5a",
        "Service rate by memory",
        "SSBJ serves 7 times as much as MESHJOIN with 1 % of R in memory and 8 times with 10 %.",
        "SSBJ / MESHJOIN is above 1.2 everywhere and grows with memory; at least 6 for the paper's factor.",
        by_memory,
        judge_by_memory,
        paper_says="7 times at 1 %, 8 times at 10 %",
        shown=partial(with_ratio, upper=SSBJ, lower=MESH, ends=(7.0, 8.0)),
    ),
    _experiment(
        "5b",
        "Service rate by the size of R, in fixed memory",
        "SSBJ serves 7 times as much as MESHJOIN with the smallest R and 5.7 times with one five times as large.",
        "SSBJ / MESHJOIN is above 1.2 everywhere and lower for the largest R; at least 5 for the paper's factor.",
        by_rows,
        judge_by_rows,
        paper_says="7 times, falling to 5.7",
        shown=partial(with_ratio, upper=SSBJ, lower=MESH, ends=(7.0, 5.7)),
    ),
    _experiment(
        "5c",
        "Service rate by the skew of the stream",
        "From a slight skew on SSBJ serves more than MESHJOIN, the more the greater the skew: 8 times at exponent 1.",
        "SSBJ / MESHJOIN is above 1 at every exponent but 0, and highest, above 1.5, at 1; at least 6 there for the "
        "paper's factor.",
        by_skew,
        judge_by_skew,
        paper_says="about 1 at exponent 0, 8 at 1",
        shown=partial(with_ratio, upper=SSBJ, lower=MESH, ends=(1.0, 8.0)),
        changed_checks=(
            ChangedCheck(
                old="SSBJ / MESHJOIN grows with the exponent and is above 1.5 at 1; at least 6 there for the paper's "
                "factor.",
                new="It is also above 1 at every exponent but 0.",
                reason="The claim begins at a slight skew. By the old check the verdict is confirmed with a different "
                "factor; by the new one it is not confirmed.",
            ),
        ),
    ),
    _experiment(
        "5d",
        "Service rate by memory, TPC-H",
        "With orders as the stream and customers as R, SSBJ serves 3.4 times as much as MESHJOIN with 1 % of R in "
        "memory and 7.4 times with 10 %.",
        "SSBJ / MESHJOIN is above 1.2 everywhere, and the cache answers a tenth of the stream; at least 3 and 6 for "
        "the paper's factors.",
        tpch,
        judge_tpch,
        paper_says="3.4 times at 1 %, 7.4 times at 10 %",
        shown=partial(with_ratio, upper=SSBJ, lower=MESH, ends=(3.4, 7.4)),
        note="The paper says that it adapted the data, not how.",
        changed_checks=(
            ChangedCheck(
                old="SSBJ / MESHJOIN is above 1.2 everywhere; at least 3 and 6 for the paper's factors.",
                new="The cache also answers a tenth of the stream.",
                reason="SSBJ was ahead with a cache that answered nothing, by a flaw of our MESHJOIN: no merit of the "
                "cache. By the old check the verdict is confirmed with a different factor.",
            ),
        ),
    ),
    _experiment(
        "5e",
        "Service rate by memory, cloud reports",
        "On real-life data SSBJ outperforms MESHJOIN under all memory settings.",
        "None: the paper's data cannot be had. Shown is what generated reports give, with two skews.",
        reports,
        judge_reports,
        paper_says="ahead under all memory settings",
        note="Both the reports and their skew are invented.",
        shown=partial(with_ratio, upper=SSBJ, lower=MESH, panels=2),
        changed_checks=(
            ChangedCheck(
                old="SSBJ / MESHJOIN is above 1.05 everywhere with stream and relation skewed alike; at least 3 for "
                "the "
                "paper's factor. Later: by a cache that answers a tenth of the stream.",
                new="Not testable here.",
                reason="Whether SSBJ wins depends on how much more skewed the stream is than the relation, which the "
                "paper does not tell and we chose.",
            ),
        ),
    ),
    _experiment(
        "5f",
        "Stream tuples answered by the cache, by memory",
        "The cache answers 39 % of the tuples with 1 % of R in memory, growing to 54 % from 9 % on.",
        "The share grows with memory, ever less; within 10 points of the paper's at both ends for its factor.",
        cache_role,
        judge_cache_role,
        paper_says="39 % at 1 %, 54 % from 9 % on",
        shown=partial(with_points, points={1.0: 39.0, 9.0: 54.0, 10.0: 54.0}),
    ),
    _experiment(
        "6a",
        "Service rate by the switching factor",
        "The best switching factor is 1; with any other the service rate deteriorates quite markedly.",
        "Factor 1 serves at least 97 % of the best; every other factor at most 90 % of factor 1. A verdict for each.",
        switching,
        judge_switching,
        paper_says="with any other factor markedly worse",
        changed_checks=(
            ChangedCheck(
                old="Factor 1 serves at least 97 % of the best; the worst factor at most 90 % of factor 1.",
                new="Every other factor serves at most 90 % of factor 1, as a verdict of its own.",
                reason="The paper says that with any factor other than 1 the rate deteriorates markedly, not only with "
                "the worst one.",
            ),
        ),
    ),
    _experiment(
        "6b",
        "Service rate of the disk phase by the disk buffer",
        "With a growing disk buffer the service rate of the disk phase improves up to some size and falls beyond it.",
        "The best size is neither the smallest nor the largest.",
        buffer,
        judge_buffer,
    ),
    _experiment(
        "6c",
        "Predicted and measured cost of an iteration, uniform stream",
        "For both algorithms the calculated cost of an iteration closely resembles the measured one.",
        "Within 25 % at every memory; within 15 % to be called close.",
        partial(cost, exponent=0.0),
        judge_cost,
    ),
    _experiment(
        "6d",
        "Predicted and measured cost of an iteration, exponent 1",
        "For both algorithms the calculated cost of an iteration closely resembles the measured one.",
        "Within 25 % at every memory; within 15 % to be called close.",
        partial(cost, exponent=1.0),
        judge_cost,
    ),
)
