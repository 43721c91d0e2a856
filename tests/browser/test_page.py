"""The live page in a real browser: what it shows, by keyboard and mouse, on desk and phone, in light and dark."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from dovetail.core.errors import StateError
from dovetail.storage.running import running
from dovetail.storage.stop_request import StopRequest, stop_request
from dovetail.testing.checkpoints import WrittenFlow

Open = Callable[..., Page]
SCREENSHOTS = Path(__file__).parents[2] / "artifacts" / "browser"
HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("desktop", 1280, False), ("dark", 1280, True), ("phone", 390, False)]
)
def test_flow_is_shown_on_every_screen(open_flow: Open, flow: WrittenFlow, name: str, width: int, dark: bool) -> None:
    with running(flow.checkpoint):
        page = open_flow(flow.checkpoint, width=width, dark=dark)
        expect(page.locator("h1")).to_contain_text("orders")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#tiles .tile")).to_have_count(6)
        expect(page.locator("#picture .node")).to_have_count(6)
        expect(page.locator("#picture")).to_contain_text("version 1")
        expect(page.locator("#operators tbody tr")).to_have_count(1)
        expect(page.locator("#batches tbody tr").first).to_contain_text("199")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the screen"
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        screenshot(page, name)


def test_token_does_not_stay_in_the_address(open_flow: Open, flow: WrittenFlow) -> None:
    page = open_flow(flow.checkpoint)
    assert "token" not in page.url
    page.reload()
    page.wait_for_selector("body[data-change]")


def test_new_micro_batch_appears_without_a_reload(open_flow: Open, flow: WrittenFlow) -> None:
    page = open_flow(flow.checkpoint)
    expect(page.locator("#batches tbody tr").first).to_contain_text("199")
    flow.run(1)
    expect(page.locator("#batches tbody tr").first).to_contain_text("200")


def test_failure_is_shown_with_its_hint_and_as_text(open_flow: Open, flow: WrittenFlow) -> None:
    flow.end(StateError(f"A row with {HOSTILE} was refused.", hint="Correct it."))
    page = open_flow(flow.checkpoint)
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator("#alert")).to_contain_text(HOSTILE)
    expect(page.locator("#alert")).to_contain_text("Correct it.")
    expect(page.locator("#events")).to_contain_text(HOSTILE)
    assert page.locator("#alert img, #events img, #alert b").count() == 0
    screenshot(page, "failed")


def test_dead_letters_are_shown_as_text_if_allowed(open_flow: Open, flow: WrittenFlow, tmp_path: Path) -> None:
    (tmp_path / "dead-letters").mkdir()
    pq.write_table(pa.table({"malformed": [HOSTILE], HOSTILE: [None]}), tmp_path / "dead-letters" / "part-0.parquet")
    page = open_flow(flow.checkpoint, examples=True)
    expect(page.locator("#side td", has_text=HOSTILE)).to_have_count(1)
    expect(page.locator("#side th", has_text=HOSTILE)).to_have_count(1)
    assert page.locator("#side img").count() == 0
    quiet = open_flow(flow.checkpoint)
    expect(quiet.locator("#side")).to_contain_text("--examples")
    assert HOSTILE not in quiet.content()


def test_killed_flow_and_history_after_a_restart(open_flow: Open, flow: WrittenFlow) -> None:
    page = open_flow(flow.checkpoint)
    expect(page.locator("#state")).to_have_text("ended without a word")
    expect(page.locator("#stop")).to_be_disabled()
    with running(flow.checkpoint):
        flow.start()
        flow.run(1)
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#alert")).to_be_hidden()
        expect(page.locator("#h-batches")).to_contain_text("201")
        expect(page.locator("#events li")).to_have_count(2)


def test_drain_by_keyboard_asks_first(open_flow: Open, flow: WrittenFlow) -> None:
    with running(flow.checkpoint):
        page = open_flow(flow.checkpoint)
        page.locator("#drain").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#confirm")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#confirm")).to_be_hidden()
        assert stop_request(flow.checkpoint) is None
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("stopping")
        assert stop_request(flow.checkpoint) == StopRequest(True, 600.0)


def test_stop_by_mouse(open_flow: Open, flow: WrittenFlow) -> None:
    with running(flow.checkpoint):
        page = open_flow(flow.checkpoint)
        page.click("#stop")
        page.click("#confirm-yes")
        expect(page.locator("#state")).to_have_text("stopping")
        assert stop_request(flow.checkpoint) == StopRequest(False, 600.0)


def test_chart_is_read_by_mouse_and_by_arrow_keys(open_flow: Open, flow: WrittenFlow) -> None:
    page = open_flow(flow.checkpoint)
    chart = page.locator("#charts svg").first
    reading = page.locator("#charts .reading").first
    expect(reading).to_have_text("")
    chart.hover()
    expect(reading).to_contain_text("in ")
    chart.focus()
    page.keyboard.press("Home")
    first = reading.text_content()
    page.keyboard.press("ArrowRight")
    assert reading.text_content() != first
    assert "Rows per second" in (chart.get_attribute("aria-label") or "")


def test_everything_that_can_be_operated_has_a_name(open_flow: Open, flow: WrittenFlow) -> None:
    with running(flow.checkpoint):
        page = open_flow(flow.checkpoint)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, select, [role=img], [role=meter], [tabindex="0"], section')]
            .filter((element) => element.checkVisibility())
            .filter((element) => !(element.getAttribute('aria-label') || element.getAttribute('aria-labelledby')
              || element.textContent.trim())).map((element) => element.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        reached = set()
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"theme", "drain", "stop"} <= reached


def test_theme_can_be_switched_and_is_kept(open_flow: Open, flow: WrittenFlow) -> None:
    page = open_flow(flow.checkpoint)
    page.click("#theme")
    page.reload()
    page.wait_for_selector("body[data-change]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_ten_thousand_micro_batches_are_drawn_as_few_points(open_flow: Open, tmp_path: Path) -> None:
    flow = WrittenFlow(tmp_path / "long", "orders")
    flow.start()
    flow.run(10_000)
    page = open_flow(flow.checkpoint)
    expect(page.locator("#h-batches")).to_contain_text("10,000")
    assert page.evaluate("document.querySelectorAll('*').length") < 1_000
    drawn = page.evaluate("document.querySelector('#charts .line1').getAttribute('d').split('L').length")
    assert 200 <= drawn <= 240
    flow.run(1)
    expect(page.locator("#batches tbody tr").first).to_contain_text("10000")
    took_ms = page.evaluate("document.body.dataset.tookMs")
    print(f"\nan update of the page, with 10,000 micro-batches of history: {took_ms} ms")
