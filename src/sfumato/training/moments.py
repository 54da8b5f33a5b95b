"""Second moments of features and their products with labels: sums in which one image's part has a known length.

For an image with features x, at most `LENGTH` = 1 long, and class c of C, the products are x (e_c - 1/C)'. The second
moments x x' are symmetric. Kept as the diagonal and sqrt(2) times what lies above it, they are a vector whose length is
that of the matrix, ||x||^2, in whatever direction x points. So the noise on a pair of features has half the variance of
the noise on a square (as in the Gaussian orthogonal ensemble), for the same sensitivity.

The sums are exact. Features are rounded towards zero to multiples of 2^-b, with b so that all sums of N products are
whole numbers of 2^-2b below 2^53, which float64 holds: no order of adding, no machine and no other image changes what
an image adds.
"""

import math

import torch

from sfumato.data.examples import Examples

LENGTH = 1.0
"""The most that a vector of features may be long; `model.features = "unit"` makes all as long."""
ROUNDING = 1e-9
"""Relative, of a sensitivity: more than scaling by constants rounds a sum of 4 million images."""
ENGINE = "moments"
"""How a run's environment names the way in which they are computed."""
ROWS = 4096
"""Images that are added at once."""
_DIGITS = 53


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
    quotient = values / lengths.clamp(min=LENGTH) * (1 - 2.0**-40)
    rounded = torch.trunc(quotient * 2.0**bits) * 2.0**-bits
    is_bounded = rounded.square().sum(1, keepdim=True) <= LENGTH  # exact sums; NaN, to which infinity came, is not
    return torch.where(is_bounded, rounded, 0.0)


def summed(
    examples: Examples, indices: torch.Tensor, num_classes: int | None, bits: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second moments (D, D) and the sums of features by class (D, C) of the readable examples at these indices,
    torch.float64, exact for up to the number of examples that ``bits`` was made for. Without a number of classes no
    label is looked at, and C = 0.
    """
    (num_features,) = examples.shape
    moments = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
    by_class = torch.zeros(num_features, num_classes or 0, dtype=torch.float64, device=device)
    for part in indices[examples.readable[indices]].split(ROWS):
        features = bounded(examples.batch(part, device), bits)
        moments += features.T @ features
        if num_classes:
            labels = torch.nn.functional.one_hot(examples.labels[part], num_classes).to(features)
            by_class += features.T @ labels
    return moments, by_class


def as_vector(moments: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix (D, D) as a vector (D (D + 1) / 2,) of the same length: its diagonal, then sqrt(2) times what
    lies above it.
    """
    above = torch.triu_indices(len(moments), len(moments), offset=1, device=moments.device)
    return torch.cat([moments.diagonal(), math.sqrt(2) * moments[above[0], above[1]]])


def as_matrix(vector: torch.Tensor, num_features: int) -> torch.Tensor:
    """The symmetric matrix that `as_vector` made a vector of."""
    above = torch.triu_indices(num_features, num_features, offset=1, device=vector.device)
    half = vector.new_zeros(num_features, num_features)
    half[above[0], above[1]] = vector[num_features:] / math.sqrt(2)
    return half + half.T + torch.diag(vector[:num_features])


def label_length(num_classes: int) -> float:
    """||e_c - 1/C||, for every class c."""
    return math.sqrt(1 - 1 / num_classes)


def sensitivity(of_moments: float, of_products: float, num_classes: int) -> float:
    """How far one image moves (a x moments, b x products) at most: sqrt(a^2 L^4 + b^2 L^2 (1 - 1/C)) with L = `LENGTH`,
    which every image with features of that length does.

    Args:
        of_moments: a.
        of_products: b.
        num_classes: C; 0: the products are with 1.
    """
    label = label_length(num_classes) if num_classes else 1.0
    return math.hypot(of_moments * LENGTH**2, of_products * LENGTH * label) * (1 + ROUNDING)
