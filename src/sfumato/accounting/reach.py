"""How far the noise that is drawn reaches, and what that asks of delta."""

import math

import numpy as np

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.rounding import delta_text
from sfumato.errors import InputError

REACH = math.sqrt(2 * 96 * math.log(2))
"""In standard deviations: Box-Muller's longest radius, from 95 random bits (11.5)."""
DENSE_REACH = 10.6
"""Up to here radii lie closer than a tenth of the grid of what is released, 2^-12; beyond, most results on the grid
have no radius that leads to them.
"""
_MOST_PAIRS = 5e8
"""Of coordinates, two of which share a radius."""
_SHARE = 1e-2
_TAIL, _POINTS = 12.0, 4801
"""Where the tail is added up, in standard deviations, and at how many places."""


def unreachable(mechanism: Mechanism) -> float:
    """How likely a release is, with one unit in it, that no noise might give without it; from above.

    The accountants' noise has no end. One unit moves pairs of coordinates by s_i standard deviations, s of them all
    together; a pair ends beyond DENSE_REACH with probability P(|Z + s_i| > DENSE_REACH), which is convex in s_i^2
    there. So no sum of them is more than that of one pair that is moved by all of s, and of all others unmoved. Delta
    would be more by what is counted here, so a run is refused where that matters.
    """
    moves = [(mechanism.num_steps, mechanism.noise_multiplier)] if mechanism.num_steps else []
    if mechanism.first_release_noise is not None:
        moves.append((1, mechanism.first_release_noise))
    total = 0.0
    for count, noise in moves:
        shift = mechanism.images_per_unit / noise
        moved = _beyond(shift) if shift < DENSE_REACH else 1.0
        total += count * (moved + _MOST_PAIRS * math.exp(-(DENSE_REACH**2) / 2))
    return min(1.0, total)


def _beyond(shift: float) -> float:
    """P(|Z + s| > DENSE_REACH) for a pair Z of standard normals that is moved by s: Rice's density, added up."""
    from scipy.special import i0e  # not scipy.stats, which takes most of a second to import

    radii = np.linspace(DENSE_REACH, DENSE_REACH + _TAIL, _POINTS)
    density = radii * np.exp(-((radii - shift) ** 2) / 2) * i0e(radii * shift)
    return float((density[1:] + density[:-1]).sum() / 2 * (radii[1] - radii[0]))


def refuse_beyond_reach(mechanism: Mechanism, delta: float) -> None:
    """Raises InputError where the end of the noise would be more than a hundredth of delta."""
    has_noise = mechanism.noise_multiplier > 0 or mechanism.num_steps == 0
    if has_noise and unreachable(mechanism) > _SHARE * delta:
        raise InputError(
            f"noise that is drawn ends at {DENSE_REACH} standard deviations, so delta = {delta_text(delta)} cannot be "
            f"claimed for {mechanism.num_steps} updates at noise multiplier {mechanism.noise_multiplier:g}. State a "
            "larger delta, more noise or fewer updates."
        )
