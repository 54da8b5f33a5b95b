"""HTML in which no value can become markup."""

import html
import unicodedata

VOID_ELEMENTS = frozenset({"meta"})


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
    if tag in VOID_ELEMENTS:
        return Html(f"<{tag}{stated}>")
    return Html(f"<{tag}{stated}>{together(*children)}</{tag}>")


def together(*children: str) -> Html:
    """Texts and elements one after the other, texts escaped."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children))


def _text(text: str) -> str:
    """Escaped; control characters, as a class's name may hold, are spelled out."""
    is_control = {sign for sign in text if unicodedata.category(sign) == "Cc" and not sign.isspace()}
    return html.escape("".join(repr(sign)[1:-1] if sign in is_control else sign for sign in text))
