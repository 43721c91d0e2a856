"""Arguments and options shared by several commands, so that they have the same name and help."""

from collections.abc import Sequence
from typing import Annotated

import typer

from dovetail.core.errors import PlanError

_READING = "Reading the data"
_SPARK = "Spark"
_COMMON = "Common"

RelationPath = Annotated[str, typer.Argument(metavar="PATH", help="The relation's directory.", show_default=False)]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="SOURCE", help="Files, directories or patterns to read rows from.", show_default=False),
]
KeySources = Annotated[
    list[str],
    typer.Argument(
        metavar="KEYS_SOURCE",
        help="Files, directories or patterns with the keys to delete; other columns are ignored.",
        show_default=False,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="parquet, csv, json, orc, xml or another format of Spark; by default inferred from the file names.",
        rich_help_panel=_READING,
        show_default=False,
    ),
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of Spark's reader, such as header=true; may be repeated.",
        rich_help_panel=_READING,
        show_default=False,
    ),
]
ReaderSchema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="DDL",
        help="Names and types of the columns, such as 'id bigint, name string'.",
        rich_help_panel=_READING,
        show_default=False,
    ),
]
Master = Annotated[str, typer.Option("--master", metavar="URL", help="Where Spark runs.", rich_help_panel=_SPARK)]
SparkSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        metavar="KEY=VALUE",
        help="A Spark setting, such as spark.driver.memory=4g; may be repeated.",
        rich_help_panel=_SPARK,
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document to stdout, also for errors.", rich_help_panel=_COMMON),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_COMMON)]


def key_values(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Parse a repeated ``KEY=VALUE`` option; the last value of a key wins.

    >>> key_values("--option", ["header=true", "sep=="])
    {'header': 'true', 'sep': '='}
    >>> key_values("--option", ["header"])
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: --option header has no value. Write --option header=VALUE.
    """
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise PlanError(f"{option} {text} has no value.", hint=f"Write {option} {key or 'KEY'}=VALUE.")
        pairs[key] = value
    return pairs
