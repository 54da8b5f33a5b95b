"""A classifier that is solved for, not stepped: private least squares on features (Vu and Slavkovic 2009; Mehta et al.
2023, "Differentially Private Image Classification from Features").
"""

import math
from collections.abc import Mapping

import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.examples import Examples
from sfumato.errors import InputError
from sfumato.randomness import Stream
from sfumato.training import moments
from sfumato.training.noise import add_noise
from sfumato.training.step import Randomness, Statistics

SHARE_OF_PRODUCTS = 0.8
"""Of the squared sensitivity; the rest is that of second moments (docs/defaults.md has the evidence)."""
RIDGE = 0.3
"""In units of the largest eigenvalue that noise alone gives second moments."""
LEAST_RIDGE = 0.3
"""In units of N / D, the largest that the mean eigenvalue can be; for runs with little noise."""
MOST_FEATURES = 8192
"""Second moments of more take gigabytes, and minutes to solve."""


class LeastSquaresStep:
    """One update that solves for the classifier: a `Step` whose release is the weights themselves.

    With S the second moments of the examples' features, P their products with labels e_c - 1/C, and noise of standard
    deviation sigma on every entry of (a S, b P), one image of which moves them by at most 1 (`moments.sensitivity`),

    .. math::

        W = (S_+ + \\lambda I)^{-1} P.

    Guarantee: ``collect`` adds what nobody may see, ``release`` adds noise once, before anything else is done with it;
    all that follows (symmetry, S_+ without negative eigenvalues, the ridge lambda) is post-processing. It is the
    Gaussian mechanism of ``mechanism``, which has one step and q = 1: one image's contribution replaced by zero.

    Args:
        mechanism: The public numbers.
        shape: Of one example: (D,).
        names: Of the classifier's weight (C, D) and its bias (C,), which stays 0; None without one.
        num_classes: C.
        device: Where sums are made and solved.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        shape: tuple[int, ...],
        names: tuple[str, str | None],
        num_classes: int,
        device: torch.device,
    ) -> None:
        (self.num_features,) = shape
        refuse_many_features(self.num_features)
        self.mechanism, self.names, self.num_classes, self.device = mechanism, names, num_classes, device
        self.of_moments = math.sqrt(1 - SHARE_OF_PRODUCTS)
        self.of_products = math.sqrt(SHARE_OF_PRODUCTS) / moments.label_length(num_classes)
        self.sensitivity = moments.sensitivity(self.of_moments, self.of_products, num_classes)
        self.noise_stddev = mechanism.noise_multiplier * self.sensitivity

    def collect(
        self,
        examples: Examples,
        parameters: Mapping[str, torch.Tensor],
        randomness: Randomness,
        *,
        with_norms: bool = False,
    ) -> tuple[dict[str, torch.Tensor], Statistics]:
        """a S as a vector and b P, in float64; there are no gradients to tell anything of."""
        drawn = torch.from_numpy(randomness.indices)
        bits = moments.fraction_bits(self.mechanism.num_examples)
        second, by_class = moments.summed(examples, drawn, self.num_classes, bits, self.device)
        products = by_class - by_class.mean(1, keepdim=True)
        sums = {"moments": self.of_moments * moments.as_vector(second), "products": self.of_products * products}
        return sums, Statistics(math.nan, math.nan, math.nan, math.nan)

    def release(self, sums: dict[str, torch.Tensor], noise: Stream) -> dict[str, torch.Tensor]:
        """The classifier's weights, solved for by noisy sums alone."""
        noisy = add_noise(sums, self.noise_stddev, noise) if self.noise_stddev > 0 else sums
        second = moments.as_matrix(noisy["moments"].double() / self.of_moments, self.num_features)
        products = noisy["products"].double() / self.of_products
        weight, bias = self.names
        solved = solve(second, products, self.mechanism.num_examples, self.noise_stddev / self.of_moments)
        out = {weight: solved.T.float().contiguous()}
        return out if bias is None else {**out, bias: torch.zeros(self.num_classes, device=self.device)}


def solve(second: torch.Tensor, products: torch.Tensor, num_examples: int, noise_stddev: float) -> torch.Tensor:
    """(S_+ + lambda I)^-1 P: (D, C).

    Args:
        second: S with noise, (D, D), symmetric.
        products: P with noise, (D, C).
        num_examples: N.
        noise_stddev: Of the noise on S's diagonal; above it the variance is half as large.
    """
    values, vectors = torch.linalg.eigh(second)
    ridge = RIDGE * noise_edge(len(second), noise_stddev) + LEAST_RIDGE * num_examples / len(second)
    return vectors @ ((vectors.T @ products) / (values.clamp(min=0) + ridge)[:, None])


def noise_edge(num_features: int, noise_stddev: float) -> float:
    """The largest eigenvalue that noise alone gives second moments, about: the semicircle's radius."""
    return noise_stddev * math.sqrt(2 * num_features)


def refuse_many_features(num_features: int) -> None:
    """Raises InputError if second moments would not fit."""
    if num_features > MOST_FEATURES:
        raise InputError(
            f"this network gives {num_features} features, and second moments are computed of at most {MOST_FEATURES}. "
            'Set model.classifier = "sgd".'
        )
