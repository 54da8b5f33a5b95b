"""Features as training sees them: what a fixed network makes of each image, computed once."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from sfumato.data.images import Digests, little_endian, sha256_of_each
from sfumato.data.readahead import ask_for

_PART = 4096
"""Rows that are hashed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSet:
    """`Examples` made of features; an image that cannot be read has zeros.

    Attributes:
        stored: (M, D), torch.float32. May lie in a file that is mapped into memory.
        labels: (N,), torch.int64.
        readable: (N,), torch.bool.
        groups: Which examples belong together (a person), one name each, or None.
        rows: (N,), torch.int64: where in `stored` each example lies.
        digests: Of each stored row, which every row that is taken is then compared with; None where
            they lie in memory.
    """

    stored: torch.Tensor
    labels: torch.Tensor
    readable: torch.Tensor
    groups: list[str] | None
    rows: torch.Tensor
    digests: Digests | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self.stored.shape[1:])

    def batch(self, indices: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """(B, D), float32.

        Raises:
            InputError: If a row on disk is no longer what was computed.
        """
        rows = self.rows[indices]
        if self.digests is not None:
            ask_for(self.stored, rows)
        chosen = self.stored.index_select(0, rows)
        if self.digests is not None:
            self.digests.compare(chosen, rows)
        return chosen.to(device)

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
            if self.digests is None:
                yield sha256_of_each(self.stored.index_select(0, rows).numpy()).tobytes()
            else:
                yield self.digests.values[rows.numpy()].tobytes()
