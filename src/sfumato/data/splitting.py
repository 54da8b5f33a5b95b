"""Which images are held out: a fixed public rule that looks at names, never at pixels.

Each name is hashed alone, so that adding or removing an image moves no other: two
folders that differ in one image still differ in one image after the split, which a
shuffle of N indices would not give.
"""

import hashlib

HELD_OUT_FRACTION = 0.2


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
