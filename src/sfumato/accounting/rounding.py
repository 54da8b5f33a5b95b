"""Epsilon and delta as text. They are bounds, so they are rounded to the side on which they stay
bounds: nothing else prints one.
"""

import decimal
import math

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
