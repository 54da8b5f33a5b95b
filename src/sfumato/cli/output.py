"""What goes to stdout and what to stderr."""

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Exactly one strict JSON object on stdout."""
    print(json.dumps(value, allow_nan=False))


def plain(text: str) -> str:
    r"""A line that cannot steer a terminal: all that is not printed (escape sequences, line breaks, turns of the
    writing direction) is spelled out.

    Names of classes and files come from others.

    Example:
        >>> print(plain("cat\x1b[2J"))
        cat\x1b[2J
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def say(text: str) -> None:
    """A line of the result, on stdout."""
    print(plain(text))


def note(text: str) -> None:
    """One line of progress, on stderr."""
    print(plain(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """One line that the user should read, on stderr."""
    note(f"warning: {text}")


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def print_augtest(views: int, vote: float | None, mean: float | None) -> None:
    """One line on stdout, if a test with views was done."""
    if views:
        say(
            f"with {views} random views of each image: {per_cent(vote)} by majority, {per_cent(mean)} by mean "
            "probability"
        )
