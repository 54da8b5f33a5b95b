"""How far the noise that is drawn reaches, and what that asks of delta."""

import math

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError

REACH = math.sqrt(128 * math.log(2))
"""In standard deviations: Box-Muller's radius from 63 random bits, at its longest (9.42)."""
_MOST_COORDINATES = 1e10
_SHARE = 1e-2


def unreachable(mechanism: Mechanism) -> float:
    """How likely a release is, with one unit in it, that no noise could give without it; from above.

    The accountants' noise has no end. Where one unit moves a coordinate by s standard deviations, results beyond REACH
    are had with it alone: with probability Q(REACH - s) <= Q(REACH - s_1) for a move along one coordinate, and at most
    the sum of s_i phi(REACH) where it is spread over many. What is counted here is added to delta.
    """
    from scipy.stats import norm

    moves = [(mechanism.num_steps, mechanism.noise_multiplier)]
    if mechanism.first_release_noise is not None:
        moves.append((1, mechanism.first_release_noise))
    total = 0.0
    for count, noise in moves:
        shift = mechanism.images_per_unit / noise
        spread = math.sqrt(_MOST_COORDINATES) * shift * float(norm.pdf(REACH))
        total += count * (float(norm.sf(REACH - shift)) + spread)
    return min(1.0, total)


def refuse_beyond_reach(mechanism: Mechanism, delta: float) -> None:
    """Raises InputError where the end of the noise would be more than a hundredth of delta."""
    if mechanism.noise_multiplier > 0 and unreachable(mechanism) > _SHARE * delta:
        raise InputError(
            f"noise that is drawn ends at {REACH:.1f} standard deviations, so delta = {delta:g} cannot be claimed at "
            f"noise multiplier {mechanism.noise_multiplier:g}. State a larger delta, or add more noise."
        )
