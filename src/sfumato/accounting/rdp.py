"""Renyi differential privacy of the Poisson-subsampled Gaussian, at real orders."""

import math
from collections.abc import Sequence

import numpy as np

from sfumato.accounting.mechanism import Part

# Added to every log moment, relative: far above the quadrature's own error (below 1e-8:
# rounding near order 1 dominates; see `_moment_minus_one`), far below the 1e-3 that is asked.
RELATIVE_ERROR = 1e-7

# Half-width, in standard deviations, of what is integrated beyond the outermost modes.
# The Gaussian mass outside is 6e-39; relative to the smallest moment it matters less than 1e-30.
_TAIL = 13.0

# Orders nearer to 1 lose their last digits; they are optimal only for epsilon above a million.
_LEAST_ORDER_MINUS_ONE = 1e-5


def log_moment(sampling_prob: float, noise_multiplier: float, order: float) -> float:
    r"""The log of E_{x ~ mu_0}[(mu(x) / mu_0(x))^order], from above.

    Here mu_0 = N(0, sigma^2) and mu = (1 - q) N(0, sigma^2) + q N(1, sigma^2), the worst pair of
    the Poisson-subsampled Gaussian under add-or-remove; of the two directions this is the larger
    (`Mironov et al. (2019) <https://arxiv.org/abs/1908.10530>`_, Section 3.1 and Theorem 5).

    The trapezoid rule over z = x / sigma has an error of at most 2 exp(y^2/2 - 2 pi y / h) of the
    moment for step h and any y < pi sigma, since the integrand is analytic for |Im z| < pi sigma
    and there at most exp(y^2/2) times its value on the real line: below 1e-20 for the steps used
    here.

    Args:
        sampling_prob: q in (0, 1].
        noise_multiplier: sigma > 0.
        order: alpha > 1, any real number.

    Returns:
        A value never below the true one and at most 2e-7 above it, relative.

    Example:
        >>> round(log_moment(1.0, 2.0, 3.0), 6)  # alpha (alpha - 1) / (2 sigma^2)
        0.75
    """
    q, sigma = sampling_prob, noise_multiplier
    if q == 1:
        return order * (order - 1) / (2 * sigma**2)
    z, step = _grid(q, sigma, order)
    w = z / sigma - 1 / (2 * sigma**2)  # log of the density ratio of N(1, sigma^2) to N(0, sigma^2)
    log_weight = -0.5 * z**2 + math.log(step / math.sqrt(2 * math.pi))
    # log(1 - q + q e^w): log1p keeps the digits of small q, logaddexp does not overflow.
    with np.errstate(over="ignore"):
        log_ratio = np.where(
            w < 30, np.log1p(q * np.expm1(np.minimum(w, 30))), np.logaddexp(math.log1p(-q), math.log(q) + w)
        )
    exponent = order * log_ratio + log_weight
    largest = float(exponent.max())
    log_value = largest + math.log(np.exp(exponent - largest).sum())
    if log_value < 1:
        log_value = math.log1p(_moment_minus_one(q, order, w, log_ratio, log_weight))
    return log_value * (1 + RELATIVE_ERROR)


def _grid(q: float, sigma: float, order: float) -> tuple[np.ndarray, float]:
    """Points and step over all modes of the integrand and ``_TAIL`` beyond them."""
    # Its modes solve z = (order/sigma) p(z) with p(z) = q e^w / (1 - q + q e^w), increasing in z:
    # all are positive, and iterating from order/sigma falls monotonically to the largest, so any
    # iterate is an upper bound.
    upper = order / sigma
    log_odds = math.log(q) - math.log1p(-q) - 1 / (2 * sigma**2)
    while upper - (lower := order / sigma / (1 + math.exp(min(700.0, -(log_odds + upper / sigma))))) >= 0.5:
        upper = lower
    upper = max(upper, 2 / sigma)  # of u^2, the moment less 1 where q is tiny
    step = min(0.5, sigma / 3)
    first, last = math.floor(-_TAIL / step), math.ceil((upper + _TAIL) / step)
    return step * np.arange(first, last + 1), step


def _moment_minus_one(q: float, order: float, w: np.ndarray, log_ratio: np.ndarray, log_weight: np.ndarray) -> float:
    """E[(1+u)^order] - 1 with 1 + u = mu / mu_0, for moments near 1.

    As E[u] = 0 this is E[(1+u)^order - 1 - order u], whose integrand is nowhere negative, so that
    nothing cancels in the sum.
    """
    # Beyond e^30 the one of expm1 is lost anyway; what exceeds e is not small.
    u = np.where(w < 30, q * np.expm1(np.minimum(w, 30)), np.exp(np.minimum(math.log(q) + w, 1)))
    weight = np.exp(log_weight)
    x = order * u
    # Pointwise it would cancel where order * u is small: there Taylor, with a remainder below
    # 1e-11.
    small = np.abs(x) < 0.1
    v = np.where(small, u, 0.0)
    series = np.ones_like(v)
    for k in range(10, 2, -1):
        series = 1 + (order - k + 1) / k * v * series
    taylor = 0.5 * order * (order - 1) * v**2 * series * weight
    # e^w and the weight are multiplied as exponents: for small sigma e^w alone overflows.
    plain = np.exp(order * log_ratio + log_weight) - weight - order * q * (np.exp(w + log_weight) - weight)
    return float(np.where(small, taylor, plain).sum())


def rdp(sampling_prob: float, noise_multiplier: float, order: float) -> float:
    """Renyi divergence of one step at one real order, from above (Mironov et al. 2019, Theorem 4)."""
    return log_moment(sampling_prob, noise_multiplier, order) / (order - 1)


def epsilon_rdp(parts: Sequence[Part], delta: float) -> float:
    """Epsilon of the composition by RDP, minimised over orders in (1, inf).

    Divergences of all steps add up at each order; from there to epsilon Canonne, Kamath, Steinke 2020, Proposition 12,
    the same as Balle et al. 2020, Theorem 21.

    T times the log moment is convex in the order, and so are the conversion's terms times (order -
    1): epsilon is their ratio to order - 1, hence quasi-convex, and one bounded search finds its
    minimum.

    Guarantee: an upper bound on the true epsilon, as every order gives one, in whatever order the steps are taken.

    Args:
        parts: Of each kind of steps q in (0, 1], sigma > 0 and T >= 1; at least one.
        delta: In (0, 1).

    Example:
        >>> steps = (4096 / 50_000, 10.0, 875)  # De et al. 2022, Table 12, nominal epsilon 1
        >>> round(epsilon_rdp([steps], 1e-5), 3)
        0.988
    """
    from scipy.optimize import minimize_scalar

    log_inverse_delta = -math.log(delta)

    def epsilon(log_order_minus_one: float) -> float:
        order = 1 + math.exp(log_order_minus_one)
        divergence = sum(num_steps * rdp(q, sigma, order) for q, sigma, num_steps in parts)
        return divergence + math.log1p(-1 / order) + (log_inverse_delta - math.log(order)) / (order - 1)

    largest = max(largest_order(q, sigma, log_inverse_delta) for q, sigma, _ in parts)
    bounds = math.log(_LEAST_ORDER_MINUS_ONE), math.log(largest)
    found = minimize_scalar(epsilon, bounds=bounds, method="bounded", options={"xatol": 1e-5})
    return max(0.0, float(found.fun))


def largest_order(q: float, sigma: float, price: float) -> float:
    """Beyond the best order, but never so large that the integral takes time and memory without
    end.

    Beyond 2 sigma^2 log(1/q) the moment is that of the Gaussian without sampling, less order *
    log(1/q); the best order without sampling is 1 + sigma sqrt(2 price / T). Twice their sum lies
    beyond the optimum. Orders above 1e4 sigma matter where sigma is above a hundred, for epsilons
    far below 1e-3 alone.

    Args:
        q: In (0, 1].
        sigma: Above 0.
        price: What is shared among the orders less one: log(1/delta), for one run.
    """
    return 2 + min(4 * sigma**2 * math.log(1 / q) + 2 * sigma * math.sqrt(2 * price), 1e4 * sigma)
