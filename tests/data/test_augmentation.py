import numpy as np
import pytest
import scipy.stats
import torch

from sfumato.data.augmentation import augment
from sfumato.data.augmentation import views as making


def random_bits(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.int64))


def naive_view(image, bits, kind, padding):
    """One view of one image (C, H, W), by NumPy's own padding and slices."""
    _, height, width = image.shape
    if kind in ("crop", "crop_flip"):
        side = 2 * padding + 1
        top, left = divmod(((bits >> 1) * side * side) >> 31, side)
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode="symmetric")
        image = padded[:, top : top + height, left : left + width]
    if kind in ("flip", "crop_flip") and bits & 1:
        image = image[:, :, ::-1]
    return image


@pytest.mark.parametrize("kind", ["none", "flip", "crop", "crop_flip"])
@pytest.mark.parametrize(
    "shape, padding", [((5, 1, 28, 28), 4), ((3, 3, 8, 12), 4), ((2, 2, 9, 8), 0), ((2, 1, 8, 8), 11), ((1, 1, 1, 1), 3), ((0, 3, 8, 8), 4)]
)
def test_views_equal_a_naive_loop_with_numpy_symmetric_padding(kind, shape, padding):
    images = torch.rand(shape)
    bits = random_bits(shape[0], 7)
    views = augment(images, bits, kind, padding)
    assert views.shape == (shape[0], 7, *shape[1:]) and views.dtype == torch.float32
    for i in range(shape[0]):
        for j in range(7):
            np.testing.assert_array_equal(views[i, j].numpy(), naive_view(images[i].numpy(), int(bits[i, j]), kind, padding))


def test_large_batches_are_cut_up_without_a_trace(monkeypatch):
    images, bits = torch.rand(17, 2, 8, 8), random_bits(17, 3)
    whole = augment(images, bits, "crop_flip", 4)
    monkeypatch.setitem(making._MAX_PIXELS, "cpu", 7 * 64)
    assert torch.equal(augment(images, bits, "crop_flip", 4), whole)


def test_a_view_depends_on_its_own_image_and_bits_alone():
    images, bits = torch.rand(6, 3, 10, 10), random_bits(6, 4)
    views = augment(images, bits, "crop_flip", 3)
    order = torch.tensor([4, 1, 5])
    assert torch.equal(augment(images[order], bits[order], "crop_flip", 3), views[order])
    assert torch.equal(augment(images, bits[:, [2, 0]], "crop_flip", 3), views[:, [2, 0]])


def test_crops_and_flips_are_uniform():
    padding, number = 2, 40_000
    image = torch.arange(144.0).view(1, 1, 12, 12)  # each (crop, flip) gives a view of its own
    views = augment(image, random_bits(1, number), "crop_flip", padding).view(number, -1)
    _, counts = views.unique(dim=0, return_counts=True)
    assert len(counts) == 2 * (2 * padding + 1) ** 2
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3
    biased = counts.clone()
    biased[: len(biased) // 2] = (biased[: len(biased) // 2] * 1.1).round().long()  # the test has power: 10 % more of one half is seen
    assert scipy.stats.chisquare(biased.numpy()).pvalue < 1e-3


def test_the_extreme_bits_stay_within_the_padded_image():
    image = torch.arange(64.0).view(1, 1, 8, 8)
    views = augment(image, torch.tensor([[0, 1, 2**32 - 1, 2**32 - 2]]), "crop_flip", 4)[0, :, 0].numpy()
    padded = np.pad(image[0, 0].numpy(), 4, mode="symmetric")
    np.testing.assert_array_equal(views[0], padded[:8, :8])
    np.testing.assert_array_equal(views[1], padded[:8, :8][:, ::-1])
    np.testing.assert_array_equal(views[2], padded[8:, 8:][:, ::-1])
    np.testing.assert_array_equal(views[3], padded[8:, 8:])
