"""Pages in which no value can become markup, and the parts that they share."""

import html
import unicodedata
from collections.abc import Iterable
from importlib import resources

NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"  # which the browser enforces


class Html(str):
    """Text that is markup already. Every other string is escaped before it stands on a page."""


def element(tag: str, *children: str, **attributes: str) -> Html:
    """One element; children that are not ``Html``, and all attributes, are escaped.

    Args:
        tag: Its name.
        children: Text or elements.
        attributes: A trailing underscore is dropped (``class_``), others become hyphens
            (``aria_hidden``).

    Example:
        >>> element("p", "a < b ", element("b", "&"), class_="note")
        '<p class="note">a &lt; b <b>&amp;</b></p>'
    """
    stated = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for name, value in attributes.items()
    )
    if tag == "meta":  # has no end
        return Html(f"<{tag}{stated}>")
    return Html(f"<{tag}{stated}>{together(*children)}</{tag}>")


def together(*children: str) -> Html:
    """Texts and elements one after the other, texts escaped."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children))


def _text(text: str) -> str:
    """Escaped; control characters, as a class's name may hold, are spelled out."""
    is_control = {sign for sign in text if unicodedata.category(sign) == "Cc" and not sign.isspace()}
    return html.escape("".join(repr(sign)[1:-1] if sign in is_control else sign for sign in text))


def whole_page(title: str, *parts: Html) -> str:
    """A page that stands for itself, as HTML text."""
    style = resources.files("sfumato.reporting").joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=NOTHING_FROM_ELSEWHERE),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element("body", element("main", *parts))
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def header(kicker: str, title: str, lead: str, *more: Html) -> Html:
    """The head of a page: what kind it is, of what, and one sentence."""
    names = element("p", kicker, class_="kicker"), element("h1", title), element("p", lead, class_="lead")
    return element("header", *names, *more)


def section(title: str, *parts: Html) -> Html:
    return element("section", element("h2", title), *parts)


def paragraph(text: str, kind: str = "") -> Html:
    return element("p", text, class_=kind) if kind else element("p", text)


def figure(drawing: Html, caption: str) -> Html:
    return element("figure", drawing, element("figcaption", caption))


def tiles(*pairs: tuple[str, str]) -> Html:
    """Numbers that catch the eye, each with what it is: (value, name)."""
    each = (
        element("p", element("span", value, class_="number"), " ", element("span", name, class_="label"), class_="tile")
        for value, name in pairs
    )
    return element("div", *each, class_="tiles")


def bar(name: Html, share: float | None, text: str, reference: float, absent: str) -> Html:
    """A row of ``<dl class="bars">``: a bar as long as a share of the width, and a line across it at another share;
    what is said instead where there is none.
    """
    label = element("dt", name)
    if share is None:
        return element("div", label, element("dd", element("span", absent, class_="absent")))
    fill = element("span", class_="fill", style=f"width: {100 * share:.2f}%")
    line = element("span", class_="reference", style=f"left: {100 * reference:.2f}%")
    track = element("span", fill, line, class_="track", aria_hidden="true")
    return element("div", label, element("dd", track, element("span", text, class_="value")))


def numbers_table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """A table with one line of names."""
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("table", head, body, class_="numbers")
