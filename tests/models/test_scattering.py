"""Scattering: its own definition, by another way of computing it, and what it is known for."""

import numpy as np
import pytest
import torch

from sfumato.errors import InputError
from sfumato.models.scattering import Scattering

rng = np.random.default_rng(0)


def gabor(size, sigma, theta, frequency, slant, middle):
    """As kymatio has it, about the middle of as many pixels: complex, on a torus of that size."""
    turn = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
    curve = turn @ np.diag([1, slant**2]) @ turn.T / (2 * sigma**2)
    x, y = np.mgrid[-2 * size : 2 * size, -2 * size : 2 * size] + (middle - 1) / 2
    form = curve[0, 0] * x * x + 2 * curve[0, 1] * x * y + curve[1, 1] * y * y
    values = np.exp(-form + 1j * frequency * (x * np.cos(theta) + y * np.sin(theta)))
    return values.reshape(4, size, 4, size).sum((0, 2)) * slant / (2 * np.pi * sigma**2)


def by_fft(images, J):
    """The same in float64 by FFT, with whole filters: (B, C, size, size), of a size that 2^J divides."""
    edge = 2**J
    padded = np.pad(images, ((0, 0), (0, 0), (edge, edge), (edge, edge)), "reflect")

    def convolved(maps, kernel, stride):
        return np.fft.ifft2(np.fft.fft2(maps) * np.fft.fft2(kernel))[..., ::stride, ::stride]

    def moduli(maps, scale):
        size, sigma, frequency = maps.shape[-1], 0.8 * 2**scale, 0.75 * np.pi / 2**scale
        for number in range(8):
            theta = np.pi * (3 - number) / 8
            wave, gauss = (gabor(size, sigma, theta, each, 0.5, 2**scale) for each in (frequency, 0))
            yield np.abs(convolved(maps, wave - gauss * (wave.sum() / gauss.sum()), 2**scale))

    def averaged(maps, scale):
        gauss = gabor(maps.shape[-1], 0.8 * 2 ** (J - 1 - scale), 0, 0, 1, 2 ** (J - scale))
        return convolved(maps, gauss / gauss.sum(), 2 ** (J - scale)).real[..., 1:-1, 1:-1]

    first = [[(scale, each) for each in moduli(padded, scale)] for scale in range(J)]
    second = [
        (scale + more, each)
        for scale in range(J)
        for more in range(1, J - scale)
        for _, maps in first[scale]
        for each in moduli(maps, more)
    ]
    maps = [(0, padded), *(each for scale in first for each in scale), *second]
    return np.stack([averaged(values, scale) for scale, values in maps], 2).reshape(
        len(images), -1, images.shape[-1] // edge, images.shape[-1] // edge
    )


@pytest.mark.parametrize(("size", "channels", "J"), [(16, 3, 2), (12, 1, 1), (16, 1, 3)])
def test_it_is_what_whole_filters_give_by_fft_in_float64(size, channels, J):
    images = rng.normal(size=(2, channels, size, size)).cumsum(2)
    expected = by_fft(images, J)
    found = Scattering(size, J)(torch.tensor(images, dtype=torch.float32)).numpy()
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) < 1e-3 * np.linalg.norm(expected)


def test_features_move_with_the_image():
    images, network = torch.zeros(1, 1, 64, 64), Scattering(64)
    images[..., 24:36, 24:36] = torch.randn(12, 12)
    moved = network(images.roll((4, -4), (2, 3)))
    torch.testing.assert_close(moved, network(images).roll((1, -1), (2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "J"), [(16, 3), (28, 2)])
def test_a_mirror_image_has_the_same_features_elsewhere(size, J):
    images, network = torch.randn(2, 1, size, size), Scattering(size, J)
    expected = network(images)[:, network.mirrored].flip(3)
    torch.testing.assert_close(network(images.flip(3)), expected, rtol=1e-4, atol=1e-5)


def test_it_takes_any_size_that_its_scales_fit():
    for size, J, maps, side in ((9, 2, 81, 3), (17, 3, 217, 3)):
        assert Scattering(size, J)(torch.randn(2, 1, size, size)).shape == (2, maps, side, side)
    for size, J in ((8, 0), (15, 3)):
        with pytest.raises(InputError, match=f"J = {J} is not possible with images of {size} pixels"):
            Scattering(size, J)
