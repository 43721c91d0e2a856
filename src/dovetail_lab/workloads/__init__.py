"""Generators of the papers' workloads: seeded, vectorised, tested against their distributions."""

from dovetail.workloads.arrivals import ArrivalPhase, arrival_order, arrival_slices, poisson_times
from dovetail.workloads.bursty import BurstyArrivals, BurstyStream, hurst_exponent, write_bursty_files
from dovetail.workloads.clouds import cloud_reports, load_cloud_reports
from dovetail.workloads.news import NewsWorkload
from dovetail.workloads.sizes import PAPER_DATA, PaperData
from dovetail.workloads.tables import make_relation_table, make_stream_batch, relation_batches
from dovetail.workloads.tpch import make_tpch, read_tpch
from dovetail.workloads.wisconsin import wisconsin_relation
from dovetail.workloads.zipf import Zipf

__all__ = [
    "PAPER_DATA",
    "ArrivalPhase",
    "BurstyArrivals",
    "BurstyStream",
    "NewsWorkload",
    "PaperData",
    "Zipf",
    "arrival_order",
    "arrival_slices",
    "cloud_reports",
    "hurst_exponent",
    "load_cloud_reports",
    "make_relation_table",
    "make_stream_batch",
    "make_tpch",
    "poisson_times",
    "read_tpch",
    "relation_batches",
    "wisconsin_relation",
    "write_bursty_files",
]
