"""The papers' experiments: one per figure and table, each with the paper's claim, a measurement and a verdict."""

from dovetail_lab.catalogue import experiments, find
from dovetail_lab.experiment import Axis, Context, Experiment, Measured, Panel, Series
from dovetail_lab.results import Result, read_results
from dovetail_lab.runner import Request, Step, run_experiments
from dovetail_lab.verdicts import ChangedCheck, Half, Verdict

__all__ = [
    "Axis",
    "ChangedCheck",
    "Context",
    "Experiment",
    "Half",
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
