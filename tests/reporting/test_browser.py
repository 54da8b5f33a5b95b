"""Every kind of page in a real browser: at both widths, in light, dark and print."""

import json
import shutil
from pathlib import Path

import pytest

from sfumato.accounting import formats
from tests.reporting import made_up

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make browser")
axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-core: make browser")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: make browser")

NAMES = ["private", "not private", "unfinished", "several", "sweep", "search", "audit", "law"]
WIDTHS = (360, 1440)
MODES = {
    "light": {"media": "screen", "color_scheme": "light"},
    "dark": {"media": "screen", "color_scheme": "dark"},
    "print": {"media": "print", "color_scheme": "light"},
}
# Of each figure the widths of the drawings that are seen, and those that they were drawn for.
DRAWINGS = """
[...document.querySelectorAll('figure')].map(figure => [...figure.querySelectorAll('svg')]
    .filter(svg => svg.getClientRects().length)
    .map(svg => [svg.getBoundingClientRect().width, svg.viewBox.baseVal.width]))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The folder of all, and each by its name."""
    folder = tmp_path_factory.mktemp("pages")
    return folder, made_up.pages(folder)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened.new_context()
        opened.close()


class Seen:
    """A page as the browser shows it, what it said, and what it asked for."""

    def __init__(self, browser, path: Path) -> None:
        self.page = browser.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def show(self, mode: str, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(**MODES[mode])

    @property
    def text(self) -> str:
        return " ".join(self.page.inner_text("body").split())


@pytest.fixture(scope="module")
def every(browser, pages):
    """All of them, each opened once."""
    return {name: Seen(browser, path) for name, path in pages[1].items()}


@pytest.fixture(params=NAMES)
def seen(request, every):
    return every[request.param]


def test_nothing_is_wider_than_the_page_and_each_figure_is_seen_once_in_the_size_it_was_drawn_for(seen):
    for width in WIDTHS:
        for mode in MODES:
            seen.show(mode, width)
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            for (drawing,) in seen.page.evaluate(DRAWINGS):
                assert mode == "print" or 0.9 < drawing[0] / drawing[1] < 1.1


def test_axe_finds_no_fault_of_structure_or_alternative_texts_nor_of_contrast_in_any_mode(seen):
    seen.page.evaluate(axe.AXE_SCRIPT)
    for mode, width, rules in (
        ("light", 360, []),
        ("dark", 1440, ["color-contrast"]),
        ("print", 700, ["color-contrast"]),
    ):
        seen.show(mode, width)
        found = seen.page.evaluate("rules => axe.run(document, rules.length ? {runOnly: rules} : {})", rules)
        faults = [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found["violations"]]
        checked = {each["id"] for each in found["passes"]}
        assert faults == [] and checked >= {*rules, "color-contrast"}
        assert rules or "svg-img-alt" in checked


def test_the_page_says_nothing_on_the_console_and_asks_for_nothing_but_itself(seen):
    assert seen.said == [] and seen.asked == [seen.page.url]


@pytest.mark.parametrize("name", ["private", "not private"])
def test_the_figures_that_a_reader_sees_are_those_of_the_files(every, pages, name):
    folder, text = pages[0], every[name].text
    result = json.loads((folder / name / "result.json").read_text())
    claim = json.loads((folder / name / "privacy.json").read_text())
    reached = formats.share(result["accuracy"], result["accuracy_interval"])
    assert f"Accuracy on held-out images: {reached}." in text
    for value in result["per_class"]:
        assert formats.per_cent(value) in text
    promised = f"ε ≤ {formats.epsilon_text(claim['epsilon'])} at δ = {formats.delta_text(claim['delta'])}"
    assert (promised in text) == (name == "private") and ("Not private" in text) == (name == "not private")
    if name == "private":
        assert f"at most {formats.per_cent_at_most(claim['attacker']['accuracy'])} of the time" in text


def test_what_a_reader_sees_of_other_pages_is_what_was_found(every):
    found, together = made_up.search(), formats.epsilon_text(made_up.sweep().epsilon_together)
    assert f"Epsilon {together} at delta 1e-4 covers all runs" in every["sweep"].text
    text = every["search"].text
    assert f"spends epsilon {formats.epsilon_text(found.epsilon_final)} at delta 1e-4" in text
    assert formats.per_cent(found.predicted_accuracy.value) in text
    text = every["law"].text
    for prediction in made_up.law.scaling_law(made_up.law_runs(), [256, 512])["predictions"]:
        assert formats.per_cent(prediction["accuracy"]) in text
    text = every["several"].text
    assert text.startswith("Sfumato report 30 runs") and text.count("unfinished") == 1


def test_charts_are_told_to_those_who_cannot_see_them(every):
    seen = every["several"]
    for width in WIDTHS:
        seen.show("light", width)
        assert seen.page.get_by_role("img", name="Median accuracy against epsilon of one run").count() == 1
