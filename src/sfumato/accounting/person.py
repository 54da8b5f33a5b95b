"""Epsilon for a person with several images."""

import math

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import epsilon_pld
from sfumato.errors import InputError


def epsilon_person(mechanism: Mechanism, delta: float, max_images: int) -> float:
    """Upper bound on epsilon when all of one person's images are replaced by zero.

    Each of k images is Poisson-sampled by itself, so a step's sensitivity is Binomial(k, q):
    a mixture of Gaussians, composed under PLD (library: dp-accounting).

    Args:
        mechanism: Its sampling must be "poisson".
        delta: In (0, 1).
        max_images: k >= 1, the most images that one person has.

    Returns:
        epsilon; infinity where none can be certified.

    Raises:
        InputError: If the sampling is shuffled.
    """
    if mechanism.sampling != "poisson":
        raise InputError('privacy.max_images_per_person needs privacy.sampling = "poisson": no epsilon is known for shuffled batches.')
    if mechanism.num_steps == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    tight = epsilon_pld(mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps, delta, max_images)
    return math.inf if tight.epsilon is None else tight.epsilon
