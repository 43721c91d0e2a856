"""The output of the commands: one interface, with text for people and one JSON document for programs.

Results go to standard output, messages and progress to standard error, so that a pipe carries only the result. With
``--json`` a failure is also a result: it is the one document.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dovetail.cli.failures import ExitCode, Failure
from dovetail.core.memory import format_bytes

Document = Mapping[str, Any]


def output_for(as_json: bool) -> "Output":
    return JsonOutput() if as_json else TextOutput()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Exit silently when the reader has closed the pipe (``| head``), with the usual exit code."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(ExitCode.BROKEN_PIPE) from None


class Output(ABC):
    """One method per kind of result. Documents are plain data, so that both forms have the same content."""

    def __init__(self) -> None:
        self.results = _Console(file=sys.stdout, highlight=False)
        self.messages = _Console(file=sys.stderr, highlight=False)

    @abstractmethod
    def version(self, version: str) -> None:
        """The version of Dovetail."""

    @abstractmethod
    def info(self, document: Document) -> None:
        """One version of a relation."""

    @abstractmethod
    def versions(self, document: Document) -> None:
        """The history of a relation."""

    @abstractmethod
    def written(self, document: Document) -> None:
        """The version created by a build, append, upsert or delete."""

    @abstractmethod
    def vacuumed(self, document: Document) -> None:
        """What a vacuum removed, with totals before and after."""

    @abstractmethod
    def show(self, document: Document, render: "Callable[[TextOutput], None]") -> None:
        """Any other result: the document itself, or the output of ``render``."""

    @abstractmethod
    def failure(self, failure: Failure) -> None:
        """Why the command failed."""


class JsonOutput(Output):
    """Prints every result as the document itself."""

    def _print(self, document: Document) -> None:
        self.results.out(json.dumps(document, indent=2, ensure_ascii=False), highlight=False)

    def version(self, version: str) -> None:
        self._print({"name": "dovetail", "version": version})

    info = versions = written = vacuumed = _print

    def show(self, document: Document, render: "Callable[[TextOutput], None]") -> None:
        self._print(document)

    def failure(self, failure: Failure) -> None:
        self._print(failure.as_dict())


class TextOutput(Output):
    """Tables that fit the terminal; long values are wrapped, never truncated."""

    def version(self, version: str) -> None:
        self.results.out(f"dovetail {version}", highlight=False)

    def info(self, document: Document) -> None:
        key = document["key"]
        own = "its own join code" if key["code"] == "value" else f"joined by hash ({key['code']})"
        parent = "" if document["parent"] is None else f", from version {document['parent']}"
        share = f" ({document['index_bytes'] / document['bytes']:.2%} of the rows' bytes)" if document["bytes"] else ""
        self.title(f"Relation {document['path']}")
        self.pairs(
            {
                "version": f"{document['version']} ({document['operation']}{parent}, {_when(document['created_at'])})",
                "key": f"{', '.join(key['columns'])}: {own}",
                "unique": _uniqueness(document),
                "rows": f"{document['rows']:,}",
                "rows with a NULL key": f"{document['null_key_rows']:,}",
                "distinct codes": f"{document['distinct_codes']:,}",
                "size": format_bytes(document["bytes"]),
                "index in memory": format_bytes(document["index_bytes"]) + share,
                "shards": f"{document['shards']:,}",
            }
        )
        self.title("Columns")
        self.table(
            {"name": "left", "type": "left", "nullable": "left"},
            [[c["name"], c["type"], "yes" if c["nullable"] else "no"] for c in document["schema"]],
        )
        if "shards_detail" in document:
            self.title("Shards")
            self.table(
                dict.fromkeys(("shard", "rows", "size", "distinct codes", "max rows per code", "NULL keys"), "right"),
                [
                    [
                        str(s["shard"]),
                        f"{s['rows']:,}",
                        format_bytes(s["bytes"]),
                        f"{s['distinct_codes']:,}",
                        f"{s['max_multiplicity']:,}",
                        f"{s['null_key_rows']:,}",
                    ]
                    for s in document["shards_detail"]
                ],
            )

    def versions(self, document: Document) -> None:
        self.title(f"Versions of {document['path']}")
        self.table(
            {"version": "right", "operation": "left", "from": "right", "at": "left", "rows": "right", "size": "right"},
            [
                [
                    str(v["version"]),
                    v["operation"],
                    "-" if v["parent"] is None else str(v["parent"]),
                    _when(v["created_at"]),
                    f"{v['rows']:,}",
                    format_bytes(v["bytes"]),
                ]
                for v in document["versions"]
            ],
        )

    def written(self, document: Document) -> None:
        past = {"build": "Built", "append": "Appended to", "upsert": "Upserted into", "delete": "Deleted from"}
        before = document["rows_before"]
        self.line(f"{past[document['operation']]} {document['path']}: version {document['version']}")
        rows = f"{document['rows']:,}" if before is None else f"{before:,} -> {document['rows']:,}"
        self.pairs(
            {
                "rows": rows,
                "size": format_bytes(document["bytes"]),
                "unique": _uniqueness(document),
                "shards": f"{document['shards']:,}",
                "took": f"{document['seconds']:.1f} s",
            }
        )

    def vacuumed(self, document: Document) -> None:
        before, after, removed = document["before"], document["after"], document["removed"]
        numbers = ", ".join(map(str, removed["versions"])) or "none"
        self.line(f"Vacuumed {document['path']}")
        self.pairs(
            {
                "versions": f"{before['versions']:,} -> {after['versions']:,} (removed: {numbers})",
                "data files": f"{before['files']:,} -> {after['files']:,}",
                "size": f"{format_bytes(before['bytes'])} -> {format_bytes(after['bytes'])}",
            }
        )

    def show(self, document: Document, render: "Callable[[TextOutput], None]") -> None:
        render(self)

    def failure(self, failure: Failure) -> None:
        if failure.kind != "Interrupted":
            self.messages.print("[bold red]Error:[/] ", end="")
        self.messages.print(failure.message, markup=False, soft_wrap=True)
        if failure.hint:
            self.messages.print("[bold]Hint:[/] ", end="")
            self.messages.print(failure.hint, markup=False, soft_wrap=True)

    # ---------------------------------------------------------------- pieces

    def title(self, text: str) -> None:
        self.results.print(text, style="bold", markup=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """A line, wrapped by the terminal if it is long."""
        self.results.print(text, markup=False, soft_wrap=True)

    def pairs(self, pairs: Mapping[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs.items():
            grid.add_row(name, Text(value))
        self.results.print(Padding(grid, (0, 0, 0, 2), expand=False))

    def table(self, columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> None:
        """A table; each column is aligned left or right."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, justify in columns.items():
            table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self.results.print(Padding(table, (0, 0, 0, 2), expand=False))


def _when(created_at: str) -> str:
    """The ISO time of a manifest, to the second."""
    return created_at[:19].replace("T", " ") + " UTC"


def _uniqueness(document: Document) -> str:
    if document["key"]["declared_unique"]:
        return "yes, declared"
    if document["is_unique"]:
        return "yes"
    return f"no: up to {document['max_multiplicity']:,} rows share a code"
