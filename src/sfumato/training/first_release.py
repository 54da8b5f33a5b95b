"""What is released of all examples before update 1: the mean of features.

The sum is exact. Features are rounded towards zero to multiples of 2^-b, with b so that sums of N of them are whole
numbers of 2^-2b below 2^53, which float64 holds: no order of adding, no machine and no other image changes what an
image adds.
"""

import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.examples import Examples
from sfumato.randomness import Stream
from sfumato.training.noise import add_noise

LENGTH = 1.0
"""The most that a vector of features may be long; `model.features = "centred"` makes all as long."""
SENSITIVITY = LENGTH * (1 + 1e-9)
"""How far one image moves the sum of features at most; more than scaling by constants rounds a sum of 4 million."""
ROWS = 4096
"""Images that are added at once."""
_DIGITS = 53


class MeanFeatures:
    """The mean of features, for `sfumato.models.layers.CentredLinear`.

    Guarantee: the Gaussian mechanism with q = 1 and noise multiplier ``mechanism.first_release_noise``, one image's
    contribution replaced by zero. ``collect`` adds what nobody may see, ``release`` adds noise once, before anything
    else is done with it; what follows is post-processing.

    Args:
        mechanism: The public numbers; without first_release_noise nothing is added (ordinary training).
        device: Where sums are made.
    """

    def __init__(self, mechanism: Mechanism, device: torch.device) -> None:
        self.num_examples, self.device = mechanism.num_examples, device
        self.noise_stddev = (mechanism.first_release_noise or 0.0) * SENSITIVITY

    def collect(self, examples: Examples) -> dict[str, torch.Tensor]:
        """The sum of features (D,), in float64; nobody may see it."""
        bits = fraction_bits(self.num_examples)
        total = torch.zeros(examples.shape, dtype=torch.float64, device=self.device)
        for part in examples.readable.nonzero()[:, 0].split(ROWS):
            total += bounded(examples.batch(part, self.device), bits).sum(0)
        return {"features": total}

    def release(self, sums: dict[str, torch.Tensor], noise: Stream) -> torch.Tensor:
        """The sum with noise over N: (D,), float32."""
        noisy = add_noise(sums, self.noise_stddev, noise) if self.noise_stddev > 0 else sums
        return (noisy["features"].double() / self.num_examples).float()


def fraction_bits(num_examples: int) -> int:
    """b, for sums of so many images.

    Example:
        >>> fraction_bits(50_000)
        18
    """
    return (_DIGITS - num_examples.bit_length()) // 2


def bounded(features: torch.Tensor, bits: int) -> torch.Tensor:
    """Features as they are added: shortened to `LENGTH` where they are longer, rounded towards zero to multiples of
    2^-bits; zeros where one is not finite.

    Guarantee: each row's squares add up to at most 1, exactly.

    Args:
        features: (m, D).

    Returns:
        (m, D), torch.float64.
    """
    values = features.double()
    largest = values.abs().amax(1, keepdim=True).clamp(min=LENGTH)  # or squares might overflow
    lengths = torch.linalg.vector_norm(values / largest, dim=1, keepdim=True) * largest
    quotient = values / lengths.clamp(min=LENGTH)
    rounded = torch.trunc(quotient * 2.0**bits) * 2.0**-bits
    is_bounded = rounded.square().sum(1, keepdim=True) <= LENGTH  # exact sums; NaN, to which infinity came, is not
    return torch.where(is_bounded, rounded, 0.0)
