"""The papers' experiments: one per figure and table, each with the paper's claim, a measurement and a verdict."""

from dovetail_lab.catalogue import experiments, find
from dovetail_lab.experiment import Axis, Context, Experiment, Measured, Panel, Series, Verdict
from dovetail_lab.results import Result, read_results
from dovetail_lab.runner import Request, Step, run_experiments

__all__ = [
    "Axis",
    "Context",
    "Experiment",
    "Measured",
    "Panel",
    "Request",
    "Result",
    "Series",
    "Step",
    "Verdict",
    "experiments",
    "find",
    "read_results",
    "run_experiments",
]
