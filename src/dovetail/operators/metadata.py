"""The public path of promises; they live in `dovetail.joins.promises`."""

from dovetail.joins.promises import *  # noqa: F403
from dovetail.joins.promises import __all__  # noqa: F401
