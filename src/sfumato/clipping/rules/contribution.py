"""What one meeting adds to the per-example gradients of one weight."""

import dataclasses
from typing import Protocol

import torch

from sfumato.clipping.norms import at_least_float32, row_norms


class Contribution(Protocol):
    """Per-example gradients g_1, ..., g_m of a weight, written out or not."""

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(m,) the squares of the L2 norms, and bounds on their rounding errors."""
        ...

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """The sum of coefficient_i times g_i over those that count (None: all do), shaped like the weight."""
        ...

    def rows_of(self, examples: torch.Tensor) -> torch.Tensor:
        """(n, *shape of the weight) the gradients of some examples, written out."""
        ...


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over the fan-in of each output channel's gradient, all (m, channels).

    Attributes:
        squares: Of its squares.
        plain: Of its values.
        along: Of its products with that channel's direction.
        errors: Bounds on the rounding errors of `squares` and of `along`; None for gradients that were written out.
    """

    squares: torch.Tensor
    plain: torch.Tensor
    along: torch.Tensor
    errors: tuple[torch.Tensor, torch.Tensor] | None = None


class ChannelContribution(Contribution, Protocol):
    """A contribution that can say what weight standardisation needs to know."""

    def moments(self, directions: torch.Tensor, weight: torch.Tensor) -> Moments:
        """Moments of each output channel; directions are (channels, fan-in), `weight` is the value of the weight."""
        ...


class Rows:
    """Per-example gradients written out: (m, *shape of the weight), float32 at least.

    Args:
        blocks: Some examples after others, each block in memory of its own.
    """

    def __init__(self, *blocks: torch.Tensor) -> None:
        self.blocks = [at_least_float32(block) for block in blocks]

    @property
    def rows(self) -> torch.Tensor:
        """All of them; a copy where there are several blocks."""
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        squares = torch.cat([row_norms(block.reshape(len(block), -1)) for block in self.blocks]).square()
        return squares, torch.zeros_like(squares)

    def moments(self, directions: torch.Tensor, weight: torch.Tensor) -> Moments:
        basis = torch.stack([torch.ones_like(directions), directions], dim=1).to(self.blocks[0].dtype)  # (channels, 2, fan-in)
        moments = []
        for block in self.blocks:
            rows = block.flatten(2)  # (n, channels, fan-in)
            plain_and_along = torch.bmm(basis, rows.permute(1, 2, 0)).permute(1, 2, 0)  # this way round twice as fast on a CPU
            moments.append(torch.cat([torch.linalg.vector_norm(rows, dim=2).square()[None], plain_and_along]))
        return Moments(*torch.cat(moments, 1))

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        total, first = None, 0
        for block in self.blocks:
            own = slice(first, first + len(block))
            rows = block.reshape(len(block), -1)
            if counts is not None:  # a coefficient of zero does not silence it: 0 * NaN is NaN
                rows = torch.where(counts[own, None], rows, 0.0)
            weights = coefficients[own].to(rows.dtype)
            total = weights @ rows if total is None else total.addmv_(rows.T, weights)
            first = own.stop
        assert total is not None
        return total.view(self.blocks[0].shape[1:])

    def rows_of(self, examples: torch.Tensor) -> torch.Tensor:
        return self.rows[examples]
