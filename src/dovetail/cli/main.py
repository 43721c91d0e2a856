"""The ``dovetail`` command.

Importing this module must stay cheap: Arrow, numba and Spark are imported by the commands that use them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dovetail.cli import pipelines, relation, watching
from dovetail.cli.failures import ExitCode, Failure, failure_of
from dovetail.cli.options import Json
from dovetail.cli.output import output_for
from dovetail.core.version import __version__

# typer brings its own copy of click, or uses click, depending on its release; this is the same class in both.
_CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)

app = typer.Typer(
    name="dovetail",
    help="Exact joins of fast streams with tables far larger than memory.",
    epilog="Exit codes: 0 success; 1 a defect in dovetail; 2 an invalid request; 3 a relation that "
    "cannot be used; 4 a conflict with another writer, try again; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
pipelines.register(app)
watching.register(app)
app.add_typer(relation.app, name="relation")
if importlib.util.find_spec("dovetail_lab") is not None:
    # The lab is a separate, optional package; nothing here depends on it.
    app.add_typer(importlib.import_module("dovetail_lab.cli").app, name="lab")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    json: Json = False,
) -> None:
    if version:
        output_for(json).version(__version__)
        raise typer.Exit
    if json:
        raise typer.BadParameter("use it with --version, or after the command.", context, param_hint="--json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` are by default those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, prog_name="dovetail", standalone_mode=False)
    except _CommandLineError as error:
        # The arguments could not be parsed, so look for --json in the raw arguments.
        _report_usage(error, as_json="--json" in given)
        return ExitCode.REQUEST
    if code == ExitCode.INTERRUPTED and not isinstance(code, ExitCode):
        # typer handled Ctrl-C before a command started, and nothing was reported yet.
        output_for(as_json="--json" in given).failure(failure_of(KeyboardInterrupt()))
    return int(code or ExitCode.OK)


def _report_usage(error: Exception, as_json: bool) -> None:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message:
        return  # a bare command: its help was shown
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "dovetail"
    hint = f"See {command} --help."
    output_for(as_json).failure(Failure(ExitCode.REQUEST, "UsageError", message, hint))


if __name__ == "__main__":
    sys.exit(main())
