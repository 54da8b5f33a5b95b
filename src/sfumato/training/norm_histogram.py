"""How long the gradients of one update were before clipping (Sander et al. 2022, Figure 7). Not
private.
"""

import torch

from sfumato.json_record import finite
from sfumato.run_folder.record import NormHistogram

# Edges are public and fixed, so that they say nothing of the images: ten to a decade, from C / 10^4
# to 10^4 C.
_PER_DECADE, _DECADES = 10, 4


def norm_histogram(
    norms: torch.Tensor,
    losses: torch.Tensor,
    clipping_norm: float,
    grad_sum: dict[str, torch.Tensor],
    noise_stddev: float,
) -> NormHistogram:
    """What one update's gradients amount to.

    Args:
        norms: (b,), of the examples that have a gradient, before clipping.
        losses: (b,), of the same.
        clipping_norm: C.
        grad_sum: The sum of the clipped gradients, without noise.
        noise_stddev: Of each coordinate of the noise, in the units of ``grad_sum``.
    """
    is_finite = torch.isfinite(norms) & torch.isfinite(losses)
    relative = norms[is_finite].double() / clipping_norm
    edges = [10.0 ** (number / _PER_DECADE) for number in range(-_DECADES * _PER_DECADE, _DECADES * _PER_DECADE + 1)]
    counts = torch.bincount(
        torch.bucketize(relative, torch.tensor(edges, dtype=torch.float64)), minlength=len(edges) + 1
    )
    signal = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(value.double()) for value in grad_sum.values()])
    )
    noise = noise_stddev * sum(value.numel() for value in grad_sum.values()) ** 0.5
    return NormHistogram(
        edges=edges,
        counts=counts.tolist(),
        not_finite=int((~is_finite).sum()),
        median=finite(float(relative.quantile(0.5))) if len(relative) else None,
        signal_to_noise=finite(float(signal) / noise) if noise else None,
    )
