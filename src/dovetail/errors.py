"""The public path of the errors; they live in `dovetail.core.errors`."""

from dovetail.core.errors import *  # noqa: F403
from dovetail.core.errors import __all__  # noqa: F401
