"""Generators of the papers' workloads: seeded, vectorised, tested against their distributions."""

from dovetail.runtime.generator.bursty import BurstyArrivals, BurstyStream
from dovetail.runtime.generator.zipf import Zipf
from dovetail_lab.workloads.arrivals import ArrivalPhase, arrival_order, arrival_slices, poisson_times
from dovetail_lab.workloads.bursty_files import hurst_exponent, write_bursty_files
from dovetail_lab.workloads.clouds import cloud_reports, load_cloud_reports
from dovetail_lab.workloads.news import NewsWorkload
from dovetail_lab.workloads.sizes import PAPER_DATA, PaperData
from dovetail_lab.workloads.tables import make_relation_table, make_stream_batch, relation_batches
from dovetail_lab.workloads.tpch import make_tpch, read_tpch
from dovetail_lab.workloads.wisconsin import wisconsin_relation

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
