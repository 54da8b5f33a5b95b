"""Epsilon for a person with several images."""

import math

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import LEAST_NOISE, Mechanism
from sfumato.accounting.pld import epsilon_pld
from sfumato.errors import InputError

# Mixtures of more Gaussians take memory without bound.
MOST_IMAGES = 10_000


def epsilon_person(mechanism: Mechanism, delta: float, images: int) -> float:
    """Upper bound on epsilon when all of one person's images contribute zero instead.

    Each of k images is Poisson sampled by itself, so that what a step holds of the person is
    Binomial(k, q) clipped gradients, the worst case parallel ones: a mixture of Gaussians, composed
    under PLD. Where that is not to be had, as above 10,000 images, it is bounded by its largest
    member alone: N(i, sigma^2) for i <= k is N(k, sigma^2) scaled down, with noise added. That is
    far above.

    Args:
        mechanism: Its sampling must be "poisson".
        delta: In (0, 1).
        images: k >= 1, the most images that one person has; nobody has more than there are.

    Returns:
        epsilon; infinity without noise, or with next to none.

    Raises:
        InputError: If the sampling is shuffled, or delta or images is out of range.
    """
    if images < 1:
        raise InputError(f"max_images_per_person must be at least 1, not {images}.")
    of_one_image = epsilon(mechanism, delta).epsilon  # refuses what has no epsilon
    if images == 1 or mechanism.num_steps == 0 or mechanism.noise_multiplier < LEAST_NOISE:
        return of_one_image
    images = min(images, mechanism.num_examples)
    without_sampling = epsilon_gaussian(images * math.sqrt(mechanism.num_steps) / mechanism.noise_multiplier, delta)
    if images > MOST_IMAGES or without_sampling == 0:
        return without_sampling
    of_person = epsilon_pld(
        mechanism.sampling_prob, mechanism.noise_multiplier, mechanism.num_steps, delta, images
    ).epsilon
    return without_sampling if of_person is None else min(of_person, without_sampling)
