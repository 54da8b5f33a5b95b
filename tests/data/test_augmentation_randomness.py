"""The random parameters of views have the distributions that they claim, and each test would notice if they had not."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torchvision.transforms import RandomResizedCrop

from sfumato.data.augmentation import augment, transforms, uniforms
from sfumato.data.images import ImageSet
from sfumato.data.views import Views, ViewWords
from sfumato.randomness import Stream
from tests.data.test_augmentation import random_bits

NUMBER = 50_000
KEY = bytes(range(32))


def test_uniforms_are_the_documented_function_of_bits_and_counter():
    """By Python's integers, which know no overflow."""

    def permute(word):
        word ^= word >> 16
        word = word * 0x21F0AAAD % 2**32
        word ^= word >> 15
        word = word * 0x735A2D97 % 2**32
        return word ^ word >> 15

    bits = torch.cat([random_bits(50), torch.tensor([0, 1, 2**31, 2**32 - 1])])
    hashed = [[permute((permute(b) + i * 0x9E3779B9) % 2**32) for i in range(40)] for b in bits.tolist()]
    assert uniforms(bits, 40).tolist() == [[(word >> 8) / 2**24 for word in row] for row in hashed]


def test_uniforms_are_uniform_and_independent_of_one_another():
    numbers = uniforms(torch.arange(NUMBER), 36).numpy()  # bits that differ little
    assert numbers.min() >= 0 and numbers.max() < 1
    smallest = min(scipy.stats.kstest(column, "uniform").pvalue for column in numbers.T)
    assert smallest > 1e-4 / 36
    correlation = np.corrcoef(numbers.T) - np.eye(36)
    assert np.abs(correlation).max() * math.sqrt(NUMBER) < 5.5  # 630 pairs, each standard normal
    for i, j in ((0, 1), (0, 35), (20, 22)):
        table = np.histogram2d(numbers[:, i], numbers[:, j], bins=16)[0]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4
    squashed = numbers[:, 0] ** 1.03  # the test has power
    assert scipy.stats.kstest(squashed, "uniform").pvalue < 1e-4


def reference_boxes(number, height, width):
    """torchvision's, one box at a time: (number, 4), top, left, height, width."""
    image = torch.empty(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        boxes = [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(number)]
    return np.array(boxes, dtype=np.float64)


def same_distribution(a, b):
    """p-value of the two-sample chi-square test over 40 bins."""
    edges = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, 41)))
    edges[-1] += 1e-9
    table = np.stack([np.histogram(a, edges)[0], np.histogram(b, edges)[0]])
    return scipy.stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue


@pytest.mark.parametrize("height, width", [(32, 32), (12, 40)])
def test_boxes_are_distributed_as_in_the_standard_random_resized_crop(height, width, monkeypatch):
    number = 10_000
    numbers = uniforms(random_bits(number), transforms.NUM_BOX_UNIFORMS)
    boxes = torch.stack(transforms.random_boxes(numbers, height, width)).double().numpy()
    top, left, h, w = boxes
    assert min(top.min(), left.min()) >= 0 and min(h.min(), w.min()) >= 1
    assert (top + h <= height).all() and (left + w <= width).all() and (boxes == boxes.round()).all()
    reference = reference_boxes(number, height, width).T

    def statistics(top, left, h, w):
        return h * w, h / w, top, left, top + h

    for ours, theirs in zip(statistics(*boxes), statistics(*reference), strict=True):
        assert same_distribution(ours, theirs) > 1e-4
    monkeypatch.setattr(transforms, "_AREA", (0.15, 1.0))
    *_, h, w = transforms.random_boxes(numbers, height, width)
    assert same_distribution((h * w).double().numpy(), reference[2] * reference[3]) < 1e-6  # the test has power


def test_where_no_box_fits_the_largest_central_one_is_taken():
    numbers = torch.full((3, transforms.NUM_BOX_UNIFORMS), 0.999)
    for shape, expected in (((32, 32), (0, 0, 32, 32)), ((30, 10), (8, 0, 13, 10)), ((10, 30), (0, 8, 10, 13))):
        boxes = transforms.random_boxes(numbers, *shape)
        assert [tuple(box) for box in torch.stack(boxes, 1).tolist()] == [expected] * 3


def test_jitter_draws_its_factors_uniformly_and_every_order_equally_often(monkeypatch):
    monkeypatch.setattr(transforms, "adjust_in_order", lambda pixels, factors, orders: (factors, orders))
    zeros, numbers = torch.zeros(NUMBER, 3, 1, 1), uniforms(random_bits(NUMBER), 5)
    factors, orders = transforms.jitter(zeros, numbers, (0.8, 0.4, 0.6, 0.2))
    for column, low, high in zip(factors.T.numpy(), (0.2, 0.6, 0.4, -0.2), (1.8, 1.4, 1.6, 0.2), strict=True):
        assert scipy.stats.kstest(column, "uniform", (low, high - low)).pvalue > 1e-4
    counts = orders.unique(dim=0, return_counts=True)[1].numpy()
    assert len(counts) == 24 and scipy.stats.chisquare(counts).pvalue > 1e-4


def within(share, probability, number):
    return abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / number)


def test_flips_jitter_and_grey_have_their_probabilities():
    number = 20_000
    # Left half black, right half white: mirrored exactly if flipped, whatever the colours do.
    image = torch.zeros(1, 3, 8, 8)
    image[..., 4:] = 1
    tan = augment(image, random_bits(number)[None], "tan", 0)[0]
    flipped = (tan[:, :, 0, 0] > tan[:, :, 0, -1]).all(1).double().mean().item()
    assert within(flipped, 0.5, number) and not within(flipped, 0.52, number)

    coloured = torch.tensor([0.5, 0.4, 0.6])[None, :, None, None].expand(1, 3, 20, 20)
    seen = augment(coloured, random_bits(number)[None], "tan", 2)[0, :, :, 0, 0]
    jittered = (seen != coloured[0, :, 0, 0]).any(1).double().mean().item()
    assert within(jittered, 0.3, number) and not within(jittered, 0.32, number)

    simclr = augment(coloured, random_bits(number)[None], "simclr")[0, :, :, 10, 10]
    grey = ((simclr - simclr.mean(1, keepdim=True)).abs() < 1e-6).all(1)
    assert within(grey.double().mean().item(), 0.2, number)
    unchanged = ((simclr - coloured[0, :, 0, 0]).abs() < 1e-5).all(1).double().mean().item()
    assert within(unchanged, 0.8 * 0.2, number)  # neither grey nor jittered


def test_half_of_simclrs_views_are_blurred_by_a_uniform_width(monkeypatch):
    sigmas, number = [], 20_000
    monkeypatch.setattr(transforms, "gaussian_blur", lambda pixels, sigma, radius: sigmas.append(sigma) or pixels)
    augment(torch.rand(1, 1, 20, 20), random_bits(number)[None], "simclr")
    sigma = torch.cat(sigmas).numpy()
    assert within(len(sigma) / number, 0.5, number)
    assert scipy.stats.kstest(sigma, "uniform", (0.1, 1.9)).pvalue > 1e-4
    assert scipy.stats.kstest(sigma, "uniform", (0.0, 2.0)).pvalue < 1e-4


@pytest.mark.parametrize("num_views", [1, 16, 50])
def test_words_are_those_of_the_library_s_chacha20_at_the_example_s_place(num_views):
    blocks = -(-num_views // 16)
    whole = Stream(KEY).uint32(300 * 16 * blocks).reshape(300, -1)
    indices = np.array([299, 0, 7, 7, 150])
    assert np.array_equal(ViewWords(KEY, num_views)[indices], whole[indices, :num_views])
    assert not np.array_equal(ViewWords(KEY[::-1], num_views)[indices], whole[indices, :num_views])
    assert ViewWords(KEY, num_views)[indices[:0]].shape == (0, num_views)
    far = Stream(KEY).words_at(8 * blocks * 2**29, 8 * blocks).view("<u4")[:num_views]
    assert np.array_equal(ViewWords(KEY, num_views)[np.array([5, 2**29])][1], far)


def test_views_are_those_of_the_words_of_all_examples():
    pixels, half = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8), (0.5,) * 3
    images = ImageSet(pixels, torch.arange(30), torch.ones(30, dtype=torch.bool), half, half)
    views, words, chosen = Views("crop_flip", 4, 2), ViewWords(KEY, 4), torch.tensor([28, 3, 3])
    of_all, _ = views.with_labels(images, chosen, words[np.arange(30)], torch.device("cpu"))
    of_chosen, labels = views.with_labels(images, chosen, words, torch.device("cpu"))
    assert torch.equal(of_all, of_chosen) and of_chosen.shape == (3, 4, 3, 8, 8) and labels.tolist() == [28, 3, 3]
