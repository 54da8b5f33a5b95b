"""Lines on stderr, for people."""

import sys


def plain(text: str) -> str:
    r"""A line that cannot steer a terminal: all that is not printed (escape sequences, line breaks,
    turns of the writing direction) is spelled out.

    Names of classes and files come from others.

    Example:
        >>> print(plain("cat\x1b[2J"))
        cat\x1b[2J
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def note(text: str) -> None:
    """One line of progress, on stderr."""
    print(plain(text), file=sys.stderr, flush=True)
