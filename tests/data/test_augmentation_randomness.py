"""The random parameters of views have the distributions that they claim, and each test would notice if they had not."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from sfumato.data.augmentation import augment, colour, geometry
from sfumato.data.augmentation.uniforms import uniforms

NUMBER = 100_000


def random_bits(number, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 2**32, number, dtype=np.int64))


def test_uniforms_are_the_documented_function_of_bits_and_counter():
    """By Python's integers, which know no overflow."""

    def permute(word):
        word ^= word >> 16
        word = word * 0x21F0AAAD % 2**32
        word ^= word >> 15
        word = word * 0x735A2D97 % 2**32
        return word ^ word >> 15

    bits = torch.cat([random_bits(50), torch.tensor([0, 1, 2**31, 2**32 - 1])])
    expected = [[(permute((permute(b) + i * 0x9E3779B9) % 2**32) >> 8) / 2**24 for i in range(40)] for b in bits.tolist()]
    assert uniforms(bits, 40).tolist() == expected


@pytest.mark.parametrize("bits", [random_bits(NUMBER), torch.arange(NUMBER)], ids=["random", "consecutive"])
def test_uniforms_are_uniform_and_independent_of_one_another(bits):
    numbers = uniforms(bits, 36).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1
    smallest = min(scipy.stats.kstest(column, "uniform").pvalue for column in numbers.T)
    assert smallest > 1e-4 / 36
    correlation = np.corrcoef(numbers.T) - np.eye(36)
    assert np.abs(correlation).max() * math.sqrt(NUMBER) < 5.5  # 630 pairs, each standard normal
    for i, j in ((0, 1), (0, 35), (20, 22)):
        table = np.histogram2d(numbers[:, i], numbers[:, j], bins=16)[0]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4
    squashed = numbers[:, 0] ** 1.02  # the test has power
    assert scipy.stats.kstest(squashed, "uniform").pvalue < 1e-4


def test_one_bit_of_the_input_moves_half_of_the_bits_of_each_number():
    bits = random_bits(2000)
    words = (uniforms(bits, 8) * 2**24).long()
    for position in range(32):
        moved = words ^ (uniforms(bits ^ (1 << position), 8) * 2**24).long()
        share = torch.stack([(moved >> place) & 1 for place in range(24)], -1).double().mean(0)  # (8, 24)
        assert float((share - 0.5).abs().max()) < 6 * 0.5 / math.sqrt(2000)


def reference_boxes(number, height, width):
    """The standard definition, one box at a time with NumPy's own randomness."""
    source, boxes = np.random.default_rng(1), []
    for _ in range(number):
        for _ in range(10):
            area = height * width * source.uniform(0.08, 1)
            ratio = math.exp(source.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                boxes.append((source.integers(0, height - h + 1), source.integers(0, width - w + 1), h, w))
                break
        else:
            raise AssertionError("ten misfits in a row")
    return np.array(boxes)


def same_distribution(a, b):
    """Two-sample chi-square over the values that occur, or over 40 bins of them."""
    edges = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, 41)))
    edges[-1] += 1e-9
    table = np.stack([np.histogram(a, edges)[0], np.histogram(b, edges)[0]])
    return scipy.stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue


@pytest.mark.parametrize("height, width", [(32, 32), (40, 24)])
def test_boxes_are_distributed_as_in_the_standard_random_resized_crop(height, width):
    number = 20_000
    boxes = torch.stack(geometry.random_boxes(uniforms(random_bits(number), geometry.NUM_BOX_UNIFORMS), height, width), 1).numpy()
    top, left, h, w = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (h >= 1).all() and (w >= 1).all() and (top + h <= height).all() and (left + w <= width).all()
    assert (boxes == boxes.round()).all()
    reference = reference_boxes(number, height, width).T
    statistics = (lambda t, le, h, w: h * w, lambda t, le, h, w: h / w, lambda t, le, h, w: t, lambda t, le, h, w: le, lambda t, le, h, w: t + h)
    for statistic in statistics:
        assert same_distribution(statistic(top, left, h, w), statistic(*reference)) > 1e-4
    other = torch.stack(geometry.random_boxes(uniforms(random_bits(number), geometry.NUM_BOX_UNIFORMS), height, width, scale=(0.1, 1.0)), 1).numpy()
    assert same_distribution(other[:, 2] * other[:, 3], reference[2] * reference[3]) < 1e-6  # the test has power


def test_where_no_box_fits_the_largest_central_one_is_taken():
    numbers = torch.full((3, geometry.NUM_BOX_UNIFORMS), 0.999)
    for shape, expected in (((32, 32), (0, 0, 32, 32)), ((30, 10), (8, 0, 13, 10)), ((10, 30), (0, 8, 10, 13))):
        boxes = geometry.random_boxes(numbers, *shape)
        assert [tuple(box) for box in torch.stack(boxes, 1).tolist()] == [expected] * 3


def test_jitter_draws_its_factors_uniformly_and_every_order_equally_often(monkeypatch):
    seen = {}
    monkeypatch.setattr(colour, "adjust_in_order", lambda pixels, factors, orders: seen.update(factors=factors, orders=orders))
    colour.jitter(torch.zeros(NUMBER, 3, 1, 1), uniforms(random_bits(NUMBER), 5), (0.8, 0.4, 0.6, 0.2))
    for column, (low, high) in zip(seen["factors"].T.numpy(), ((0.2, 1.8), (0.6, 1.4), (0.4, 1.6), (-0.2, 0.2)), strict=True):
        assert scipy.stats.kstest(column, "uniform", (low, high - low)).pvalue > 1e-4
    counts = seen["orders"].unique(dim=0, return_counts=True)[1].numpy()
    assert len(counts) == 24 and scipy.stats.chisquare(counts).pvalue > 1e-4


def within(share, probability, number):
    return abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / number)


def test_flips_jitter_grey_and_blur_have_their_probabilities():
    number = 20_000
    # Left half black, right half white: mirrored exactly if flipped, whatever the colours do.
    image = torch.zeros(1, 3, 8, 8)
    image[..., 4:] = 1
    tan = augment(image, random_bits(number)[None], "tan", 0)[0]
    flipped = (tan[:, :, 0, 0] > tan[:, :, 0, -1]).all(1).double().mean().item()
    assert within(flipped, 0.5, number) and not within(flipped, 0.52, number)

    coloured = torch.tensor([0.5, 0.4, 0.6])[None, :, None, None].expand(1, 3, 20, 20)
    jittered = (augment(coloured, random_bits(number)[None], "tan", 2)[0, :, :, 0, 0] != coloured[0, :, 0, 0]).any(1).double().mean().item()
    assert within(jittered, 0.3, number) and not within(jittered, 0.32, number)

    simclr = augment(coloured, random_bits(number)[None], "simclr")[0, :, :, 10, 10]
    grey = ((simclr - simclr.mean(1, keepdim=True)).abs() < 1e-6).all(1)
    assert within(grey.double().mean().item(), 0.2, number)
    unchanged = ((simclr - coloured[0, :, 0, 0]).abs() < 1e-5).all(1).double().mean().item()
    assert within(unchanged, 0.8 * 0.2, number)  # neither grey nor jittered


def test_half_of_simclrs_views_are_blurred():
    number = 4_000
    # Half of the pixels black, half white: a crop repeats pixels, and without jitter and blur, only edges between them are softened.
    image = (torch.arange(40)[:, None] + torch.arange(40) < 40).float().expand(1, 1, 40, 40)
    bits = random_bits(number)[None]
    blurred = augment(image, bits, "simclr")[0] - _without_blur(image, bits)
    share = (blurred.abs().amax((1, 2, 3)) > 1e-6).double().mean().item()
    everywhere_alike = (_without_blur(image, bits).std((1, 2, 3)) < 1e-6).double().mean().item()  # crops of one colour stay as they are
    assert 0.5 * (1 - everywhere_alike) - 0.05 < share < 0.51


def _without_blur(image, bits):
    from sfumato.data.augmentation import blur

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blur, "blur_radius", lambda size: 0)
        return augment(image, bits, "simclr")[0]
