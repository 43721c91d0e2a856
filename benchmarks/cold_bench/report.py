"""The figures as a table of ratios, and as a plot."""

from pathlib import Path

from cold_bench.contenders import Figure

_OURS = ("lookup", "auto", "enrich")


def table(figures: list[Figure], device_reads_per_s: float) -> str:
    """One line per contender and distribution; ratios are to the faster of our joins."""
    lines = [
        f"{'contender':<10}{'keys':<9}{'first ms':>10}{'median ms':>10}{'CPU s':>8}{'MB read':>9}{'reads/row':>10}"
        f"{'of device':>10}{'ratio':>8}"
    ]
    for exponent in sorted({figure.exponent for figure in figures}, reverse=True):
        mine = [figure for figure in figures if figure.exponent == exponent]
        best = min((figure.median_s for figure in mine if figure.contender in _OURS), default=None)
        for figure in mine:
            reads = figure.median_read_bytes / 4096
            share = reads / figure.median_s / device_reads_per_s
            ratio = "" if best is None else f"{figure.median_s / best:.2f}"
            lines.append(
                f"{figure.contender:<10}{'Zipf 1' if exponent else 'uniform':<9}{figure.seconds[0] * 1000:>10,.0f}"
                f"{figure.median_s * 1000:>10,.0f}{figure.median_cpu_s:>8.2f}{figure.median_read_bytes / 1e6:>9,.0f}"
                f"{reads / figure.distinct:>10.2f}{share:>10.0%}{ratio:>8}"
            )
    return "\n".join(lines)


def plot(figures: list[Figure], path: Path) -> None:
    """Milliseconds per micro-batch of everybody, from the first, cold one on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    exponents = sorted({figure.exponent for figure in figures}, reverse=True)
    picture, axes = pyplot.subplots(1, len(exponents), figsize=(5 * len(exponents), 4), squeeze=False, sharey=True)
    for axis, exponent in zip(axes[0], exponents, strict=True):
        for figure in figures:
            if figure.exponent == exponent:
                axis.plot([1000 * taken for taken in figure.seconds], marker="o", label=figure.contender)
        axis.set_title("Zipf's law, exponent 1" if exponent else "uniform keys", fontsize=10)
        axis.set_xlabel("micro-batch")
        axis.set_yscale("log")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("milliseconds")
    axes[0][-1].legend(fontsize=9)
    picture.tight_layout()
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
