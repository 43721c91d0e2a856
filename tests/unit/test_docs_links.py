"""Links of the pages that are read on a forge and are no part of the site, whose build checks its own."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/golden/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as a forge makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_linked_files_and_headings_exist(name: str) -> None:
    page = PROJECT / name
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), f"{name} links to {link}"
        if anchor and path.suffix == ".md" and path.name != "index.md":
            assert anchor in anchors(path), f"{name} links to {link}"
