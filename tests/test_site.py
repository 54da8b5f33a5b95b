"""The documentation as a site: strict, whole, and alone."""

import re
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
