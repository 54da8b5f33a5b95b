"""What is released of all examples before update 1: second moments of features, or their mean.

Guarantee of both: the Gaussian mechanism with q = 1 and noise multiplier ``mechanism.first_release_noise``, one image's
contribution replaced by zero. ``collect`` adds what nobody may see, ``release`` adds noise once, before anything else
is done with it; what follows is post-processing.
"""

from typing import Protocol

import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.examples import Examples
from sfumato.randomness import Stream
from sfumato.training import moments
from sfumato.training.least_squares import LEAST_RIDGE, noise_edge, refuse_many_features
from sfumato.training.noise import add_noise

RIDGE = 1.0
"""In units of the largest eigenvalue that noise alone gives second moments (docs/defaults.md has the evidence)."""


class FirstRelease(Protocol):
    """See the module.

    Attributes:
        what: Is released, in words.
    """

    what: str

    def collect(self, examples: Examples) -> dict[str, torch.Tensor]: ...

    def release(self, sums: dict[str, torch.Tensor], noise: Stream) -> torch.Tensor: ...


class MeanFeatures:
    """The mean of features, for `sfumato.nn.CentredLinear`.

    Args:
        mechanism: The public numbers; without first_release_noise nothing is added (ordinary training).
        device: Where sums are made.
    """

    what = "the mean of features"

    def __init__(self, mechanism: Mechanism, device: torch.device) -> None:
        self.num_examples, self.device = mechanism.num_examples, device
        self.sensitivity = moments.sensitivity(0.0, 1.0, 0)
        self.noise_stddev = (mechanism.first_release_noise or 0.0) * self.sensitivity

    def collect(self, examples: Examples) -> dict[str, torch.Tensor]:
        """The sum of features (D,), in float64; nobody may see it."""
        bits = moments.fraction_bits(self.num_examples)
        total = torch.zeros(examples.shape, dtype=torch.float64, device=self.device)
        for part in examples.readable.nonzero()[:, 0].split(moments.ROWS):
            total += moments.bounded(examples.batch(part, self.device), bits).sum(0)
        return {"features": total}

    def release(self, sums: dict[str, torch.Tensor], noise: Stream) -> torch.Tensor:
        """The sum with noise over N: (D,), float32."""
        noisy = add_noise(sums, self.noise_stddev, noise) if self.noise_stddev > 0 else sums
        return (noisy["features"].double() / self.num_examples).float()


class SecondMoments:
    """DP-FC: second moments straighten the gradients of all updates (Mehta et al. 2023, "Differentially Private Image
    Classification from Features"), after their own noise.

    Args:
        mechanism: The public numbers; without first_release_noise nothing is added (ordinary training).
        shape: Of one example: (D,).
        device: Where sums are made.
    """

    what = "second moments"

    def __init__(self, mechanism: Mechanism, shape: tuple[int, ...], device: torch.device) -> None:
        (self.num_features,) = shape
        refuse_many_features(self.num_features)
        self.num_examples, self.device = mechanism.num_examples, device
        self.sensitivity = moments.sensitivity(1.0, 0.0, 0)
        self.noise_stddev = (mechanism.first_release_noise or 0.0) * self.sensitivity

    def collect(self, examples: Examples) -> dict[str, torch.Tensor]:
        """The second moments S as a vector, in float64; nobody may see it."""
        bits = moments.fraction_bits(self.num_examples)
        second, _ = moments.summed(examples, torch.arange(len(examples)), None, bits, self.device)
        return {"moments": moments.as_vector(second)}

    def release(self, sums: dict[str, torch.Tensor], noise: Stream) -> torch.Tensor:
        """lambda (S_+ + lambda I)^-1, of S with noise: (D, D), float32. Its eigenvalues lie in (0, 1], so that no
        gradient becomes longer.
        """
        noisy = add_noise(sums, self.noise_stddev, noise) if self.noise_stddev > 0 else sums
        values, vectors = torch.linalg.eigh(moments.as_matrix(noisy["moments"].double(), self.num_features))
        ridge = RIDGE * noise_edge(self.num_features, self.noise_stddev)
        ridge += LEAST_RIDGE * self.num_examples / self.num_features
        return ((vectors * (ridge / (values.clamp(min=0) + ridge))) @ vectors.T).float()
