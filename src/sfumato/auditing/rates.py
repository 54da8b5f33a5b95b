"""Two error rates of one attack, what they say of epsilon, and what so many games could show at best.

Rates are numbers or arrays of them alike.
"""

import bisect
import functools
import math
from typing import Any

import numpy as np

from sfumato.accounting.gaussian import epsilon_gaussian, mu_gaussian
from sfumato.auditing.record import Power

Number = Any  # a float, or an array of them
_MOST_GAMES = 10**15


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


def stated(
    inside: np.ndarray, outside: np.ndarray, delta: float, confidence: float, epsilon: float | None, shown: float
) -> dict[str, Any]:
    """What every audit ends with but its bounds (`record.Shown`).

    Args:
        inside: Sorted scores with the example.
        outside: Sorted scores without it.
        epsilon: That is claimed, if any.
        shown: The largest bound that may refute the claim.
    """
    below = np.searchsorted(outside, inside, side="left").sum(dtype=np.int64)
    up_to = np.searchsorted(outside, inside, side="right").sum(dtype=np.int64)
    return {
        "confidence": float(confidence),
        "nominal_epsilon": None if epsilon is None else float(epsilon),
        "delta": float(delta),
        "violated": None if epsilon is None else bool(shown > epsilon),
        "num_games": len(inside) + len(outside),
        "auc": float((int(below) + int(up_to)) / (2 * len(inside) * len(outside))),  # ties count half
        "advantage_upper_bound": None if epsilon is None else advantage_bound(epsilon, delta),
    }


def advantage_bound(epsilon: float, delta: float) -> float:
    """True positives less false ones, at most, under (epsilon, delta): De et al. (2022), Table 8.

    Example:
        >>> [round(advantage_bound(epsilon, 0.01), 2) for epsilon in (1.0, 2.0, 4.0, 8.0)]
        [0.47, 0.76, 0.96, 1.0]
    """
    # Written so that a large epsilon does not overflow.
    return min(1.0, 1 - 2 * (1 - delta) / (math.exp(min(epsilon, 700.0)) + 1))


@functools.lru_cache(maxsize=64)
def power(
    num_members: int, num_non_members: int, confidence: float, delta: float, epsilon: float | None, share: float
) -> Power:
    """What an audit can show.

    Args:
        num_members: Games that the bound uses, where the example took part.
        num_non_members: And where it did not.
        confidence: Of one bound.
        epsilon: That is claimed, if any.
        share: Of all games, those that choose the threshold.
    """
    from scipy.special import ndtr

    error = (1 - confidence) / 2
    best = max(0.0, perfect(num_members, num_non_members, confidence, delta))
    if epsilon is None:
        return Power(perfect=best, tight=None, tight_gaussian=None, games_needed=None)
    needed = games_needed(epsilon, confidence, delta, share)
    if epsilon <= 0:
        return Power(perfect=best, tight=0.0, tight_gaussian=0.0, games_needed=needed)
    mu = mu_gaussian(epsilon, delta)
    # Expected counts, which need not be whole, at every threshold that could be the best one.
    thresholds = np.linspace(-9, mu + 9, 4001)
    false_positives = upper_rate(num_non_members * ndtr(-thresholds), num_non_members, error)
    true_positives = lower_rate(num_members * ndtr(mu - thresholds), num_members, error)
    tight = max(0.0, float(log_ratio(false_positives, true_positives, delta).max()))
    tight_mu = float(gaussian_mu(false_positives, true_positives).max())
    return Power(perfect=best, tight=tight, tight_gaussian=gaussian_epsilon(tight_mu, delta), games_needed=needed)


def perfect(num_members: float, num_non_members: float, confidence: float, delta: float) -> float:
    """The Clopper-Pearson bound of an attack that is never wrong.

    Example:
        >>> round(perfect(1000, 1000, 0.999, 0.01), 2)
        4.87
    """
    # In closed form: a rate of 0 of n is below 1 - error^(1/n).
    log_error = math.log((1 - confidence) / 2)
    false_positives, true_positives = -math.expm1(log_error / num_non_members), math.exp(log_error / num_members)
    return float(log_ratio(false_positives, true_positives, delta))


def games_needed(epsilon: float, confidence: float, delta: float, share: float) -> int | None:
    """The fewest games, half of them on each side, with which an attack that is never wrong shows
    more than ``epsilon``; None where none do, or more than 10^15.
    """

    def shows(total: int) -> bool:
        used = total / 2 * (1 - share)
        return perfect(used, used, confidence, delta) > epsilon

    found = bisect.bisect_left(range(_MOST_GAMES + 1), True, lo=2, key=shows)
    return found if found <= _MOST_GAMES else None


def _log_quotient(above: Number, below: Number) -> Number:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(above) > 0, np.log(above) - np.log(below), -np.inf)
