"""The public numbers of one private training run."""

import dataclasses
import math
import operator
from typing import Literal

from sfumato.errors import InputError, is_from_elsewhere

Sampling = Literal["poisson", "shuffled"]
Accountant = Literal["pld", "rdp"]

# Below, one step may spend half a million, and the numerics of it take memory without bound;
# infinity is above that.
LEAST_NOISE = 1e-3
_LARGEST = 10**40


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What a run composes, as public numbers: updates of the subsampled Gaussian mechanism, and before them,
    if there is one, a Gaussian release of all examples at once.

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
        first_release_noise: sigma_0, the noise of a release of all examples (q = 1) beside the
            updates, such as that of second moments: standard deviation / sensitivity. None: there
            is no such release. k of them with one noise are one with sigma_0 / sqrt(k).

    Raises:
        InputError: If a number is out of range.
    """

    num_examples: int
    batch_size: int
    noise_multiplier: float
    num_steps: int
    sampling: Sampling = "poisson"
    images_per_unit: int = 1
    first_release_noise: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "num_steps", "images_per_unit"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.num_examples < 1:
            raise InputError(f"num_examples must be at least 1, not {self.num_examples}: there is nothing to train on.")
        if not 1 <= self.batch_size <= self.num_examples:
            raise InputError(
                f"batch_size must lie between 1 and num_examples = {self.num_examples}, not "
                f"{self.batch_size}: it is the expected number of images drawn at each step. "
                "Choose a smaller batch."
            )
        if not (_is_finite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise InputError(
                f"noise_multiplier must be finite and at least 0, not {_shown(self.noise_multiplier)}. "
                "Choose a positive one, or give a target_epsilon."
            )
        if self.num_steps < 0:
            raise InputError(f"num_steps must be at least 0, not {self.num_steps}.")
        if not isinstance(self.sampling, str) or self.sampling not in ("poisson", "shuffled"):
            raise InputError(f'sampling must be "poisson" or "shuffled", not "{self.sampling}".')
        if self.images_per_unit < 1:
            raise InputError(f"a person has at least 1 image, not {self.images_per_unit}.")
        first = self.first_release_noise
        if first is not None and not (_is_finite(first) and first > 0):
            raise InputError(
                f"first_release_noise must be finite and above 0, not {_shown(first)}. Leave it out where "
                "there is no such release."
            )

    @property
    def sampling_prob(self) -> float:
        """q = batch_size / num_examples, the probability that a step includes a given example."""
        return self.batch_size / self.num_examples

    @property
    def releases_nothing(self) -> bool:
        """Whether nothing of any example is released."""
        return self.num_steps == 0 and self.first_release_noise is None

    @property
    def has_noise(self) -> bool:
        """Whether each release has so much noise that a finite epsilon is stated."""
        noises = [self.noise_multiplier] if self.num_steps else []
        noises += [] if self.first_release_noise is None else [self.first_release_noise]
        return all(noise >= LEAST_NOISE for noise in noises)

    @property
    def gaussian_mu(self) -> float:
        """Sensitivity / noise of all releases without sampling, as one Gaussian's, for one unit; with noise only."""
        of_steps = math.sqrt(self.num_steps) / self.noise_multiplier if self.num_steps else 0.0
        return self.images_per_unit * math.hypot(of_steps, first_release_mu(self.first_release_noise))

    def replace(self, **changes) -> "Mechanism":
        """The same mechanism with some numbers changed."""
        return dataclasses.replace(self, **changes)


def _whole(name: str, value: object) -> int:
    """As Python has it, whatever library it comes from: a NumPy number overflows at 2^63."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
        if found is not None and abs(found) < _LARGEST:
            return found
    except (TypeError, RuntimeError) as error:  # a tensor without numbers
        if is_from_elsewhere(error):
            raise
    raise InputError(f"{name} must be a whole number, not {_shown(value)}.")


def _shown(value: object) -> str:
    return "one of so many digits" if isinstance(value, int) and abs(value) >= _LARGEST else str(value)[:40]


def first_release_mu(first_release_noise: float | None) -> float:
    """1 / sigma_0, for one image; 0 without such a release."""
    return 0.0 if first_release_noise is None else 1 / first_release_noise


def _is_finite(number: object) -> bool:
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if is_from_elsewhere(error):
            raise
        return False
