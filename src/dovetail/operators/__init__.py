"""The public path of the semi-stream joins; they live in `dovetail.joins`."""

from dovetail.joins import *  # noqa: F403
from dovetail.joins import __all__  # noqa: F401
