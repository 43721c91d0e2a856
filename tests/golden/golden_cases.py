"""Flows whose checkpoints are kept; their definitions serve to make the copies and to test them.

A checkpoint belongs to the definition of its flow. So a definition changes only together with its copy, and a flow that
shall be defined otherwise is a new case.
"""

from golden_enrich import ENRICH
from golden_kept import KEPT
from golden_multi import MULTI

CASES = [*ENRICH, *MULTI, *KEPT]
