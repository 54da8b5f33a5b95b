"""The documentation as a site: strict, whole, and alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sfumato

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def test_no_link_within_is_broken_and_no_page_asks_for_anything_from_elsewhere(site):
    pages = list(site.glob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe|link)[^>]*(?:src|href)="(?:https?:)?//', text), page.name


def test_the_interface_in_python_is_told_whole(site):
    text = (site / "api.html").read_text()
    assert [name for name in sfumato.__all__ if f'id="sfumato.{name}"' not in text] == []


def test_a_screen_reader_and_a_keyboard_reach_all_of_it(site):
    """As axe-core finds, where a browser is here: `make browser`."""
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.base")
    found = set()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme)
            for path in site.glob("*.html"):
                page = context.new_page()
                page.goto(path.as_uri())
                page.evaluate(axe.AXE_SCRIPT)
                told = page.evaluate("axe.run(document)")["violations"]
                found |= {(path.name, each["id"]) for each in told}
                page.close()
        browser.close()
    assert found <= {("search.html", "page-has-heading-one")}  # it is written by its script
