"""The ``dovetail`` command.

Importing this module must stay cheap: Arrow, numba and Spark are imported by the commands that use them.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import dovetail
from dovetail.cli import lab, pipelines, relation
from dovetail.cli.failures import ExitCode, Failure, failure_of
from dovetail.cli.options import Json
from dovetail.cli.output import output_for

# typer brings its own copy of click, or uses click, depending on its release; this is the same class in both.
_CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)

app = typer.Typer(
    name="dovetail",
    help="Exact joins of fast streams with tables far larger than memory.",
    epilog="Exit codes: 0 done; 1 a defect in dovetail; 2 a request that cannot be carried out; 3 a relation that "
    "cannot be used; 4 a conflict with another writer, try again; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
pipelines.register(app)
app.add_typer(relation.app, name="relation")
app.add_typer(lab.app, name="lab")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    json: Json = False,
) -> None:
    if version:
        output_for(json).version(dovetail.__version__)
        raise typer.Exit
    if json:
        raise typer.BadParameter("it goes with --version, or behind the command.", context, param_hint="--json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    arguments
        What follows the command's name; by default the process's own arguments.

    Examples
    --------
    >>> main(["--version", "--json"])
    {
      "name": "dovetail",
      "version": "..."
    }
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, prog_name="dovetail", standalone_mode=False)
    except _CommandLineError as error:
        # The arguments could not be parsed, so whether JSON is wanted is read off them as they are.
        _report_usage(error, as_json="--json" in given)
        return ExitCode.REQUEST
    if code == ExitCode.INTERRUPTED and not isinstance(code, ExitCode):
        # typer's own answer to Ctrl-C, before a command has begun: nobody has said anything yet.
        output_for(as_json="--json" in given).failure(failure_of(KeyboardInterrupt()))
    return int(code or ExitCode.OK)


def _report_usage(error: Exception, as_json: bool) -> None:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message:
        return  # a bare command: its help was shown, and says it all
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dovetail"
    hint = f"See {command} --help."
    output_for(as_json).failure(Failure(ExitCode.REQUEST, "UsageError", message, hint))


if __name__ == "__main__":
    sys.exit(main())
