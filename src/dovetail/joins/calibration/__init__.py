"""Measures the costs of operations on this host."""

from dovetail.joins.calibration.calibrate import calibrate, host_costs

__all__ = ["calibrate", "host_costs"]
