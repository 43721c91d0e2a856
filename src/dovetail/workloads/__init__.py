"""Generators of the papers' workloads: seeded, vectorised, tested against their distributions."""

from dovetail.workloads.tables import make_relation_table, make_stream_batch, relation_batches
from dovetail.workloads.zipf import Zipf

__all__ = ["Zipf", "make_relation_table", "make_stream_batch", "relation_batches"]
