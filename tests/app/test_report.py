"""The report: one file that needs nothing else, and reads well in a browser, wide and narrow."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.app.chromium import CHROMIUM, Chromium
from treeopt import AcceptanceTable, LatencyPoint, LatencyProfile, RankRecord
from treeopt.app.advise import Advice, advise
from treeopt.app.report import report_page
from treeopt.plot import Curve, Panel, curves_figure
from treeopt.report.page import inline_svg

TABLE = replace(
    AcceptanceTable.from_marginals([[0.6, 0.2, 0.05], [0.5, 0.1, 0.05]], model="made-up/a-model-of-quite-a-long-name"),
    source="made up for the tests, with_a_path/that_is_long_and/has_no_place_to_break/in_it_anywhere_at_all.py <b>&",
)
RECORD = RankRecord("toy", "made up", "greedy", 0.0, 3, tuple(
    tuple(((i * s) % 4, (i + s) % 4) for i in range(20 + s)) for s in range(1, 9)
))  # fmt: skip


def profile(batch_size: int, slope: float) -> LatencyProfile:
    points = []
    for n in (1, 2, 3, 4, 6, 8, 12, 16):
        base = 0.02 * (1 + slope * (n - 1))
        samples = tuple(base * (1 + 0.01 * i) for i in range(-3, 4))
        points.append(LatencyPoint(n, base, num_samples=7, samples_s=samples))
    bare = LatencyProfile.from_medians({1: 1.0}, model=TABLE.model)
    device = {"name": "A processor <i> & more", "hardware": {"memory_gib": 8, "flags": ["avx2", "fma"]}}
    return replace(bare, points=tuple(points), batch_size=batch_size, device=device, context_len=512)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise(TABLE, [profile(1, 0.02), profile(4, 0.9)], 16, RECORD)


@pytest.fixture(scope="module")
def page(advice: Advice) -> str:
    return report_page(advice, command="treeopt report --out 'a file.html'")


def test_it_says_what_advise_says(page: str, advice: Advice) -> None:
    best = advice.verdict.best
    for text in (f"{best.speedup:.3f}×", f"{best.low:.3f}× to {best.high:.3f}×", f"{best.acceptance_length:.3f}"):
        assert text in page
    for row in advice.shown:
        assert f"<td>{row.name}</td><td>{row.acceptance_length:.3f}</td><td>{row.speedup:.3f}×</td>" in page
    assert "<td>16</td><td>26.00</td><td>0.78</td><td>7</td><td>1.300</td>" in page  # L(16); quartiles at +-1.5 %
    assert "at no context with batch 4" in page


def test_it_fetches_nothing_runs_nothing_and_escapes_texts(page: str) -> None:
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert "A processor &lt;i&gt; &amp; more" in page
    assert "anywhere_at_all.py &lt;b&gt;&amp;." in page


def test_same_values_same_bytes(page: str, advice: Advice) -> None:
    assert report_page(advice, command="treeopt report --out 'a file.html'") == page


def test_ids_are_unique_and_all_references_lead_somewhere(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 20
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(ids)


def test_inline_pictures_are_well_formed() -> None:
    figure = curves_figure("Title", "below", [Panel("y", [Curve("a", [1, 2], [3, 4])])], "x")
    svg = inline_svg(figure, "one", 'a "label" & more <x>')
    root = ElementTree.fromstring(svg)  # noqa: S314  # our own text
    assert root.tag.endswith("svg")
    assert root.get("aria-label") == "a label and more x>"
    assert "metadata" not in svg


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)")

STICKS_OUT = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') &&
    e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 80))"""
FONT_SIZES = """[...document.querySelectorAll('main *')].filter(e => [...e.childNodes].some(
    n => n.nodeType == 3 && n.textContent.trim())).map(e => parseFloat(getComputedStyle(e).fontSize))"""
PICTURE_SCALES = """[...document.querySelectorAll('svg')].map(
    e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"""
COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_complaint_or_sideways_scrolling(page: str, width: int, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    with Chromium(tmp_path / "browser") as browser:
        browser.open(path, width)
        assert browser.evaluate("innerWidth") == width
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        # Whatever is wider than the window can be scrolled in its own box; nothing else sticks out.
        assert browser.evaluate(STICKS_OUT) == []
        assert min(browser.evaluate(FONT_SIZES)) >= 13
        # Letters in pictures are outlines, so their size is what the picture is scaled by.
        assert min(browser.evaluate(PICTURE_SCALES)) >= 0.8
        assert [event for event in browser.events if event["method"] in COMPLAINTS] == []
        asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


@needs_browser
def test_the_browser_check_notices_a_page_that_is_too_wide(tmp_path: Path) -> None:
    path = tmp_path / "wide.html"
    path.write_text(
        '<meta name="viewport" content="width=device-width"><script>console.error("no")</script>'
        '<p style="width:900px">x</p>'
    )
    with Chromium(tmp_path / "browser") as browser:
        browser.open(path, 390)
        assert browser.evaluate("document.documentElement.scrollWidth") > 390
        assert any(event["method"] in COMPLAINTS for event in browser.events)
