"""The Gaussian mechanism without sampling, in closed form."""

import math

# Beyond, what the root is searched by is lost to rounding, and Chernoff's bound is as good as
# exact.
_LARGEST_MU = 1e8


def log_delta_gaussian(mu: float, epsilon: float) -> float:
    """log delta of a Gaussian mechanism with sensitivity / noise = mu: Balle and Wang 2018, Theorem
    8.

    Args:
        mu: sqrt(T) / sigma for T steps of the full batch; above 0.
        epsilon: At least 0.
    """
    from scipy.special import log_ndtr

    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return upper + math.log(-math.expm1(lower - upper)) if lower < upper else -math.inf


def epsilon_gaussian(mu: float, delta: float) -> float:
    """The least epsilon of the Gaussian mechanism at ``delta``, rounded up by 1e-9 relative; above
    mu = 1e8 by at most 1e-6.

    Example:
        >>> round(epsilon_gaussian(1.0, 1e-5), 4)
        4.3772
    """
    from scipy.optimize import brentq

    log_delta = math.log(delta)
    if log_delta_gaussian(mu, 0.0) <= log_delta:
        return 0.0
    # Chernoff: at this epsilon the loss exceeds epsilon with probability at most delta.
    above = mu**2 / 2 + mu * math.sqrt(-2 * log_delta)
    if mu > _LARGEST_MU:
        return above * (1 + 1e-9)
    root = brentq(
        lambda epsilon: log_delta_gaussian(mu, epsilon) - log_delta, 0.0, above, xtol=1e-13 * above, rtol=1e-13
    )
    return float(root) * (1 + 1e-9)


def mu_gaussian(epsilon: float, delta: float) -> float:
    """The mu of the Gaussian mechanism that spends about epsilon at delta: where a budget is shared out, before what it
    pays for is certified.

    Example:
        >>> round(mu_gaussian(4.3772, 1e-5), 4)
        1.0
    """
    from scipy.optimize import brentq

    high = 1.0
    while epsilon_gaussian(high, delta) < epsilon:
        high *= 2
    return float(brentq(lambda mu: epsilon_gaussian(mu, delta) - epsilon, 1e-12, high, xtol=1e-12 * high, rtol=1e-9))
