"""The experiments of the multi-way MJoin (Viglas, Naughton, Burger, 2003): figures 11 to 13, 15, 17, tables 1 and 3."""

from dovetail_lab.multiway import overflow, plans, probing, windows

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = (
    overflow.FLUCTUATING,
    probing.FIGURE_12,
    windows.FIGURE_13,
    overflow.FIGURE_15,
    plans.FIGURE_17,
    probing.TABLE_1,
    plans.TABLE_3,
)
