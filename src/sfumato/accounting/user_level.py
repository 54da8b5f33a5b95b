"""Epsilon for a person with several images."""

from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism, first_release_mu
from sfumato.accounting.pld import Tight, epsilon_pld

# Mixtures of more Gaussians take memory without bound.
MOST_IMAGES = 10_000


def epsilon_person(mechanism: Mechanism, delta: float) -> Tight:
    """Upper bound on epsilon when all of one person's images contribute zero instead.

    Each of k images is Poisson sampled by itself, so that what a step holds of the person is
    Binomial(k, q) clipped gradients, the worst case parallel ones: a mixture of Gaussians, composed
    under PLD. Where that is not to be had, as above 10,000 images, it is bounded by its largest
    member alone: N(i, sigma^2) for i <= k is N(k, sigma^2) scaled down, with noise added. That is
    far above. A first release of all examples moves by k sensitivities.

    Args:
        mechanism: Poisson-sampled, with steps and noise; its k = images_per_unit is at most N.
        delta: In (0, 1).

    Returns:
        epsilon, and where it is the far larger bound the reason.
    """
    images, num_steps, sigma = mechanism.images_per_unit, mechanism.num_steps, mechanism.noise_multiplier
    without_sampling = epsilon_gaussian(mechanism.gaussian_mu, delta)
    if num_steps == 0:
        return Tight(without_sampling)
    if images > MOST_IMAGES or without_sampling == 0:
        return Tight(without_sampling, "" if without_sampling == 0 else f"{images} images of one person are too many.")
    first_mu = images * first_release_mu(mechanism.first_release_noise)
    of_person = epsilon_pld(mechanism.sampling_prob, sigma, num_steps, delta, images, first_mu)
    if of_person.epsilon is None:
        return Tight(without_sampling, of_person.reason)
    return Tight(min(of_person.epsilon, without_sampling))
