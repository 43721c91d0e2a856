"""A page with a flow behind it, and a real Chromium to look at it, installed from Debian's packages if need be."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from dovetail.testing.checkpoints import WrittenFlow
from dovetail.web.serving import open_page

PROJECT = Path(__file__).parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        subprocess.run([PROJECT / "scripts" / "apt-install", "chromium"], check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def flow(tmp_path: Path) -> WrittenFlow:
    """A flow that has run for a while, with a relation that exists."""
    import pyarrow as pa

    import dovetail as dt

    customers = tmp_path / "customers"
    dt.Relation.build(pa.table({"customer_id": range(1000), "name": ["x"] * 1000}), customers, on="customer_id")
    written = WrittenFlow(tmp_path / "checkpoint", "orders", str(customers))
    written.start(side=str(tmp_path / "dead-letters"))
    written.run(200)
    return written


@pytest.fixture
def open_flow(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Open the page of a checkpoint in a browser of a width and colours; errors in its console fail the test."""
    served, contexts, problems = [], [], []

    def opened(
        checkpoint: Path, width: int = 1280, height: int = 900, dark: bool = False, examples: bool = False
    ) -> Page:
        page = open_page([str(checkpoint)], port=0, examples=examples)
        served.append(page)
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        browser_page = context.new_page()
        browser_page.on("pageerror", lambda error: problems.append(str(error)))
        browser_page.on("console", lambda entry: problems.append(entry.text) if entry.type == "error" else None)
        browser_page.goto(page.address)
        browser_page.wait_for_selector("body[data-change]")
        return browser_page

    yield opened
    for context in contexts:
        context.close()
    for page in served:
        page.close()
    assert problems == []
