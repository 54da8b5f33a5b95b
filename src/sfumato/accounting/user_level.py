"""Epsilon for a person with several images."""

import math

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import epsilon_pld
from sfumato.errors import InputError


def epsilon_person(mechanism: Mechanism, delta: float, images: int) -> float:
    """Upper bound on epsilon when all of one person's images contribute zero instead.

    Each of k images is Poisson sampled by itself, so that what a step holds of the person is Binomial(k, q) clipped gradients,
    the worst case parallel ones: a mixture of Gaussians, composed under PLD.

    Args:
        mechanism: Its sampling must be "poisson".
        delta: In (0, 1).
        images: k >= 1, the most images that one person has.

    Returns:
        epsilon; infinity where none can be certified.

    Raises:
        InputError: If the sampling is shuffled, or delta or images is out of range.
    """
    if images < 1:
        raise InputError(f"max_images_per_person must be at least 1, not {images}.")
    of_one_image = epsilon(mechanism, delta).epsilon  # refuses what has no epsilon
    if images == 1 or of_one_image in (0.0, math.inf) and (mechanism.num_steps == 0 or mechanism.noise_multiplier == 0):
        return of_one_image
    of_person = epsilon_pld(mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps, delta, images).epsilon
    return math.inf if of_person is None else of_person
