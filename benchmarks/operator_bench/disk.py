"""Sections ``inl`` and ``hybrid``: strategies without a cache, disk-bound, on the papers' disk and on this one."""

from dovetail_lab.measure import Rate, baseline_rate, rates_of
from dovetail_lab.subjects import DiskName, DiskUnderTest, KeyOrder, Stream
from operator_bench.harness import Data, Report

DISKS: tuple[DiskName, ...] = ("simulated", "direct")


def against_index_nested_loops(data: Data, report: Report) -> None:
    """MESHJOIN over index nested loops at every budget (MESHJOIN, figure 6 b)."""
    for disk_name in DISKS:
        report.heading(f"mesh / index nested loops, {disk_name} disk, exponent 0.5, shuffled (bar: at least 10)")
        for percent in data.sizes.budgets:
            budget, seconds = data.budget(percent), data.sizes.max_seconds
            (mesh,) = rates_of(data, disk_name, budget, [("mesh", data.stream(0.5, "shuffled"))], seconds)
            inl = baseline_rate(data, DiskUnderTest(disk_name), budget, data.stream(0.5, "shuffled"), seconds)
            ratio = mesh.tuples_per_s / inl.tuples_per_s
            report.add(
                "inl",
                f"{disk_name} {percent:g} %",
                ratio,
                ">= 10",
                ratio >= 10,
                mesh_per_s=mesh.tuples_per_s,
                inl_per_s=inl.tuples_per_s,
            )


def hybrid_against_mesh(data: Data, report: Report) -> None:
    """HYBRIDJOIN over MESHJOIN, shuffled and ranked keys, with the model's ratio beside (HYBRIDJOIN, figure 7 d, e)."""
    orders: tuple[KeyOrder, ...] = ("shuffled", "ranked")
    for disk_name in DISKS:
        report.heading(
            f"hybrid / mesh, {disk_name} disk (bars: above 1 from 5 % and exponent 0.25 on, else at least 85 % of the "
            "model's ratio; never below 0.5)"
        )
        for percent in data.sizes.budgets:
            for exponent in data.sizes.exponents:
                used = orders if exponent else orders[:1]
                runs = [("mesh", data.stream(exponent, "shuffled"))]
                runs += [("hybrid", data.stream(exponent, order)) for order in used]
                mesh, *hybrids = rates_of(data, disk_name, data.budget(percent), runs, data.sizes.max_seconds)
                for order, hybrid in zip(used, hybrids, strict=True):
                    _compare(data, report, disk_name, percent, exponent, order, hybrid, mesh)


def _compare(
    data: Data,
    report: Report,
    disk_name: DiskName,
    percent: float,
    exponent: float,
    order: KeyOrder,
    hybrid: Rate,
    mesh: Rate,
) -> None:
    model = model_ratio(data, disk_name, percent, data.stream(exponent, order))
    ratio = hybrid.tuples_per_s / mesh.tuples_per_s
    if percent >= 5 and exponent >= 0.25:
        bar, is_met = "> 1", ratio > 1
    else:
        bar, is_met = f">= {max(0.5, 0.85 * model):.2f}", ratio >= max(0.5, 0.85 * model)
    report.add(
        "hybrid",
        f"{disk_name} {percent:g} % exponent {exponent:g} {order}",
        ratio,
        bar,
        is_met,
        model=model,
        hybrid_per_s=hybrid.tuples_per_s,
        mesh_per_s=mesh.tuples_per_s,
        b=f"{hybrid.block_rows}/{mesh.block_rows}",
    )


def model_ratio(data: Data, disk_name: DiskName, percent: float, stream: Stream) -> float:
    """What the two models, each tuned for itself, say of the same budget."""
    disk, budget = DiskUnderTest(disk_name), data.budget(percent)
    return data.plan("hybrid", disk, budget, stream).service_rate / data.plan("mesh", disk, budget, stream).service_rate
