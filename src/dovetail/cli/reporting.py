"""The frame around every command: its output, and what becomes of its errors."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dovetail.cli.failures import failure_of
from dovetail.cli.output import Output, output_for


@contextmanager
def reporting(as_json: bool, debug: bool) -> Iterator[Output]:
    """Give a command its output; report an exception there and leave with the exit code that it stands for.

    Examples
    --------
    >>> with reporting(as_json=True, debug=False):
    ...     raise ValueError("no such thing")
    Traceback (most recent call last):
    typer.exceptions.Exit: 1
    """
    output = output_for(as_json)
    try:
        yield output
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc(file=sys.stderr)
        failure = failure_of(error)
        output.failure(failure)
        raise typer.Exit(failure.exit_code) from error
