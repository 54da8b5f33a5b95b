"""Features as training sees them: what a fixed network makes of each image, computed once."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from sfumato.data.images import little_endian

_PART = 4096
"""Rows that are replaced or hashed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSet:
    """`Examples` made of features; an image that cannot be read has zeros.

    Attributes:
        stored: (M, D), torch.float32.
        labels: (N,), torch.int64.
        readable: (N,), torch.bool.
        groups: Which examples belong together (a person), one name each, or None.
        rows: (N,), torch.int64: where in `stored` each example lies.
    """

    stored: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    groups: list[str] | None
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self.stored.shape[1:])

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """(B, D), float32."""
        return self.stored.index_select(0, self.rows[indices]).to(device)

    def replace(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts what a function makes of rows (m, D) in their place; what could not be read stays zero."""
        for part in self.rows[self.readable].split(_PART):
            self.stored[part] = of(self.stored[part])

    def subset(self, indices: Sequence[int]) -> "FeatureSet":
        """The examples at these indices, in that order; nothing is copied."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return dataclasses.replace(
            self,
            rows=self.rows[chosen],
            labels=self.labels[chosen],
            readable=self.readable[chosen],
            groups=None if self.groups is None else [self.groups[i] for i in indices],
        )

    def content(self) -> Iterator[bytes]:
        """All that an update could depend on, in parts of which none could stand for another."""
        yield repr((self.shape, self.groups, len(self))).encode()
        yield little_endian(self.labels)
        yield little_endian(self.readable)
        for rows in self.rows.split(_PART):
            yield little_endian(self.stored.index_select(0, rows))
