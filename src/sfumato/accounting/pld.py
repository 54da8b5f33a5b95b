"""Epsilon by privacy loss distributions: the tightest certificate (library: dp-accounting).

The library rounds pessimistically, so each value is an upper bound whatever the grid. What this
module adds is the choice of the grid, an estimate of its cost before it is built, and a second
computation on a grid twice as coarse, whose answer must be larger, and not by much.
"""

import functools
import math
import warnings

_FINEST = 20  # grid steps per q / sigma; the relative error is about 0.08 (interval sigma / q)^2
_MAX_STEP_POINTS = 60_000  # of one step's distribution: about 10 microseconds each
_MAX_POINTS = 200_000  # of the composed distribution: about 4 microseconds and 200 bytes each
_COARSEST_GAP = 0.03  # between the two grids; the finer one's own error is a third of it
_TAIL = 10.0  # standard deviations that the library keeps of one step's noise
_SPREAD = 18.0  # standard deviations that it keeps of the composed loss


@functools.lru_cache(maxsize=4096)
def epsilon_pld(sampling_prob: float, noise_multiplier: float, num_steps: int, delta: float) -> tuple[float | None, str]:
    """Upper bound on epsilon of T Poisson-subsampled Gaussian steps, add-or-remove-one.

    Args:
        sampling_prob: q in (0, 1].
        noise_multiplier: sigma > 0.
        num_steps: T >= 1.
        delta: In (0, 1).

    Returns:
        epsilon and "", or None and the reason why no value can be certified.
    """
    if sampling_prob == 1.0:
        return epsilon_gaussian(math.sqrt(num_steps) / noise_multiplier, delta), ""
    interval, reason = grid_interval(sampling_prob, noise_multiplier, num_steps)
    if reason:
        return None, reason
    coarse, fine = (_epsilon_at(sampling_prob, noise_multiplier, num_steps, delta, width) for width in (2 * interval, interval))
    if not (math.isfinite(coarse) and math.isfinite(fine)):
        return None, "PLD finds no finite epsilon at this delta"
    if fine > coarse * (1 + 1e-7):
        return None, "PLD's rounding noise exceeds its resolution"
    if coarse > fine * (1 + _COARSEST_GAP) + 1e-4:
        return None, "PLD's grid would be too coarse"
    return fine, ""


def grid_interval(sampling_prob: float, noise_multiplier: float, num_steps: int) -> tuple[float, str]:
    """The discretisation interval, or why none is affordable (over 2 GB or 10 s)."""
    q, sigma = sampling_prob, noise_multiplier
    scale = q / sigma
    largest_loss = math.log1p(q * math.expm1(min(_TAIL / sigma + 0.5 / sigma**2, 700.0)))
    step_spread = min(q * math.sqrt(math.expm1(min(1 / sigma**2, 700.0))), largest_loss)
    composed = 2 * largest_loss + _SPREAD * math.sqrt(num_steps) * step_spread
    interval = max(scale / _FINEST, largest_loss / _MAX_STEP_POINTS, composed / _MAX_POINTS)
    if interval > 4 * scale and interval > 0.02:
        return interval, f"PLD would need a grid of {composed / scale * _FINEST:.1e} points"
    return interval, ""


def epsilon_gaussian(signal: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism with sensitivity / standard deviation = signal, in closed form.

    Balle and Wang (2018), Theorem 8: delta = Phi(m/2 - e/m) - exp(e) Phi(-m/2 - e/m).
    """
    from scipy.special import log_ndtr, ndtr

    def delta_at(epsilon: float) -> float:
        return ndtr(signal / 2 - epsilon / signal) - math.exp(epsilon + log_ndtr(-signal / 2 - epsilon / signal))

    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high * (1 + 1e-9)


def _epsilon_at(q: float, sigma: float, num_steps: int, delta: float, interval: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_step = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=interval)
        return float(one_step.self_compose(num_steps).get_epsilon_for_delta(delta))
