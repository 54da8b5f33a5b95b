import itertools
import typing

import numpy as np
import pytest
import scipy.stats
import torch

from sfumato.config import AugmentationKind
from sfumato.data import augmentation
from sfumato.data.augmentation import augment

KINDS = typing.get_args(AugmentationKind)


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
def test_views_equal_a_naive_loop_with_numpy_symmetric_padding(kind):
    for shape, padding in (((3, 3, 8, 12), 4), ((2, 1, 9, 8), 11), ((1, 1, 1, 1), 3)):
        images, bits = torch.rand(shape), random_bits(shape[0], 7)
        views = augment(images, bits, kind, padding)
        assert views.shape == (shape[0], 7, *shape[1:]) and views.dtype == torch.float32
        for i, j in itertools.product(range(shape[0]), range(7)):
            truth = naive_view(images[i].numpy(), int(bits[i, j]), kind, padding)
            np.testing.assert_array_equal(views[i, j].numpy(), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_large_batches_are_cut_up_without_a_trace(kind, monkeypatch):
    images, bits = torch.rand(17, 3, 21, 21), random_bits(17, 3)
    whole = augment(images, bits, kind, 4)
    for views_at_once in (1, 7):
        monkeypatch.setitem(augmentation._MAX_PIXELS, "cpu", views_at_once * 21 * 21)
        assert torch.equal(augment(images, bits, kind, 4), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_depends_on_its_own_image_and_bits_alone(kind):
    images, bits = torch.rand(6, 3, 20, 20), random_bits(6, 4)
    views = augment(images, bits, kind, 3)
    order = torch.tensor([4, 1, 5])
    assert torch.equal(augment(images[order], bits[order], kind, 3), views[order])
    assert torch.equal(augment(images, bits[:, [2, 0]], kind, 3), views[:, [2, 0]])
    changed = images.clone()
    changed[2] = float("nan")  # the worst neighbour
    others = torch.arange(6) != 2
    assert torch.equal(augment(changed, bits, kind, 3)[others], views[others])
    moved = bits.clone()
    moved[3, 1] ^= 0x5A5A5A5B
    different = (augment(images, moved, kind, 3) != views).flatten(2).any(2)
    assert different.nonzero().tolist() in ([[3, 1]], [])


@pytest.mark.parametrize(("kind", "channels"), [*((kind, 3) for kind in KINDS), ("tan", 1), ("simclr", 1)])
def test_views_stay_finite_and_within_the_range_of_images(kind, channels):
    mean, std = [0.4, 0.3, 0.5][:channels], [0.2, 0.3, 0.25][:channels]
    shift, scale = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    unit = torch.rand(8, channels, 40, 40)
    unit[0], unit[1], unit[2] = 0, 1, unit[2].round()
    images = (unit - shift) / scale
    before = images.clone()
    views = augment(images, random_bits(8, 40), kind, 4, mean, std)
    assert torch.equal(images, before) and views.dtype == torch.float32
    seen = views * scale + shift
    assert bool(torch.isfinite(views).all()) and seen.min() > -1e-5 and seen.max() < 1 + 1e-5
    assert float(seen[0].abs().max()) < 1e-5  # black stays black
    assert augment(images.double(), random_bits(8, 2), kind, 4, mean, std).dtype == torch.float64
    for shape in ((2, channels, 8, 8), (0, channels, 8, 8)):  # the smallest that there are
        views = augment(torch.rand(shape), random_bits(shape[0], 300), kind, 7)
        assert views.shape == (shape[0], 300, *shape[1:]) and bool(torch.isfinite(views).all())


@pytest.mark.parametrize(("side", "size", "number"), [(12, None, 2 * 5**2), (7, 5, 2 * 3**2)])
def test_crops_and_flips_are_uniform(side, size, number):
    """Of padded images, and of larger ones without padding (De et al. 2022, C.2)."""
    image = torch.arange(float(side**2)).view(1, 1, side, side)  # each (crop, flip) gives a view of its own
    views = augment(image, random_bits(1, 40_000), "crop_flip", 2, size=size)[0, :, 0]
    found, counts = views.unique(dim=0, return_counts=True)
    assert len(counts) == number and scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3
    biased = torch.cat([(counts[: number // 2] * 1.1).round(), counts[number // 2 :]])
    assert scipy.stats.chisquare(biased.numpy()).pvalue < 1e-3  # the test sees 10 % more of one half
    if size:
        parts = image[0, 0].unfold(0, size, 1).unfold(1, size, 1).flatten(0, 1)
        assert torch.equal(found, torch.cat([parts, parts.flip(2)]).unique(dim=0))
