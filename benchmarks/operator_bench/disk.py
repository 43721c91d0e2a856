"""Sections ``inl`` and ``hybrid``: strategies without a cache, disk-bound, on the papers' disk and on this one."""

from dovetail.model import tune
from operator_bench.harness import (
    Data,
    DiskName,
    DiskUnderTest,
    KeyOrder,
    Rate,
    Report,
    Stream,
    baseline_rate,
    rate_of,
)

DISKS: tuple[DiskName, ...] = ("simulated", "direct")


def against_index_nested_loops(data: Data, report: Report) -> None:
    """MESHJOIN over index nested loops at every budget (MESHJOIN, figure 6 b)."""
    for disk_name in DISKS:
        report.heading(f"mesh / index nested loops, {disk_name} disk, exponent 0.5, shuffled (bar: at least 10)")
        for percent in data.sizes.budgets:
            mesh = rate_of(data, "mesh", disk_name, percent, data.stream(0.5, "shuffled"))
            inl = baseline_rate(data, DiskUnderTest(disk_name), percent, 0.5, data.sizes.max_seconds)
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
                mesh = rate_of(data, "mesh", disk_name, percent, data.stream(exponent, "shuffled"))
                for order in orders if exponent else orders[:1]:
                    stream = data.stream(exponent, order)
                    hybrid = rate_of(data, "hybrid", disk_name, percent, stream)
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
    disk = DiskUnderTest(disk_name)
    profile, factors = data.profile(stream.zipf), data.factors_for(disk)
    hybrid, mesh = (
        tune(strategy, profile=profile, factors=factors, budget=data.budget(percent)) for strategy in ("hybrid", "mesh")
    )
    return hybrid.service_rate / mesh.service_rate
