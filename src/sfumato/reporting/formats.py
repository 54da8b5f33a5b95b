"""How numbers are printed. What is a bound is rounded to the side on which it stays one."""

import decimal
import math


def per_cent(fraction: float | None) -> str:
    """A fraction as per cent with two decimals.

    Example:
        >>> per_cent(0.97222), per_cent(None)
        ('97.22 %', 'none')
    """
    return "none" if fraction is None else f"{100 * fraction:.2f} %"


def per_cent_at_most(fraction: float) -> str:
    """An upper bound as per cent: rounded up to two decimals."""
    hundredths = math.ceil(round(fraction * 1e4, 9))  # round: 0.5 * 1e4 must not become 5000.000000000001
    return f"{hundredths / 100:.2f} %"


def epsilon(value: float | None) -> str:
    """An epsilon with four significant digits, rounded up so that it stays an upper bound.

    None and infinity, the two ways to write that there is no finite one, are "infinite".

    Example:
        >>> epsilon(2.99613), epsilon(0.1), epsilon(None)
        ('2.997', '0.1', 'infinite')
    """
    if value is None or not math.isfinite(value):
        return "infinite"
    exact = decimal.Decimal(repr(value))
    rounded = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).plus(exact)
    return f"{rounded.normalize():f}"


def delta(value: float) -> str:
    """Delta in full, because it is a promise: never rounded.

    Example:
        >>> delta(1e-05), delta(0.0001), delta(7.8e-07)
        ('1e-5', '1e-4', '7.8e-7')
    """
    digits, exponent = f"{decimal.Decimal(repr(value)).normalize():e}".split("e")
    return f"{digits}e{int(exponent)}"


def one_in(probability: float) -> str:
    """A small probability in words.

    Example:
        >>> one_in(1e-05)
        '1 in 100,000'
    """
    return f"1 in {float(f'{1 / probability:.3g}'):,.0f}"


def count(value: int) -> str:
    """A whole number with its thousands marked."""
    return f"{value:,}"


def quantity(value: float | None) -> str:
    """Any other number with up to four significant digits."""
    return "none" if value is None else f"{value:.4g}"
