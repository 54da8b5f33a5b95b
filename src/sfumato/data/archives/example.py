"""One image of an archive, and how its label, group and part are read."""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

from sfumato.data.listing import PART_MEANT
from sfumato.errors import InputError


class Example(NamedTuple):
    """One image.

    Attributes:
        name: Its path in the archive, without what tells its kind; "" where it has none.
        part: What a folder of its name says.
    """

    image: bytes
    name: str
    suffix: str
    label: str
    group: str
    part: str = ""


def as_text(where: str, column: str, value: Any) -> str:
    """A label or group as text: a name or a whole number."""
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float) and value.is_integer():  # as tables write whole numbers beside empty cells
        value = int(value)
    text = unicodedata.normalize("NFC", str(value)).strip() if isinstance(value, (str, int)) else ""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = ""
    if not text:
        raise InputError(f"{where} has the {column} {str(value)[:50]!r}, no name or whole number. Correct it.")
    return text


def part_of_folders(where: str, above: Sequence[str]) -> str:
    """The part that one of an image's folders says; "" where none does."""
    parts = {PART_MEANT[folder.casefold()] for folder in above if folder.casefold() in PART_MEANT}
    if len(parts) > 1:
        raise InputError(f"{where} lies in folders of two parts. Move it.")
    return parts.pop() if parts else ""
