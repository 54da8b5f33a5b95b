"""How numbers are printed, and lines for people. What is a bound is rounded to the side on which it stays one."""

import math
import sys
from fractions import Fraction

from sfumato.accounting.rounding import delta_text as delta_text
from sfumato.accounting.rounding import epsilon_text as epsilon_text


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent with two decimals.

    Example:
        >>> per_cent(0.97222), per_cent(None)
        ('97.22 %', 'none')
    """
    return "none" if fraction is None else f"{100 * fraction:.2f} %"


def per_cent_at_most(fraction: float) -> str:
    """An upper bound as per cent: rounded up to two decimals."""
    return f"{math.ceil(Fraction(repr(fraction)) * 10_000) / 100:.2f} %"


def one_in(probability: float) -> str:
    """An upper bound on a small probability in words: never a smaller one.

    Example:
        >>> one_in(1e-05), one_in(7.777e-07)
        ('1 in 100,000', '1 in 1,280,000')
    """
    times = 1 / Fraction(repr(probability))
    unit = Fraction(10) ** (len(str(math.floor(times))) - 3)  # three digits
    return f"1 in {math.floor(math.floor(times / unit) * unit):,}"


def chance_at_most(probability: float) -> str:
    """An upper bound on a probability that may be small: in per cent, or in words.

    Example:
        >>> chance_at_most(0.12341), chance_at_most(7.777e-04)
        ('12.35 %', '1 in 1,280')
    """
    return per_cent_at_most(probability) if probability >= 0.01 else one_in(probability)


def count(value: int) -> str:
    """A whole number with its thousands marked."""
    return f"{value:,}"


def quantity(value: float | None) -> str:
    """Any other number with up to four significant digits."""
    return "none" if value is None else f"{value:.4g}"


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
