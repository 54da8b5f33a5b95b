"""Which views of each image a step averages, and how they are made."""

import dataclasses

import numpy as np
import torch

from sfumato.config import AugmentationKind, ResolvedAugmentation
from sfumato.data.augmentation import augment
from sfumato.data.canaries import WithCanaries
from sfumato.data.examples import Examples
from sfumato.data.images import ImageSet


@dataclasses.dataclass(frozen=True)
class ViewWords:
    """Random words for the views of any examples, computed for those that are asked for: `words[indices]`.

    Attributes:
        key: Of one update, 32 bytes.
        num_views: K.
    """

    key: bytes = dataclasses.field(repr=False)
    num_views: int

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(b, K), uint32: see `view_words`."""
        return view_words(self.key, indices, self.num_views)


ViewBits = np.ndarray | ViewWords
"""What gives (b, K) words when it is indexed by (b,) examples: words of all (N, K), or those of a key."""


@dataclasses.dataclass(frozen=True)
class Views:
    """Which views of an image are averaged; ``augmult`` = K, 0 for the image as it is."""

    kind: AugmentationKind
    augmult: int
    padding: int

    @classmethod
    def of(cls, resolved: ResolvedAugmentation) -> "Views":
        return cls(resolved.kind, resolved.augmult, resolved.padding)

    def make(
        self, examples: Examples | WithCanaries, indices: torch.Tensor, view_bits: ViewBits, device: torch.device
    ) -> torch.Tensor:
        """(b, K, C, H, W), or the images as they are, (b, C, H, W), where K is 0.

        Args:
            examples: All of them; images, where views are made.
            indices: (b,), which ones.
            view_bits: Uniform words: a view depends on (example, view) alone, whatever else is drawn.
            device: Where they are made.
        """
        if not self.augmult:
            return examples.batch(indices, device)
        bits = torch.from_numpy(view_bits[indices.numpy()].astype(np.int64))

        def views(images: object, indices: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            assert isinstance(images, ImageSet)
            return self.of_bits(images, indices, bits[chosen], device)

        if isinstance(examples, WithCanaries):
            return examples.of_each(indices, views)
        return views(examples, indices, torch.ones(len(indices), dtype=torch.bool))

    def of_bits(
        self, images: ImageSet, indices: torch.Tensor, bits: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """(b, K, C, H, W), from each view's own bits: (b, K), int64."""
        size = images.crop if self.kind in ("crop", "crop_flip") else None
        inputs = images.batch(indices, device) if size is None else images.whole(indices, device)
        return augment(inputs, bits.to(device), self.kind, self.padding, images.mean, images.std, size=size)

    def with_labels(
        self, examples: Examples | WithCanaries, indices: torch.Tensor, view_bits: ViewBits, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `make` gives, and the (b,) labels."""
        return self.make(examples, indices, view_bits, device), examples.labels[indices].to(device)


def view_words(key: bytes, indices: np.ndarray, num_views: int) -> np.ndarray:
    """Uniform words for the views of some examples.

    Guarantee: word (i, j) is a function of the key, the example's index and j alone, whatever else is asked for. It is
    word ``16 B i + j`` of the keystream that `sfumato.randomness.Stream` gives for that key, B = ceil(K / 16).

    Args:
        key: 32 bytes, used for nothing else.
        indices: (b,), of examples, below 2^32 / B.
        num_views: K.

    Returns:
        (b, K), uint32.
    """
    num_blocks = -(-num_views // 16)
    blocks = np.asarray(indices, dtype=np.int64)[:, None] * num_blocks + np.arange(num_blocks)
    assert not blocks.size or blocks.max() < 2**32
    words = _chacha20(key, blocks.ravel().astype(np.uint32))
    return words.reshape(len(indices), 16 * num_blocks)[:, :num_views]


def _chacha20(key: bytes, counters: np.ndarray) -> np.ndarray:
    """Many blocks of ChaCha20 at once (RFC 8439, Section 2.3; the nonce is zero): (n,), uint32 -> (n, 16), uint32."""
    start = np.zeros((16, len(counters)), dtype=np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", dtype="<u4")[:, None]
    start[4:12] = np.frombuffer(key, dtype="<u4")[:, None]
    start[12] = counters
    state = start.copy()
    for _ in range(10):
        for shift in (0, 1, 2, 3):
            _quarter_round(state, shift, 4 + shift, 8 + shift, 12 + shift)
        for shift in (0, 1, 2, 3):
            _quarter_round(state, shift, 4 + (shift + 1) % 4, 8 + (shift + 2) % 4, 12 + (shift + 3) % 4)
    return np.ascontiguousarray((state + start).T)


def _quarter_round(state: np.ndarray, a: int, b: int, c: int, d: int) -> None:
    """RFC 8439, Section 2.1, on rows of words."""
    for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[to] += state[by]
        state[turned] ^= state[to]
        state[turned] = (state[turned] << np.uint32(bits)) | (state[turned] >> np.uint32(32 - bits))
