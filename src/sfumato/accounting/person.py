"""Epsilon for a person with several images."""

import math
import warnings

from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.pld import grid_interval
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
    q, sigma = mechanism.sampling_prob, mechanism.noise_multiplier
    if sigma == 0:
        return math.inf
    interval, reason = grid_interval(min(1.0, max_images * q), sigma / max_images, mechanism.num_steps)
    if reason:
        return math.inf
    from dp_accounting.pld import privacy_loss_distribution

    images = range(max_images + 1)
    probabilities = [math.comb(max_images, count) * q**count * (1 - q) ** (max_images - count) for count in images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma, list(map(float, images)), probabilities, value_discretization_interval=interval
        )
        return float(one_step.self_compose(mechanism.num_steps).get_epsilon_for_delta(delta))
