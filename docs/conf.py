"""The documentation as a site: `make docs`. Every page is Markdown that reads well as it is, too."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

import sfumato

ROOT = Path(__file__).parents[1]
OUTSIDE = {"LOG.md": "log.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
OUTSIDE |= {"CONTRIBUTING.md": "contributing.md"}
"""Pages that lie above this folder, and under which name the site has them."""

project = "Sfumato"
release = version = sfumato.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Sfumato {release}"
html_show_copyright = False
html_copy_source = False
html_math_renderer = "mathml"
default_role = "code"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
exclude_patterns = ["_build"]
highlight_language = "none"


SEEN_BY_ALL = {
    'role="heading">': 'role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="math-wrapper docutils container">': '<div class="math-wrapper docutils container" tabindex="0">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
}
"""What the theme leaves out, for keyboards and screen readers: what scrolls can be reached, what is alike has names."""


def _as_on_the_site(text: str) -> str:
    """Links between the repository's files, as the site has these."""
    text = text.replace("](docs/", "](").replace("](../", "](")
    for name, page in OUTSIDE.items():
        text = text.replace(f"]({name}", f"]({page}")
    return re.sub(r"\]\((examples/|CITATION)", r"](../\1", text)


def _read(app: Any, docname: str, source: list[str]) -> None:
    """The front page is the README with a table of contents; pages of `OUTSIDE` are what lies there."""
    above = {"index": "README.md"} | {page.removesuffix(".md"): name for name, page in OUTSIDE.items()}
    if docname in above:
        source[0] = (ROOT / above[docname]).read_text(encoding="utf-8") + "\n" + source[0]
    source[0] = _as_on_the_site(source[0])


def _mathml(writer: Any, node: Any) -> None:
    """What browsers show by themselves: no page loads anything from elsewhere."""
    writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def _finish(app: Any, error: Exception | None) -> None:
    for page in Path(app.outdir).glob("*.html"):
        text = page.read_text(encoding="utf-8")
        for made, better in SEEN_BY_ALL.items():
            text = text.replace(made, better)
        page.write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("build-finished", _finish)
    app.connect("source-read", _read)
    app.add_html_math_renderer("mathml", (_mathml, None), (_mathml, None))
