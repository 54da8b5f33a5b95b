"""The public numbers of one private training run."""

import dataclasses
import math
import numbers
from typing import Literal

from sfumato.errors import InputError

Sampling = Literal["poisson", "shuffled"]
Part = tuple[float, float, int]
"""Steps of one kind: q, sigma and T."""
Accountant = Literal["pld", "rdp"]

# Below, one step may spend half a million, and the numerics of it take memory without bound;
# infinity is above that.
LEAST_NOISE = 1e-3
LARGEST = 10**15
"""Of every whole number."""


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What a run composes, as public numbers: updates of the subsampled Gaussian mechanism.

    The sampler, the noise, the divisor, the ledger and the accountant are all built
    from one such object, so they cannot disagree (De et al. 2022, Eq. 3).

    Attributes:
        num_examples: N, the number of training examples; public and fixed.
        batch_size: The *expected* batch qN, and the constant divisor of the sum.
        noise_multiplier: sigma, the noise's standard deviation / sensitivity; 0 adds none.
        num_steps: T, the number of updates.
        sampling: "poisson", each example alone with probability q at each step; or
            "shuffled", fixed-size batches, for which no epsilon below is a guarantee.
        images_per_unit: How many examples, at most, belong to one unit of privacy: 1, or those of a
            person. Epsilon is for all of them together.

    Raises:
        InputError: If a number is out of range.
    """

    num_examples: int
    batch_size: int
    noise_multiplier: float
    num_steps: int
    sampling: Sampling = "poisson"
    images_per_unit: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_examples", 1), ("batch_size", 1), ("num_steps", 0), ("images_per_unit", 1)):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Integral) and least <= int(value) <= LARGEST):
                raise InputError(f"{name} must be a whole number of at least {least}, at most 1e15, not {value!s:.40}.")
            object.__setattr__(self, name, int(value))  # a NumPy number overflows at 2^63
        if self.batch_size > self.num_examples:
            raise InputError(
                f"batch_size must be at most num_examples = {self.num_examples}, not {self.batch_size}: it is the "
                "expected number of images drawn at each step. Choose a smaller batch."
            )
        noise: object = self.noise_multiplier
        if not (isinstance(noise, numbers.Real) and 0 <= float(noise) < math.inf):
            raise InputError(
                f"noise_multiplier must be finite and at least 0, not {noise!s:.40}. "
                "Choose a positive one, or give a target_epsilon."
            )
        if self.sampling not in ("poisson", "shuffled"):
            raise InputError(f'sampling must be "poisson" or "shuffled", not "{self.sampling}".')

    @property
    def sampling_prob(self) -> float:
        """q = batch_size / num_examples, the probability that a step includes a given example."""
        return self.batch_size / self.num_examples

    @property
    def has_noise(self) -> bool:
        """Whether each release has so much noise that a finite epsilon is stated."""
        return all(sigma >= LEAST_NOISE for _, sigma, _ in self.parts)

    @property
    def most_images(self) -> int:
        """k, how many images a unit has at most: nobody has more than there are."""
        return min(self.images_per_unit, self.num_examples)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that is released."""
        return ((self.sampling_prob, self.noise_multiplier, self.num_steps),) if self.num_steps else ()

    def replace(self, **changes) -> "Mechanism":
        """The same mechanism with some numbers changed."""
        return dataclasses.replace(self, **changes)
