"""The public path of the multi-way join; it lives in `dovetail.joins.multiway`."""

from dovetail.joins.multiway import *  # noqa: F403
from dovetail.joins.multiway import __all__  # noqa: F401
