"""The batched operations against torchvision's, one image at a time."""

import itertools

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as torchvision

from sfumato.config import DataConfig
from sfumato.data.augmentation import augment, transforms, uniforms
from sfumato.data.images import ImageSet
from sfumato.data.views import Views

TOLERANCE = 1e-4


def images(number=6, channels=3, size=24, seed=0):
    """Random images; the first is black, the second white, the third grey, the fourth has equal pairs of channels."""
    pixels = torch.rand(number, channels, size, size + 3, generator=torch.Generator().manual_seed(seed))
    pixels[0], pixels[1], pixels[2] = 0, 1, pixels[2].mean(0)
    if channels == 3:
        pixels[3, :, :8], pixels[3, 1] = pixels[3, :, :8].round(), pixels[3, 0]
    return pixels


def numbers(number, low, high, seed=1):
    return low + (high - low) * torch.rand(number, generator=torch.Generator().manual_seed(seed))


def assert_close(found, expected):
    assert found.shape == expected.shape and float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("channels", [1, 3])
def test_a_jitter_equals_torchvisions_adjustments_in_its_order(channels):
    theirs = [getattr(torchvision, f"adjust_{name}") for name in ("brightness", "contrast", "saturation", "hue")]
    # All orders at random factors; then each adjustment alone, at the ends of its range too.
    orders = torch.tensor([*itertools.permutations(range(4)), *[(0, 1, 2, 3)] * 24])
    pixels = images(48, channels, size=9)
    factors = torch.stack([numbers(48, 0.2, 1.8, seed) for seed in (1, 2, 3)] + [numbers(48, -0.5, 0.5, 4)], 1)
    neutral, alone = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.eye(4, dtype=torch.bool).repeat(6, 1)
    factors[28:36] = torch.tensor([0.2, 0.2, 0.2, -0.5])
    factors[36:44] = torch.tensor([1.8, 1.8, 1.8, 0.5])
    factors[24:] = torch.where(alone, factors[24:], neutral)
    before = pixels.clone()
    found = transforms.adjust_in_order(pixels, factors, orders)
    assert torch.equal(pixels, before)  # nothing that was given is changed
    for i in range(48):
        expected = pixels[i]
        for operation in orders[i].tolist():
            expected = theirs[operation](expected, float(factors[i, operation]))
        assert_close(found[i], expected)


def test_grey_equals_torchvisions_and_leaves_grey_images_as_they_are():
    pixels, grey = images(), images(24, channels=1)
    assert_close(transforms.grey(pixels), torchvision.rgb_to_grayscale(pixels, num_output_channels=1))
    factors = torch.tensor([1.0, 1.0, 0.3, 0.4]).expand(24, 4)
    assert torch.equal(transforms.adjust_in_order(grey, factors, torch.arange(4).expand(24, 4)), grey)
    assert torch.equal(transforms.grey(grey), grey)


@pytest.mark.parametrize("radius", [1, 11])
def test_a_blur_equals_torchvisions(radius):
    pixels, sigmas = images(7), numbers(7, 0.1, 2.0)
    found = transforms.gaussian_blur(pixels, sigmas, radius)
    for pixel, sigma, blurred in zip(pixels, sigmas.tolist(), found, strict=True):
        assert_close(blurred, torchvision.gaussian_blur(pixel, [2 * radius + 1] * 2, [sigma] * 2))


@pytest.mark.parametrize("height, width", [(28, 20), (224, 224)])
def test_a_resized_crop_equals_torchvisions(height, width):
    boxes = torch.stack(
        transforms.random_boxes(uniforms(torch.arange(12), transforms.NUM_BOX_UNIFORMS), height, width), 1
    )
    boxes[0] = torch.tensor([0, 0, height, width])
    boxes[1] = torch.tensor([height - 1, width - 1, 1, 1])
    flip = torch.arange(12) % 3 == 0
    pixels = torch.rand(12, 3, height, width)
    found = transforms.resized_crop(pixels, *boxes.unbind(1), flip=flip)
    for i in range(12):
        expected = torchvision.resized_crop(pixels[i], *(int(value) for value in boxes[i]), [height, width])
        assert_close(found[i], torchvision.horizontal_flip(expected) if flip[i] else expected)


@pytest.mark.parametrize("padding", [0, 7])
def test_a_reflected_crop_equals_numpys_padding(padding):
    pixels = torch.rand(40, 2, 8, 11)
    source = torch.Generator().manual_seed(0)
    top, left = torch.randint(0, 2 * padding + 1, (2, 40), generator=source)
    flip = torch.randint(0, 2, (40,), generator=source)
    found = transforms.cropped(pixels, top - padding, left - padding, flip, (8, 11), repeats_edge=False)
    for i in range(40):
        padded = np.pad(pixels[i].numpy(), ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
        expected = padded[:, top[i] : top[i] + 8, left[i] : left[i] + 11]
        np.testing.assert_array_equal(found[i].numpy(), expected[:, :, ::-1] if flip[i] else expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["crop_flip", "rrc", "tan", "simclr"])
def test_a_gpu_makes_the_same_views(kind):
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (40, 50)))
    assert torch.equal(uniforms(bits.flatten().cuda(), 40).cpu(), uniforms(bits.flatten(), 40))
    pixels = torch.rand(40, 3, 32, 32)
    found, expected = augment(pixels.cuda(), bits, kind).cpu(), augment(pixels, bits, kind)
    off = ((found - expected).abs().flatten(2).amax(2) > TOLERANCE).sum()
    assert off <= 1  # a box whose side lies on the edge of rounding may come out one pixel larger


def test_views_of_ours_at_224_pixels_are_torchvisions_of_the_centre_of_256():
    """Sander et al.: resized to 256, central 224, random crops of it with 20 pixels of reflected padding, flips."""
    config = DataConfig(name="imagenet", resize_ratio=1.142857)
    assert config.stored_size(224) == 256
    stored = torch.randint(0, 256, (2, 3, 256, 256), dtype=torch.uint8)
    labels, readable = torch.zeros(2).long(), torch.ones(2, dtype=torch.bool)
    examples = ImageSet(stored, labels, readable, (0.0,) * 3, (1.0,) * 3, crop=224)
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (2, 6)))
    views = Views("tan", 6, 20).of_bits(examples, torch.arange(2), bits, torch.device("cpu"))
    numbers = uniforms(bits.flatten(), 4 + transforms.NUM_JITTER_UNIFORMS).view(2, 6, -1)
    plain = 0
    for image, view in itertools.product(range(2), range(6)):
        top, left, flip, jitter = numbers[image, view, :4].tolist()
        centre = torchvision.center_crop(stored[image] / 255, [224, 224])
        padded = torchvision.pad(centre, [20], padding_mode="reflect")
        expected = torchvision.crop(padded, int(top * 41), int(left * 41), 224, 224)
        expected = torchvision.horizontal_flip(expected) if flip >= 0.5 else expected
        if jitter >= 0.3:
            plain += 1
            assert_close(views[image, view], expected)
        else:
            assert not torch.allclose(views[image, view], expected, atol=TOLERANCE)
    assert 0 < plain < 12


def test_normalised_images_give_normalised_views():
    mean, std = (0.4, 0.5, 0.3), (0.2, 0.25, 0.3)
    unit, bits = images(5, size=21), torch.arange(20).view(5, 4) * 12345
    shift, scale = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
    for kind in ("flip", "crop_flip", "rrc", "tan", "simclr"):
        views = augment((unit - shift) / scale, bits, kind, 3, mean, std)
        assert_close(views * scale + shift, augment(unit, bits, kind, 3))
