"""The total amount of noise of a mechanism (Sander et al. 2022): a guide, never a guarantee."""

import math

from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism


def snr_per_step(mechanism: Mechanism) -> float:
    """eta_step = q / (sqrt 2 sigma), TAN's signal-to-noise ratio of one step (Definition 3.1)."""
    if mechanism.noise_multiplier == 0:
        return math.inf
    return mechanism.sampling_prob / (math.sqrt(2) * mechanism.noise_multiplier)


def snr(mechanism: Mechanism) -> float:
    """eta = sqrt(S) eta_step, the signal-to-noise ratio of all S steps."""
    return math.sqrt(mechanism.num_steps) * snr_per_step(mechanism) if mechanism.num_steps else 0.0


def epsilon_tan(mechanism: Mechanism, delta: float) -> float:
    """epsilon_TAN = eta^2 + 2 eta sqrt(ln 1/delta) (Eq. 4).

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
