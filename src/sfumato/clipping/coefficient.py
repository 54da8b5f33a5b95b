"""What clipping is: each example's gradient times s min(1, C / its norm) (De et al. 2022, Eq. 3)."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Clip:
    """What a gradient of each norm is multiplied by: s min(1, C / norm). Two that are equal are the
    same function.
    """

    clipping_norm: float
    rescale: bool

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        scale = (
            torch.clamp(1 / norms, max=1 / self.clipping_norm)
            if self.rescale
            else torch.clamp(self.clipping_norm / norms, max=1.0)
        )
        # Below, float32 has few digits left and would round up: such a gradient is left out.
        return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
