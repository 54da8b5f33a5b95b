"""Which images are held out: a fixed public rule that looks at names, never at pixels.

Each name is hashed alone, so that adding or removing an image moves no other: two
folders that differ in one image still differ in one image after the split, which a
shuffle of N indices would not give.
"""

import collections
import hashlib
from collections.abc import Sequence
from typing import Literal

from sfumato.data.listing import ImageFile
from sfumato.errors import InputError

HELD_OUT_FRACTION = 0.2
Part = Literal["train", "valid", "test"]


def hash_fraction(purpose: str, name: str) -> float:
    """A fixed public number in [0, 1) for a name; SHA-256, so that it spreads evenly whatever the
    names.

    Example:
        >>> round(hash_fraction("test", "NORMAL/a.png"), 4) == round(hash_fraction("test", "NORMAL/a.png"), 4)
        True
    """
    text = f"sfumato split 1\0{purpose}\0{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") / 2**48  # 48 bits: exact in a float


def is_held_out(purpose: str, name: str) -> bool:
    """Whether the image or group of this name falls into the 20 % that are held out.

    Args:
        purpose: "test" or "valid"; the two choices are independent.
        name: The relative path of an image with `/`, or the name of its group.
    """
    return hash_fraction(purpose, name) < HELD_OUT_FRACTION


def hold_out(purpose: str, count: int, held_out: int) -> tuple[list[int], list[int]]:
    """Splits the indices of a public data set of known size, exactly.

    Args:
        purpose: Which split, such as "cifar10 valid".
        count: The number of images.
        held_out: How many are held out.

    Returns:
        The kept and the held-out indices, both ascending.
    """
    order = sorted(range(count), key=lambda index: hash_fraction(purpose, str(index)))
    return sorted(order[held_out:]), sorted(order[:held_out])


def split(files: Sequence[ImageFile], which: Literal["train", "train+valid"]) -> dict[Part, list[int]]:
    """Which images train and which are held out, by the folder's parts or by the hash of each name
    alone.

    Args:
        files: The listed images; their groups, where given, are hashed instead of their paths.
        which: "train" sets "valid" apart from the training images; "train+valid" does not, unless
            the folder has valid/ and no test/: that is then its only held-out part.

    Returns:
        The places of each part's images, ascending.

    Raises:
        InputError: If a group would have images on both sides.
    """
    given = {item.part for item in files}
    valid_alone = holds_out_valid_alone(files)
    parts: dict[Part, list[int]] = {"train": [], "valid": [], "test": []}
    sides: dict[str, tuple[Part, ImageFile]] = {}
    for place, item in enumerate(files):
        name = item.group or item.hashed or item.name
        part: Part = "train"
        if valid_alone:
            part = "valid" if item.part == "valid" else "train"
        elif item.part == "test" if "test" in given else is_held_out("test", name):
            part = "test"
        elif which == "train" and (item.part == "valid" if "valid" in given else is_held_out("valid", name)):
            part = "valid"
        if item.group is not None:
            other, first = sides.setdefault(item.group, (part, item))
            if other != part:
                raise InputError(
                    f"group {item.group} has images on both sides: {first.name} ({other}) "
                    f"and {item.name} ({part}). Move all images of a group into one part."
                )
        parts[part].append(place)
    return parts


def holds_out_valid_alone(files: Sequence[ImageFile]) -> bool:
    """Whether the folder's owner held out valid/ and nothing else: training on it would surprise."""
    given = {item.part for item in files}
    return "valid" in given and "test" not in given


def beyond_limit(files: Sequence[ImageFile], limit: int | None) -> list[int]:
    """The places of images beyond so many of their group, all but those whose names' hashes are
    smallest: no pixel and no other group decides.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for place, item in enumerate(files):
        if item.group is not None:
            groups[item.group].append(place)
    beyond: list[int] = []
    for group in groups.values() if limit is not None else ():
        order = sorted(group, key=lambda place: hash_fraction("kept", files[place].hashed or files[place].name))
        beyond += order[limit:]
    return beyond
