"""What a step makes of the examples that it draws: views of each image, or all images of a person."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from sfumato.config import AugmentationKind, ResolvedAugmentation
from sfumato.data.augmentation import augment
from sfumato.data.canaries import WithCanaries
from sfumato.data.examples import Examples
from sfumato.data.images import ImageSet, on_device


@dataclasses.dataclass(frozen=True)
class ViewWords:
    """Uniform words for the views of any examples, computed for those that are asked for: `words[indices]`.

    Guarantee: word (i, j) is a function of the key, the example's index i and the view's j alone, whatever else is
    asked for. It is word ``16 B i + j`` of the keystream that `sfumato.randomness.Stream` gives for that key,
    B = ceil(K / 16).

    Attributes:
        key: Of one update, 32 bytes, used for nothing else.
        num_views: K.
    """

    key: bytes = dataclasses.field(repr=False)
    num_views: int

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(b,), of examples, below 2^32 / B -> (b, K), uint32."""
        num_blocks = -(-self.num_views // 16)
        blocks = np.asarray(indices, dtype=np.int64)[:, None] * num_blocks + np.arange(num_blocks)
        assert not blocks.size or blocks.max() < 2**32
        words = _chacha20(self.key, blocks.ravel().astype(np.uint32))
        return words.reshape(len(indices), 16 * num_blocks)[:, : self.num_views]


Drawn = Examples | WithCanaries


class People:
    """One example for each person (`Examples.groups`), in the order in which they first appear.

    An example is the person's images, up to K, each with its label and its weight 1/n, n the number of the person's
    images: their weighted sum is the mean. The places that are left hold the first image again, with a weight of zero.

    Attributes:
        readable: (N,), torch.bool: False for a person of whom no image counts.

    Args:
        images: With groups; those that are not readable do not count.
        limit: K, the most images of a person that count: of more the first do.
    """

    def __init__(self, images: Examples, limit: int) -> None:
        assert images.groups is not None
        self._images, self._limit = images, limit
        places: dict[str, list[int]] = {}
        for index, (group, counts) in enumerate(zip(images.groups, images.readable.tolist(), strict=True)):
            own = places.setdefault(group, [])
            if counts and len(own) < limit:
                own.append(index)
        self._counts = torch.tensor([len(own) for own in places.values()], dtype=torch.int64)
        # (N, K): the first image again where there are no more; image 0 for nobody's.
        self._places = torch.tensor([[*own, *[own[0] if own else 0] * (limit - len(own))] for own in places.values()])
        self.readable = self._counts > 0

    def __len__(self) -> int:
        return len(self._counts)

    def together(self, people: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Images (m, K, *shape), labels (m, K), and weights (m, K).

        Args:
            people: (m,), int64.
        """
        places, counts = self._places[people], self._counts[people][:, None]
        images = self._images.batch(places.flatten(), device).unflatten(0, places.shape)
        weights = (torch.arange(self._limit) < counts) / counts.clamp(min=1)
        return images, on_device(self._images.labels[places], device), on_device(weights, device)


@dataclasses.dataclass(frozen=True)
class Views:
    """Which views of an image are averaged; ``augmult`` = K, 0 for the image as it is."""

    kind: AugmentationKind
    augmult: int
    padding: int

    @classmethod
    def of(cls, resolved: ResolvedAugmentation) -> "Views":
        return cls(resolved.kind, resolved.augmult, resolved.padding)

    def make(self, examples: Drawn, indices: Tensor, view_bits: ViewWords, device: torch.device) -> Tensor:
        """(b, K, C, H, W), or the examples as they are, (b, *shape), where K is 0.

        Args:
            examples: All of them; images, where views are made.
            indices: (b,), which ones.
            view_bits: Uniform words: a view depends on (example, view) alone, whatever else is drawn.
            device: Where they are made.
        """
        if not self.augmult:
            return examples.batch(indices, device)
        bits = torch.from_numpy(view_bits[indices.numpy()].astype(np.int64))
        if isinstance(examples, WithCanaries):
            return examples.of_each(indices, lambda own, at, which: self.of_bits(own, at, bits[which], device))
        return self.of_bits(examples, indices, bits, device)

    def of_bits(self, images: Examples, indices: Tensor, bits: Tensor, device: torch.device) -> Tensor:
        """(b, K, C, H, W), from each view's own bits: (b, K), int64."""
        assert isinstance(images, ImageSet)
        size = images.crop if self.kind in ("crop", "crop_flip") else None
        inputs = images.batch(indices, device) if size is None else images.whole(indices, device)
        return augment(inputs, bits, self.kind, self.padding, images.mean, images.std, size=size)

    def with_labels(
        self, examples: Drawn | People, indices: Tensor, view_bits: ViewWords, device: torch.device
    ) -> tuple[Tensor, ...]:
        """What `make` gives, and the (b,) labels; or people, `together`: their images as they are."""
        if isinstance(examples, People):
            return examples.together(indices, device)
        return self.make(examples, indices, view_bits, device), on_device(examples.labels[indices], device)


def _chacha20(key: bytes, counters: np.ndarray) -> np.ndarray:
    """Many blocks of ChaCha20 at once (RFC 8439, Section 2.3; the nonce is zero): (n,), uint32 -> (n, 16), uint32."""
    start = np.zeros((16, len(counters)), dtype=np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    start[12] = counters
    state = start.copy()
    for _ in range(10):
        for turn in (0, 1):  # columns, then diagonals
            for shift in (0, 1, 2, 3):
                others = (4 * row + (shift + turn * row) % 4 for row in (1, 2, 3))
                _quarter_round(state, shift, *others)
    return np.ascontiguousarray((state + start).T)


def _quarter_round(state: np.ndarray, a: int, b: int, c: int, d: int) -> None:
    """RFC 8439, Section 2.1, on rows of words."""
    for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[to] += state[by]
        state[turned] ^= state[to]
        state[turned] = (state[turned] << np.uint32(bits)) | (state[turned] >> np.uint32(32 - bits))
