"""Two error rates of one attack, and what they say of epsilon.

Everything here works on numbers and on arrays of them alike.
"""

import math
from typing import Any

import numpy as np

from sfumato.accounting.gaussian import epsilon_gaussian

Number = Any  # a float, or an array of them
_LEAST_MU = 1e-9


def upper_rate(count: Number, total: Number, error: float) -> Number:
    """The largest rate that ``count`` of ``total`` leave possible: Clopper-Pearson, one-sided.

    Guarantee: the true rate is above it with probability at most ``error``.

    Args:
        count: 0 to ``total``; need not be whole.

    Example:
        >>> round(float(upper_rate(0, 1000, 0.0005)), 5)
        0.00757
    """
    from scipy.special import betainccinv

    count = np.asarray(count, dtype=np.float64)
    below = count < total
    return np.where(below, betainccinv(count + 1, np.where(below, total - count, 1.0), error), 1.0)


def lower_rate(count: Number, total: Number, error: float) -> Number:
    """The smallest rate that ``count`` of ``total`` leave possible: Clopper-Pearson, one-sided.

    Guarantee: the true rate is below it with probability at most ``error``.
    """
    return 1 - upper_rate(total - np.asarray(count, dtype=np.float64), total, error)


def log_ratio(false_positives: Number, true_positives: Number, delta: float) -> Number:
    """The least epsilon that (epsilon, delta) allows at two rates, at least: Kairouz et al. (2015).

    Either role may be the one that is looked for, so the larger of ln((TPR - delta) / FPR) and
    ln((TNR - delta) / FNR) holds. Both follow from the same two rates: to take the larger costs no
    confidence.

    Args:
        false_positives: Upper bound on the rate.
        true_positives: Lower bound on the rate.

    Returns:
        -infinity where neither rate is above delta.
    """
    return np.maximum(
        _log_quotient(true_positives - delta, false_positives),
        _log_quotient(1 - false_positives - delta, 1 - true_positives),
    )


def gaussian_mu(false_positives: Number, true_positives: Number) -> Number:
    """How many standard deviations lie between the two sides of a Gaussian mechanism with such rates:
    Dong et al. (2022), Eq. 6. At most 0 where the attack tells nothing.
    """
    from scipy.special import ndtri

    return ndtri(true_positives) - ndtri(false_positives)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism with that mu; 0 where mu is not above 0."""
    return epsilon_gaussian(mu, delta) if mu > 0 else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian mechanism spends exactly (epsilon, delta); the least that is tried is 1e-9.

    Example:
        >>> round(gaussian_epsilon(mu_of(2.0, 1e-5), 1e-5), 6)
        2.0
    """
    from scipy.optimize import brentq

    if epsilon_gaussian(_LEAST_MU, delta) >= epsilon:
        return _LEAST_MU
    high = 1.0
    while epsilon_gaussian(high, delta) < epsilon:
        high *= 2
    return float(brentq(lambda mu: epsilon_gaussian(mu, delta) - epsilon, _LEAST_MU, high, xtol=1e-12))


def advantage_bound(epsilon: float, delta: float) -> float:
    """True positives less false ones, at most, under (epsilon, delta): De et al. (2022), Table 8.

    Example:
        >>> [round(advantage_bound(epsilon, 0.01), 2) for epsilon in (1.0, 2.0, 4.0, 8.0)]
        [0.47, 0.76, 0.96, 1.0]
    """
    # Written so that a large epsilon does not overflow.
    return min(1.0, 1 - 2 * (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1))


def _log_quotient(above: Number, below: Number) -> Number:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(above) > 0, np.log(above) - np.log(below), -np.inf)
