"""The Gaussian mechanism without sampling in closed form, what TAN reads off it, and how far drawn noise reaches."""

import math
from collections.abc import Iterable

from sfumato.accounting.formats import delta_text
from sfumato.accounting.mechanism import Mechanism, Part
from sfumato.errors import InputError

# Beyond, what the root is searched by is lost to rounding, and Chernoff's bound is as good as
# exact.
_LARGEST_MU = 1e8

DENSE_REACH = 10.6
"""In standard deviations: up to here Box-Muller's radii, of 95 random bits, lie closer than a tenth of the grid of what
is released, 2^-12; beyond, up to the longest one (11.5), most results on the grid have no radius that leads to them.
"""
_MOST_PAIRS = 5e8
"""Of coordinates, two of which share a radius."""
_SHARE_OF_DELTA = 1e-2


def mu_of(parts: Iterable[Part], images: int = 1) -> float:
    """Sensitivity / noise of steps of all examples together, for one unit of so many images: they are one Gaussian."""
    return images * math.hypot(*(math.sqrt(num_steps) / sigma for _, sigma, num_steps in parts))


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
    found = above = mu**2 / 2 + mu * math.sqrt(-2 * log_delta)
    if mu <= _LARGEST_MU:
        found = brentq(
            lambda epsilon: log_delta_gaussian(mu, epsilon) - log_delta, 0.0, above, xtol=1e-13 * above, rtol=1e-13
        )
    return float(found) * (1 + 1e-9)


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


def snr_per_step(mechanism: Mechanism) -> float:
    """eta_step = q / (sqrt 2 sigma), TAN's signal-to-noise ratio of one step (Sander et al. 2022, Definition 3.1)."""
    if mechanism.noise_multiplier == 0:
        return math.inf
    return mechanism.sampling_prob / (math.sqrt(2) * mechanism.noise_multiplier)


def snr(mechanism: Mechanism) -> float:
    """eta = sqrt(S) eta_step, the signal-to-noise ratio of all S steps: the total amount of noise."""
    return math.sqrt(mechanism.num_steps) * snr_per_step(mechanism) if mechanism.num_steps else 0.0


def epsilon_tan(mechanism: Mechanism, delta: float) -> float:
    """epsilon_TAN = eta^2 + 2 eta sqrt(ln 1/delta) (Sander et al. 2022, Eq. 4): a guide, never a guarantee.

    The large-sigma limit of *classic* RDP. It underestimates below sigma = 2, so it is
    never part of a certificate.
    """
    eta = snr(mechanism)
    return eta**2 + 2 * eta * math.sqrt(math.log(1 / delta))


def overcharge(mechanism: Mechanism, delta: float, epsilon: float) -> float:
    """epsilon / epsilon_GDP(mu = sqrt 2 eta) - 1: what a small sigma adds to the price, as a
    fraction.

    The Gaussian limit keeps q / sigma and S and lets sigma grow: it is what the same total
    amount of noise costs at a very large batch.

    Returns:
        NaN where the limit is 0 or not finite.
    """
    eta = snr(mechanism)
    if not 0 < eta < math.inf:
        return math.nan
    limit = epsilon_gaussian(math.sqrt(2) * eta, delta)
    return epsilon / limit - 1 if limit > 0 else math.nan


def unreachable(mechanism: Mechanism) -> float:
    """How likely a release is, with one unit in it, that no noise might give without it; from above.

    The accountants' noise has no end; what is drawn has. One unit moves pairs of coordinates by s_i standard
    deviations, s of them all together; a pair ends beyond DENSE_REACH with probability P(|Z + s_i| > DENSE_REACH),
    which is convex in s_i^2 there. So no sum of them is more than that of one pair that is moved by all of s, and of
    all others unmoved.
    """
    unmoved = _MOST_PAIRS * math.exp(-(DENSE_REACH**2) / 2)
    releases = ((num_steps, _beyond_reach(mechanism.most_images / sigma)) for _, sigma, num_steps in mechanism.parts)
    return min(1.0, sum(num_steps * (moved + unmoved) for num_steps, moved in releases))


def _beyond_reach(shift: float) -> float:
    """P(|Z + s| > R) for a pair Z of standard normals that is moved by s, from above: Rice's density is
    r exp(-(r - s)^2 / 2) i0e(r s), and i0e falls, so that beyond R it is at most i0e(R s).
    """
    from scipy.special import erfc, i0e  # not scipy.stats, which takes most of a second to import

    if shift >= DENSE_REACH:
        return 1.0
    left = DENSE_REACH - shift
    beyond = math.exp(-(left**2) / 2) + shift * math.sqrt(math.pi / 2) * float(erfc(left / math.sqrt(2)))
    return min(1.0, float(i0e(DENSE_REACH * shift)) * beyond)


def refuse_beyond_reach(mechanism: Mechanism, delta: float) -> None:
    """Raises InputError where the end of the noise would be more than a hundredth of delta."""
    if all(sigma > 0 for _, sigma, _ in mechanism.parts) and unreachable(mechanism) > _SHARE_OF_DELTA * delta:
        raise InputError(
            f"noise that is drawn ends at {DENSE_REACH} standard deviations, so delta = {delta_text(delta)} cannot be "
            f"claimed for {mechanism.num_steps} updates at noise multiplier {mechanism.noise_multiplier:g}. State a "
            "larger delta, more noise or fewer updates."
        )
