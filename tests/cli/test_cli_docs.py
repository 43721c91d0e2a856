"""docs/cli.md has every command, and every option of the pipeline commands."""

from pathlib import Path
from typing import Any

import pytest
import typer

from dovetail.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"relation", "lab"}))
def test_command_and_its_options_are_documented(name: str) -> None:
    assert f"| `{name}" in PAGE
    options = [option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")]
    assert [option for option in options if option not in PAGE] == []
