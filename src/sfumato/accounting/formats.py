"""How numbers are printed, and lines for people. What is a bound, as every epsilon, is rounded to the side on which it
stays one: nothing else prints one.
"""

import decimal
import math
import sys
from collections.abc import Sequence
from fractions import Fraction

_UP = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
_DOWN = decimal.Context(prec=4, rounding=decimal.ROUND_FLOOR)
_IN_FULL = decimal.Context(prec=50)  # a float has 17 digits at most


def epsilon_text(value: float | None) -> str:
    """An epsilon with four significant digits, rounded up so that it stays an upper bound.

    None and infinity, the two ways to write that there is no finite one, are "infinite".

    Example:
        >>> epsilon_text(2.99613), epsilon_text(0.1), epsilon_text(None)
        ('2.997', '0.1', 'infinite')
    """
    return "infinite" if value is None or not math.isfinite(value) else _short(value, _UP)


def factor_text(epsilon: float | None) -> str:
    """e to the power of an epsilon, rounded up, so that it stays an upper bound.

    Example:
        >>> factor_text(1.0), factor_text(13.5), factor_text(30.0), factor_text(None)
        ('2.719', '729500', '1.069E+13', 'infinite')
    """
    factor = math.inf if epsilon is None or epsilon > 700 else math.nextafter(math.exp(epsilon), math.inf)
    return str(_UP.create_decimal_from_float(factor)) if 1e6 <= factor < math.inf else epsilon_text(factor)


def lower_epsilon_text(value: float) -> str:
    """A lower bound on an epsilon with four significant digits, rounded down so that it stays one.

    Example:
        >>> lower_epsilon_text(2.99687), lower_epsilon_text(0.0)
        ('2.996', '0')
    """
    return _short(value, _DOWN)


def delta_text(value: float | None) -> str:
    """Delta in full, because it is a promise: never rounded. None: where there is no budget, "none".

    Example:
        >>> delta_text(1e-05), delta_text(0.0001), delta_text(7.8e-07)
        ('1e-5', '1e-4', '7.8e-7')
    """
    if value is None:
        return "none"
    digits, exponent = f"{decimal.Decimal(repr(value)).normalize(_IN_FULL):e}".split("e")
    return f"{digits}e{int(exponent)}"


def _short(value: float, context: decimal.Context) -> str:
    return f"{decimal.Decimal(repr(value)).normalize(context):f}"


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent with two decimals.

    Example:
        >>> per_cent(0.97222), per_cent(None)
        ('97.22 %', 'none')
    """
    return "none" if fraction is None else f"{100 * fraction:.2f} %"


def share(fraction: float | None, interval: Sequence[float] | None) -> str:
    """A fraction as per cent, with its interval.

    Example:
        >>> share(0.97222, [0.9, 1.0]), share(None, None)
        ('97.22 % (90.00 % to 100.00 %)', 'none')
    """
    return f"{per_cent(fraction)} ({' to '.join(map(per_cent, interval))})" if interval else per_cent(fraction)


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


def progress(what: str, done: int, of: int, seconds: float) -> str:
    """Where a long command stands after so many seconds.

    Example:
        >>> progress("decoding images", 512, 1200, 2.0)
        'decoding images: 512 of 1,200, 256.0 a second, 0:02 left'
    """
    minutes, left = divmod(int(seconds / max(done, 1) * (of - done)), 60)
    pace = done / max(seconds, 1e-9)
    return f"{what}: {count(done)} of {count(of)}, {pace:,.1f} a second, {minutes}:{left:02d} left"


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
