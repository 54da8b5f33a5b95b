"""What one site adds to the per-example gradients of one weight."""

import dataclasses
from typing import Protocol

import torch

from sfumato.clipping.clip import at_least_float32, roundings, row_norms, unit


class PerExampleGrads(Protocol):
    """Per-example gradients g_1, ..., g_m of a weight, written out or not."""

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(m,) the squares of the L2 norms, and bounds on their rounding errors."""
        ...

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """The sum of coefficient_i times g_i over those that count (None: all do), shaped like the
        weight.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over the fan-in of each output channel's gradient, all (m, channels).

    Attributes:
        squares: Of its squares.
        plain: Of its values.
        along: Of its products with that channel's direction.
        errors: Bounds on the rounding errors of each of these.
    """

    squares: torch.Tensor
    plain: torch.Tensor
    along: torch.Tensor
    errors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ChannelGrads(PerExampleGrads, Protocol):
    """Per-example gradients that can say what weight standardisation needs to know."""

    def moments(self, directions: torch.Tensor, weight: torch.Tensor) -> Moments:
        """Moments of each output channel; directions are (channels, fan-in), `weight` is the value
        of the weight.
        """
        ...

    def written_out(self) -> torch.Tensor:
        """(m, *shape of the weight)."""
        ...


class MaterializedGrads:
    """Per-example gradients written out: (m, *shape of the weight), float32 at least.

    Args:
        blocks: Some examples after others, each block in memory of its own.
    """

    def __init__(self, *blocks: torch.Tensor) -> None:
        self.blocks = [at_least_float32(block) for block in blocks]

    def __add__(self, other: "MaterializedGrads") -> "MaterializedGrads":
        if [len(block) for block in self.blocks] == [len(block) for block in other.blocks]:
            return MaterializedGrads(*(one + another for one, another in zip(self.blocks, other.blocks, strict=True)))
        return MaterializedGrads(self.written_out() + other.written_out())

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.blocks[0].shape[1:]

    def written_out(self) -> torch.Tensor:
        """All of them; a copy where there are several blocks."""
        return self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)

    def square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        norms = []
        for block in self.blocks:
            norms.append(row_norms(block.reshape(len(block), -1)))
        squares = torch.cat(norms).square()
        return squares, torch.zeros_like(squares)

    def moments(self, directions: torch.Tensor, weight: torch.Tensor) -> Moments:
        fan_in = directions.shape[1]
        basis = torch.stack([torch.ones_like(directions), directions], dim=1).to(
            self.blocks[0].dtype
        )  # (channels, 2, fan-in)
        of_blocks = []
        for block in self.blocks:
            rows = block.flatten(2)  # (n, channels, fan-in)
            plain_and_along = torch.bmm(basis, rows.permute(1, 2, 0)).permute(
                1, 2, 0
            )  # this way round twice as fast on a CPU
            of_blocks.append(torch.cat([row_norms(rows.flatten(0, 1)).view(1, *rows.shape[:2]), plain_and_along]))
        norms, plain, along = torch.cat(of_blocks, 1)
        squares, error = norms.square(), unit(norms) * norms
        return Moments(
            squares, plain, along, (2 * roundings(fan_in) * error * norms, fan_in**1.5 * error, fan_in * error)
        )

    def weighted_sum(self, coefficients: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        total, start = self.blocks[0].new_zeros(self.shape.numel()), 0
        for block in self.blocks:
            rows, own = block.reshape(len(block), -1), slice(start, start + len(block))
            if counts is not None:  # a coefficient of zero does not silence it: 0 * NaN is NaN
                rows = torch.where(counts[own, None], rows, 0.0)
            of_block = coefficients[own].to(rows.dtype) @ rows
            total, start = total.add_(of_block) if start else of_block, start + len(block)
        return total.view(self.shape)
