# SPDX-License-Identifier: Apache-2.0
"""The landing page in a real Chromium: light and dark, on a phone and on a wide screen.

The pictures are left in the test's folder, or in GPULOCK_PICTURES for people to look at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.web.http import HttpRequest, HttpResponse
from gpulock_exporter.web.page import PAGE_HEADERS, STATES, page_state_label, render_page

from tests.exporter.inprocess import running
from tests.exporter.whole import Whole
from tests.labs.prometheus.browser import Browser, Picture
from tests.labs.prometheus.page_scenes import scenes
from tests.nvml.double import Double
from tests.support.pairs import zip_equal

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PHONE, WIDE = 390, 1280
WIDTHS = (320, PHONE, 768, WIDE, 1920)
READABLE = 4.5  # WCAG 2.2, 1.4.3: contrast of text
SMALLEST = 12  # pixels of a letter
SCENES = scenes()

LAYOUT = """(() => {
  const box = e => {
    const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
  return {
    page: document.documentElement.scrollWidth,
    tiles: [...document.querySelectorAll("article")].map(box),
    spilled: [...document.querySelectorAll("article, article > *, header, footer, li, h2")]
      .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== "hidden"
                   && getComputedStyle(e).display !== "inline").map(e => e.outerHTML),
    times: [...document.querySelectorAll("time")].map(e => [box(e), box(e.closest("article"))]),
  }})()"""
LETTERS = """(() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    if (!walker.currentNode.data.trim()) continue;
    const below = [];
    let e = walker.currentNode.parentElement;
    const style = getComputedStyle(e);
    for (; e; e = e.parentElement) below.push(getComputedStyle(e).backgroundColor);
    found.push([walker.currentNode.data, style.color, parseFloat(style.fontSize), below]);
  }
  return found })()"""

Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium."""
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of the scenes, with the policy that the exporter sends."""

    def answer(request: HttpRequest) -> HttpResponse:
        text = render_page(SCENES[request.path.strip("/")])
        return HttpResponse(200, text.encode(), "text/html; charset=utf-8", PAGE_HEADERS)

    with running(answer) as server:
        yield f"http://127.0.0.1:{server.port}"


def pictured(browser: Browser, name: str, tmp_path: Path) -> Picture:
    folder = Path(os.environ.get("GPULOCK_PICTURES", str(tmp_path)))
    folder.mkdir(parents=True, exist_ok=True)
    return browser.picture(folder / f"{name}.png")


@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_fits_every_width(browser: Browser, address: str, scene: str) -> None:
    for width in WIDTHS:
        browser.show(f"{address}/{scene}", width)
        layout: dict[str, Any] = browser.value(LAYOUT)
        assert layout["page"] <= width, "it would have to be pushed to and fro"
        assert layout["spilled"] == []
        tiles: list[Box] = layout["tiles"]
        assert len(tiles) == len(SCENES[scene].tiles)
        assert all(left >= 0 and right <= width for left, _, right, _ in tiles)
        assert not [(one, two) for one in tiles for two in tiles if one < two and overlap(one, two)]
        columns = len({left for left, *_ in tiles})
        if tiles:
            assert (columns == 1) is (width <= PHONE or len(tiles) == 1)


def overlap(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


@pytest.mark.parametrize("width", [PHONE, WIDE])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("scene", SCENES)
def test_a_picture_is_light_or_dark_and_every_letter_can_be_read(
    browser: Browser, address: str, tmp_path: Path, scene: str, dark: bool, width: int
) -> None:
    url = f"{address}/{scene}"
    browser.show(url, width, dark=dark)
    picture = pictured(browser, f"{scene}-{width}-{'dark' if dark else 'light'}", tmp_path)
    assert abs(picture.width - width / 4) < 1
    assert picture.colours() > 30, "there is nothing on it"
    assert (picture.brightness() < 0.25) is dark
    assert all(part < 32 for part in picture.at(2, 2)) is dark
    letters: list[tuple[str, str, float, list[str]]] = browser.value(LETTERS)
    assert len(letters) > 5
    for text, colour, size, below in letters:
        assert size >= SMALLEST, text
        assert contrast(colour, below) >= READABLE, (text, colour, below)
    assert set(browser.fetched()) == {url}, "nothing else is fetched"
    assert browser.complaints() == [], "the policy refuses nothing that the page needs"


def contrast(colour: str, below: list[str]) -> float:
    """Return the contrast of a text over the backgrounds below it, the nearest first."""
    ground = (1.0, 1.0, 1.0)
    for one in reversed(below):
        red, green, blue, share = rgba(one)
        pairs = zip_equal((red, green, blue), ground)
        first, second, third = (share * top + (1 - share) * under for top, under in pairs)
        ground = (first, second, third)
    light, shade = sorted((luminance(*rgba(colour)[:3]), luminance(*ground)), reverse=True)
    return (light + 0.05) / (shade + 0.05)


def rgba(text: str) -> tuple[float, float, float, float]:
    """Return a computed colour: rgb(1, 2, 3), rgba(1, 2, 3, 0.5) or color(srgb .1 .2 .3 / .5)."""
    numbers = [float(one) for one in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]
    scale = 1.0 if text.startswith("color(srgb") else 255.0
    red, green, blue = (one / scale for one in numbers[:3])
    return red, green, blue, numbers[3] if len(numbers) > 3 else 1.0


def luminance(red: float, green: float, blue: float) -> float:
    parts = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_all_eight_states_are_there_in_words_and_a_long_name_hides_no_time(
    browser: Browser, address: str
) -> None:
    for width in (320, PHONE, WIDE):
        browser.show(f"{address}/states", width)
        shown = browser.value("[...document.querySelectorAll('article em')].map(e => e.innerText)")
        assert shown == [page_state_label(state) for state in STATES]
        times: list[tuple[Box, Box]] = browser.value(LAYOUT)["times"]
        assert len(times) == 3
        for time, tile in times:
            assert time[2] <= tile[2] and time[2] - time[0] > 10
        cut = browser.value(
            "[...document.querySelectorAll('.holder span')].filter("
            "e => e.scrollWidth > e.clientWidth).map(e => e.title)"
        )
        assert [title for title in cut if "hohenstaufen@physics.research.example.org" in title]


def test_old_samples_are_said_before_all_else(browser: Browser, address: str) -> None:
    for scene, said in (
        ("old", "Samples are 13 min old: the driver"),
        ("begin", "No samples yet."),
    ):
        browser.show(f"{address}/{scene}", PHONE, height=844)
        place = browser.value(
            "(() => { const e = document.querySelector('[role=alert]');"
            " return [e.innerText, e.getBoundingClientRect().bottom] })()"
        )
        assert place[0].startswith(said)
        assert place[1] < 300, "without scrolling"


def test_the_exporters_own_page_shows_a_claim_without_being_asked_again(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        Double(tmp_path / "nvml", preset="dgx-h200") as nvml,
        Whole(tmp_path, nvml) as exporter,
    ):
        for number in range(4):
            nvml.load(number, 25 * number)
        exporter.up(8)
        exporter.claim(3)
        exporter.wait_until(lambda s: s.all("gpulock_gpu_locked", gpu="3") == [1])
        url = f"http://127.0.0.1:{exporter.port}/?live"
        browser.show(url, WIDE)
        assert browser.value("document.querySelector('header p').innerText") == "7 of 8 free"
        assert set(browser.fetched()) == {url}
        assert browser.complaints() == []
        exporter.release()
        exporter.wait_until(lambda s: s.all("gpulock_gpu_locked", gpu="3") == [0])
        for _ in range(2):  # what is under way may be from before
            browser.events.clear()
            browser.wait("Page.loadEventFired")  # it loads itself again
        assert browser.value("document.querySelector('header p').innerText") == "8 of 8 free"
        assert browser.value("document.querySelectorAll('article svg').length") == 8
        pictured(browser, "exporter", tmp_path)
