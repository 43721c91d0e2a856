"""``dovetail lab``: list and run the papers' experiments, and build the report of their results."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dovetail.cli.failures import Interrupted
from dovetail.cli.interrupts import noticing_interrupts
from dovetail.cli.options import Debug, Json
from dovetail.cli.output import TextOutput
from dovetail.cli.reporting import reporting
from dovetail.core.errors import PlanError

# The lab is imported by the commands that use it, not for --help.
if TYPE_CHECKING:
    from dovetail_lab import Experiment, Result, Step

app = typer.Typer(no_args_is_help=True, help="Run the papers' experiments and compare the results with their claims.")

Results = Annotated[
    Path, typer.Option("--results", metavar="DIR", help="Directory of results, one JSON file per experiment.")
]
_RESULTS = Path("lab-results")


@app.command("list")
def list_command(results: Results = _RESULTS, json: Json = False, debug: Debug = False) -> None:
    """List the experiments, and the verdict of those that have a result in DIR."""
    with reporting(json, debug) as output:
        from dovetail_lab import experiments, read_results

        known = read_results(results)
        lines = [
            {
                "name": experiment.name,
                "paper": experiment.paper,
                "figure": experiment.figure,
                "title": experiment.title,
                "claim": experiment.claim,
                "verdict": known[experiment.name].verdict.outcome if experiment.name in known else "",
            }
            for experiment in experiments()
        ]
        columns = {"name": "left", "figure": "left", "what it shows": "left", "verdict": "left"}
        output.show(
            {"experiments": lines},
            lambda text: text.table(
                columns,
                [[e["name"], f"{e['paper']}, {e['figure']}", e["title"], e["verdict"]] for e in lines],
            ),
        )


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Experiments, as dovetail lab list names them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all of them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The small size: each below a minute.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Skip experiments that have a result of this size.")] = False,
    results: Results = _RESULTS,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where relations are kept between runs; default: the user's cache directory."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of the generators.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="How often a measurement is repeated.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run experiments. Ctrl-C keeps the finished ones; --resume continues with the rest."""
    with reporting(json, debug) as output:
        from dovetail_lab import Request, run_experiments
        from dovetail_lab.runner import DEFAULT_SEED

        chosen = _chosen(names or [], every)
        request = Request(
            experiments=chosen,
            results=results,
            data=data or default_data_directory(),
            is_quick=quick,
            is_resumed=resume,
            seed=DEFAULT_SEED if seed is None else seed,
            repeats=repeats,
        )
        finished: list[str] = []
        with _showing(output.messages) as show, noticing_interrupts() as was_interrupted:

            def report(step: "Step") -> None:
                if step.result is not None:
                    finished.append(step.experiment.name)
                show(step)

            try:
                outcome = run_experiments(request, report)
            except (KeyboardInterrupt, Exception) as error:
                if not isinstance(error, KeyboardInterrupt) and not was_interrupted():
                    raise
                raise Interrupted(
                    f"Interrupted: {len(finished)} finished in this run, kept in {results}. Continue with the same "
                    "command and --resume."
                ) from None
        output.show(
            {"results": str(results), "experiments": [result.as_dict() for result in outcome]},
            lambda text: _print_verdicts(text, chosen, outcome),
        )


@app.command()
def report(
    results: Results = _RESULTS,
    output_directory: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where index.html, index.md and the plots go.")
    ] = Path("lab-report"),
    readme: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A Markdown file whose table of verdicts is updated.", show_default=False),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse results of different commits, or of an earlier definition.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Build the report of the results in DIR: plots, claims, verdicts, as HTML and Markdown."""
    with reporting(json, debug) as output:
        from dovetail_lab import experiments, read_results
        from dovetail_lab.report import write_report, write_summary

        written = write_report(experiments(), results, output_directory, is_strict=strict)
        if readme is not None:
            link = os.path.relpath(written.markdown, readme.parent)
            write_summary(readme, experiments(), read_results(results), link)
        document: dict[str, Any] = {
            "html": str(written.html),
            "markdown": str(written.markdown),
            "verdicts": dict(written.verdicts),
            "missing": list(written.missing),
            "stale": dict(written.stale),
        }

        def render(text: TextOutput) -> None:
            text.line(f"Wrote {written.html} and {written.markdown}: {len(written.verdicts)} experiments.")
            if written.missing:
                text.line(f"Without a result: {', '.join(written.missing)}.")
            if written.stale:
                text.line(f"Not of the newest result's commit, or of an earlier definition: {len(written.stale)}.")

        output.show(document, render)


def default_data_directory() -> Path:
    """The default directory of the lab's relations."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dovetail" / "lab"


def _chosen(names: list[str], every: bool) -> "list[Experiment]":
    from dovetail_lab import experiments, find

    if every and names:
        raise PlanError("--all runs every experiment, so names are not allowed.", hint="Pass names or --all.")
    if not every and not names:
        raise PlanError("Nothing to run.", hint="Pass names, as dovetail lab list shows them, or --all.")
    return list(experiments()) if every else [find(name) for name in dict.fromkeys(names)]


def _print_verdicts(text: TextOutput, chosen: "list[Experiment]", results: "list[Result]") -> None:
    for experiment, result in zip(chosen, results, strict=True):
        text.title(f"{experiment.name}: {result.verdict.outcome}")
        facts = {"claim": experiment.claim, "measured": result.verdict.numbers}
        if result.verdict.explanation:
            facts["why"] = result.verdict.explanation
        text.pairs(facts)


@contextmanager
def _showing(console: Console) -> "Iterator[Callable[[Step], None]]":
    """Show a bar with the remaining time on a terminal, otherwise a line per finished experiment."""
    if not console.is_terminal:

        def tell(step: "Step") -> None:
            if step.result is not None:
                left = f", about {duration(step.seconds_left)} left" if step.number < step.total else ""
                console.print(
                    f"{step.number}/{step.total} {step.experiment.name}: {step.result.verdict.outcome} "
                    f"({step.result.seconds:.0f} s{left})",
                    markup=False,
                    soft_wrap=True,
                )

        yield tell
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=1.0, left="")

        def move(step: "Step") -> None:
            bar.update(
                task,
                completed=step.share_done,
                description=f"{step.number}/{step.total} {step.experiment.name}",
                left=f"{duration(step.seconds_left)} left",
            )
            if step.result is not None:
                bar.console.print(f"{step.experiment.name}: {step.result.verdict.outcome}", markup=False)

        yield move


def duration(seconds: float) -> str:
    """Format a duration for a progress bar.

    Examples
    --------
    >>> duration(42.4), duration(754), duration(7300)
    ('42 s', '13 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
