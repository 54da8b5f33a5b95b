"""Epsilon of several runs on the same images, however they differ in batch, noise and number of updates."""

import functools
import math
from collections import Counter
from collections.abc import Iterable

from sfumato.accounting.accountants import Spent, epsilon
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Accountant, Mechanism, first_release_mu
from sfumato.accounting.pld import epsilon_pld_together
from sfumato.accounting.rdp import Part, epsilon_rdp_together
from sfumato.accounting.user_level import MOST_IMAGES


def epsilon_together(mechanisms: Iterable[Mechanism], delta: float, accountant: Accountant = "pld") -> Spent:
    """What somebody learns who sees all releases of all these runs.

    Mechanisms that are alike are one with all their updates, computed as `epsilon` does. Of unlike ones the losses of
    all updates add up (PLD, on one grid), or the divergences at each order (RDP). Releases of all examples without
    sampling are one Gaussian.

    Guarantee: as of `epsilon`, for one unit's contribution to all runs replaced by zero, in whatever order and however
    interleaved they are made.

    Args:
        mechanisms: On the same examples, each drawn by itself from the others ("poisson").
        delta: In (0, 1), of all together.
        accountant: As in `epsilon`.

    Returns:
        As `epsilon`. Infinity where one has no noise.

    Raises:
        ValueError: If they have not the same number of examples and of images of a unit.
        InputError: As `epsilon`.

    Example:
        >>> large = Mechanism(50_000, 4096, noise_multiplier=3.0, num_steps=1000)
        >>> small = Mechanism(50_000, 256, noise_multiplier=1.0, num_steps=1000)
        >>> round(epsilon(large, 1e-5).epsilon, 2), round(epsilon_together([large, small], 1e-5).epsilon, 2)
        (3.89, 4.01)
    """
    releasing = [mechanism for mechanism in mechanisms if not mechanism.releases_nothing]
    if not releasing:
        return Spent(0.0, 0.0, 0.0 if accountant == "pld" else None, accountant)
    like = releasing[0]
    for mechanism in releasing:
        epsilon(mechanism.replace(num_steps=0, first_release_noise=None), delta, accountant)  # refuses what has none
        if (mechanism.num_examples, mechanism.images_per_unit) != (like.num_examples, like.images_per_unit):
            raise ValueError("the mechanisms are not of the same examples")
    steps: Counter[tuple[int, float]] = Counter()
    for mechanism in releasing:
        if mechanism.num_steps:
            steps[mechanism.batch_size, mechanism.noise_multiplier] += mechanism.num_steps
    first_mu = math.hypot(*(first_release_mu(mechanism.first_release_noise) for mechanism in releasing))
    if len(steps) <= 1 or not all(mechanism.has_noise for mechanism in releasing):
        batch_size, noise = min(steps, key=lambda kind: kind[1], default=(1, 0.0))  # that of next to no noise, if any
        total = sum(steps.values())
        one = like.replace(batch_size=batch_size, noise_multiplier=noise, num_steps=total)
        return epsilon(one.replace(first_release_noise=1 / first_mu if first_mu else None), delta, accountant)
    parts = tuple(
        (batch_size / like.num_examples, noise, num_steps) for (batch_size, noise), num_steps in sorted(steps.items())
    )
    images = min(like.images_per_unit, like.num_examples)
    return _of_unlike(parts, delta, accountant, images, images * first_mu)


@functools.lru_cache(maxsize=256)
def _of_unlike(parts: tuple[Part, ...], delta: float, accountant: Accountant, images: int, first_mu: float) -> Spent:
    """Of at least two kinds of steps, with noise; ``first_mu`` is of one unit."""
    if images > 1:  # of which there is no RDP
        without_sampling = epsilon_gaussian(
            math.hypot(first_mu, *(images * math.sqrt(num_steps) / noise for _, noise, num_steps in parts)), delta
        )
        by_pld = epsilon_pld_together(parts, delta, images, first_mu) if images <= MOST_IMAGES else None
        tight = None if by_pld is None else by_pld.epsilon
        if tight is None:
            note = "epsilon is that of all images of a person in every batch, far above."
            return Spent(without_sampling, None, without_sampling, "pld", note)
        best = min(tight, without_sampling)
        return Spent(best, None, best, "pld")
    by_rdp = epsilon_rdp_together(parts, delta, first_mu)
    if accountant == "rdp":
        return Spent(by_rdp, by_rdp, None, "rdp")
    found = epsilon_pld_together(parts, delta, 1, first_mu)
    if found.epsilon is not None and found.epsilon <= by_rdp:
        return Spent(found.epsilon, by_rdp, found.epsilon, "pld")
    return Spent(by_rdp, by_rdp, None, "rdp", f"epsilon is RDP's: {found.reason or 'PLD is not below it here.'}")
