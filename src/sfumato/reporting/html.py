"""Pages in which no value can become markup: templates/ holds their markup, Python hands them plain facts."""

import unicodedata
from typing import Any

import jinja2

from sfumato.accounting import formats

ENDINGS = (".html", ".htm")
"""Of the name of a page."""


def _spelled_out(value: Any) -> Any:
    """Control characters, as a class's name may hold, are spelled out."""
    if not isinstance(value, str):
        return value
    is_control = {sign for sign in value if unicodedata.category(sign) == "Cc" and not sign.isspace()}
    return type(value)("".join(repr(sign)[1:-1] if sign in is_control else sign for sign in value))


PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("sfumato.reporting"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_spelled_out,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
PAGES.filters |= {
    "at_most": formats.per_cent_at_most,
    "at_least": formats.lower_epsilon_text,
    "count": formats.count,
    "delta": formats.delta_text,
    "epsilon": formats.epsilon_text,
    "per_cent": formats.per_cent,
    "quantity": formats.quantity,
}
PAGES.globals["share"] = formats.share


def render(template: str, **facts: Any) -> str:
    """A page that stands for itself, as HTML text.

    Args:
        template: Its name below templates/.
        facts: What it tells; one that is missing raises.
    """
    return PAGES.get_template(template).render(facts)
