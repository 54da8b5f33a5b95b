"""What an audit of so many games could show at best, and how many an epsilon needs."""

import functools
import math

import numpy as np

from sfumato.auditing.rates import gaussian_epsilon, gaussian_mu, log_ratio, lower_rate, mu_of, upper_rate
from sfumato.auditing.record import Power

_MOST_GAMES = 10**15


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
    if epsilon is None or not math.isfinite(epsilon):
        return Power(perfect=best, tight=None, tight_gaussian=None, games_needed=None)
    needed = games_needed(epsilon, confidence, delta, share)
    if epsilon <= 0:
        return Power(perfect=best, tight=0.0, tight_gaussian=0.0, games_needed=needed)
    mu = mu_of(epsilon, delta)
    # Expected counts, which need not be whole, at every threshold that could be the best one.
    thresholds = np.linspace(-9, mu + 9, 4001)
    false_positives = upper_rate(num_non_members * ndtr(-thresholds), num_non_members, error)
    true_positives = lower_rate(num_members * ndtr(mu - thresholds), num_members, error)
    tight = float(log_ratio(false_positives, true_positives, delta).max())
    tight_mu = float(gaussian_mu(false_positives, true_positives).max())
    return Power(
        perfect=best,
        tight=max(0.0, tight),
        tight_gaussian=gaussian_epsilon(tight_mu, delta),
        games_needed=needed,
    )


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

    high = 2
    while not shows(high):
        high *= 2
        if high > _MOST_GAMES:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high
