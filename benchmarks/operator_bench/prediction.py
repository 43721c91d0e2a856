"""Section ``model``: predicted against measured cost of an iteration, over the papers' validation grids."""

from dovetail.costs import BalancedModel, HybridModel, IndexNestedLoopModel, LoopCost, MeshModel
from dovetail_lab.measure import Measurement, baseline_rate, make_operator, measure_by_turns
from dovetail_lab.subjects import ROW_BYTES, DiskUnderTest
from operator_bench.harness import Data, Report

# MESHJOIN, figure 6 a: 5 % of R, b varies; here as a share of that memory.
_MESH_BLOCK_SHARES = (0.003, 0.006, 0.015, 0.03, 0.06, 0.15)
# HYBRIDJOIN, figure 8, and SSBJ, figure 6 c and d (exponents 0 and 1): memory varies.
_BUDGETS = (0.5, 1.0, 5.0, 10.0)
_EXPONENTS = (0.0, 1.0)


def predicted_against_measured(data: Data, report: Report) -> None:
    """Every point on the papers' disk."""
    report.heading("predicted / measured seconds per iteration, simulated disk (bar: 0.85 to 1.15)")
    for share in _MESH_BLOCK_SHARES:
        _point(data, report, "mesh", 5.0, 0.5, int(share * data.budget(5.0).total_bytes / ROW_BYTES))
    for exponent in _EXPONENTS:
        for percent in data.sizes.of_budgets(_BUDGETS):
            for kind in ("mesh", "hybrid", "balanced"):
                _point(data, report, kind, percent, exponent, None)
    for percent in data.sizes.of_budgets(_BUDGETS):
        _baseline_point(data, report, percent)


def _point(data: Data, report: Report, kind: str, percent: float, exponent: float, block_rows: int | None) -> None:
    disk, stream = DiskUnderTest("simulated"), data.stream(exponent, "shuffled")
    profile, factors = data.profile(stream), data.factors_for(disk)
    operator = make_operator(data, kind, disk, data.budget(percent), stream, block_rows)
    (measured,) = measure_by_turns([Measurement(operator, stream, disk)], data.sizes.max_seconds)
    predicted: LoopCost
    if kind == "hybrid":
        predicted = HybridModel(profile, factors).loop(measured.block_rows, measured.window_tuples)
    elif kind == "balanced":
        cached_rows = getattr(operator, "cache").num_rows  # noqa: B009 -- only operators with a cache have it
        disk_tuples = measured.window_tuples / profile.blocks(measured.block_rows)
        predicted = BalancedModel(profile, factors).loop(measured.block_rows, cached_rows, disk_tuples)
    else:
        assert operator.spec.chunk_rows is not None
        predicted = MeshModel(profile, factors).loop(measured.block_rows, operator.spec.chunk_rows)
    _add(report, f"{kind} {percent:g} % exponent {exponent:g} b {measured.block_rows}", predicted, measured.loop_s)


def _baseline_point(data: Data, report: Report, percent: float) -> None:
    disk, exponent = DiskUnderTest("simulated"), 0.5
    stream = data.stream(exponent, "shuffled")
    measured = baseline_rate(data, disk, data.budget(percent), stream, data.sizes.max_seconds)
    profile = data.profile(stream)
    page_bytes = measured.block_rows * profile.relation_row_bytes
    pool_pages = data.budget(percent).total_bytes / page_bytes
    predicted = IndexNestedLoopModel(profile, data.factors_for(disk)).loop(measured.block_rows, pool_pages)
    _add(report, f"index nested loops {percent:g} % exponent {exponent:g}", predicted, measured.loop_s)


def _add(report: Report, point: str, predicted: LoopCost, measured_s: float) -> None:
    ratio = predicted.seconds / measured_s
    report.add(
        "model",
        point,
        ratio,
        "0.85 to 1.15",
        0.85 <= ratio <= 1.15,
        predicted_ms=predicted.seconds * 1e3,
        predicted_cpu_ms=predicted.cpu_seconds * 1e3,
        measured_ms=measured_s * 1e3,
    )
