"""The frame of every command: output and error handling."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dovetail.cli.failures import failure_of
from dovetail.cli.output import Output, output_for


@contextmanager
def reporting(as_json: bool, debug: bool) -> Iterator[Output]:
    """Yield the output of a command; report an exception there and exit with its exit code."""
    output = output_for(as_json)
    try:
        yield output
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc(file=sys.stderr)
        failure = failure_of(error)
        output.failure(failure)
        raise typer.Exit(failure.exit_code) from error
