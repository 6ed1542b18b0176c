"""What people do with the report, in Chromium: look, click, walk by keyboard, filter, print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from harness.report import page as report_page
from suites.registration import suite
from suites.report.page_data import REPRODUCER
from suites.report.test_page import HOSTILE, everything

suite(seconds=60, stage="browser", needs="cpu")

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
SIZES = (400, 1024, 1920)
RED = "td.s-fail a[data-open]"
Open = Callable[..., Page]


@pytest.fixture
def show(browser: Browser, report: Path) -> Iterator[Open]:
    """Open the report; at the end nothing may have gone wrong in it, and nothing may have been asked of a network."""
    faults: list[str] = []
    pages: list[Page] = []

    def opened(path: Path = report, anchor: str = "", **options: Any) -> Page:
        page = browser.new_page(**options)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: None if asked.url.startswith(path.as_uri()) else faults.append(asked.url))
        page.goto(path.as_uri() + anchor)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_it_fits_and_is_looked_at(show: Open, width: int, scheme: str) -> None:
    page = show(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .tile, pre, svg') "
        "&& e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    pictures = ROOT / "build" / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=pictures / f"report-{width}-{scheme}.png", full_page=True)


def test_a_red_cell_leads_to_its_violation_and_back(show: Open) -> None:
    page = show()
    cell = page.locator(RED).first
    cell.click()
    dialog = page.locator("dialog#detail")
    assert dialog.is_visible()
    assert "hidden row is not that of its request and position" in dialog.inner_text()
    assert REPRODUCER in dialog.inner_text()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.evaluate("document.activeElement.dataset.open") == cell.get_attribute("data-open")
    cell.click()
    page.locator("#close").click()
    assert not dialog.is_visible()


def test_the_reproducer_can_be_copied(show: Open) -> None:
    page = show(permissions=["clipboard-read", "clipboard-write"])
    page.locator(RED).first.click()
    page.locator("dialog .copy").first.click()
    expect(page.locator("dialog .copy").first).not_to_have_text("Copy")
    if page.locator("dialog .copy").first.inner_text() == "Copied":
        assert page.evaluate("navigator.clipboard.readText()") == REPRODUCER
    else:
        assert page.evaluate("getSelection().toString()") == REPRODUCER


def test_by_keyboard_alone(show: Open) -> None:
    page = show()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('td.s-fail a')"):
            break
    else:
        pytest.fail("no red cell is reached by Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus does not show"
    first = page.evaluate("document.activeElement.dataset.open")
    page.keyboard.press("Enter")
    assert page.locator("dialog#detail").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.open") == first
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.matches('td.s-fail a')")
    assert page.evaluate("document.activeElement.dataset.open") != first


def visible_cells(page: Page) -> set[tuple[str, str, str]]:
    return {
        tuple(cell)
        for cell in page.evaluate(
            "[...document.querySelectorAll('#scorecards td[data-status]')]"
            ".filter(e => e.offsetParent && !e.classList.contains('off'))"
            ".map(e => [e.dataset.drafter, e.dataset.invariant, e.dataset.status])"
        )
    }


def test_filters(show: Open) -> None:
    page = show()
    before = visible_cells(page)
    page.select_option("select[name=drafter]", "EAGLE-tree")
    assert {drafter for drafter, _, _ in visible_cells(page)} == {"EAGLE-tree"}
    page.select_option("select[name=invariant]", "ALIAS-1")
    assert visible_cells(page) == {("EAGLE-tree", "ALIAS-1", "fail"), ("EAGLE-tree", "ALIAS-1", "pass")}
    page.uncheck("input[value=pass]")
    assert visible_cells(page) == {("EAGLE-tree", "ALIAS-1", "fail")}
    assert page.locator("#shown").inner_text().startswith("1 of ")
    assert page.locator("#scorecards details.seen:visible").count() == 1
    page.click("button[type=reset]")
    expect(page.locator("#shown")).not_to_contain_text(" of ")
    assert visible_cells(page) == before
    assert {status for _, _, status in before} == {"pass", "fail", "refused"}


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_theme_is_that_of_the_system_until_it_is_chosen(show: Open) -> None:
    light, page = background(show(color_scheme="light")), show(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.click("#theme")
    assert (background(page), page.locator("#theme").inner_text()) == (light, "○ light")
    page.reload()
    assert background(page) == light, "the choice is forgotten"
    page.click("#theme")
    assert background(page) == dark
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert background(page) == light


def test_paper_is_light_and_shows_everything(show: Open) -> None:
    light, page = background(show(color_scheme="light")), show(color_scheme="dark")
    folded = page.locator("details:not([open])").count()
    assert folded > 0
    page.emulate_media(media="print", color_scheme="dark")
    expect(page.locator("details:not([open])")).to_have_count(0)
    assert background(page) == light
    assert not page.locator("nav").is_visible()
    assert page.locator("details.seen pre").first.is_visible()
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every(e => getComputedStyle(e).overflow === 'visible')"
    )
    page.emulate_media(media="screen")
    expect(page.locator("details:not([open])")).to_have_count(folded)
    (ROOT / "build" / "pictures").mkdir(parents=True, exist_ok=True)
    page.pdf(path=ROOT / "build" / "pictures" / "report.pdf")


def test_nothing_moves_for_those_who_do_not_want_it(show: Open) -> None:
    for wish, behaviour in (("reduce", "auto"), ("no-preference", "smooth")):
        page = show(reduced_motion=wish)
        assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == behaviour


def test_a_link_to_something_folded_unfolds_it(show: Open) -> None:
    anchor = str(show().locator(RED).first.get_attribute("data-open"))
    page = show(anchor=f"#{anchor}")
    assert page.locator(f"details#{anchor}").get_attribute("open") is not None


def test_heads_stay_while_a_table_scrolls(show: Open) -> None:
    page = show(viewport={"width": 400, "height": 500})
    box = page.locator("#scorecards .scroll").first
    box.evaluate("e => e.scrollTo(150, 120)")
    assert box.evaluate("e => [e.scrollLeft, e.scrollTop]") == [150, 120]
    here = box.bounding_box()
    assert here is not None
    for selector, axis in (("thead th:nth-child(4)", "y"), ("tbody tr:nth-child(6) th", "x")):
        head = box.locator(selector).bounding_box()
        assert head is not None
        assert abs(head[axis] - here[axis]) < 3  # type: ignore[literal-required]  # "x" and "y" are its keys


CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const found = channels(getComputedStyle(e).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  document.querySelectorAll("details").forEach((e) => { e.open = true; });
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!words || !e.offsetParent || e.closest("svg, script, dialog")) continue;
    const [a, b] = [light(channels(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${e.outerHTML.slice(0, 90)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read(show: Open, scheme: str) -> None:
    """WCAG AA, as the browser computes colours."""
    assert show(color_scheme=scheme).evaluate(CONTRASTS) == []


def test_hostile_words_do_nothing(show: Open, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(report_page.page(report_page.read(everything(tmp_path, HOSTILE)), HOSTILE), encoding="utf-8")
    page = show(path)
    page.locator(RED).first.click()
    assert page.locator("dialog#detail").is_visible()
    assert page.locator("img").count() == 0
    assert "<script>alert(1)</script>" in page.locator("dialog#detail").inner_text()


def test_without_scripts_everything_is_there(show: Open) -> None:
    page = show(java_script_enabled=False)
    page.locator("details.seen[data-status=fail] summary").first.click()
    assert REPRODUCER in page.locator("details.seen[open]").first.inner_text()
