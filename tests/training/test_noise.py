import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.randomness import Stream, new_key
from sfumato.training.noise import add_noise, standard_normal, words_needed


def noise_of(count, stddev, **shapes):
    zeros = {name: torch.zeros(shape) for name, shape in (shapes or {"weight": (count,)}).items()}
    size = sum(value.numel() for value in zeros.values())
    return add_noise(zeros, stddev, Stream(new_key()).uint64(words_needed(size)))


@pytest.mark.parametrize("stddev", [0.3, 1.0, 7.7])
def test_noise_has_the_claimed_scale_and_five_per_cent_more_or_less_would_be_seen(stddev):
    values = noise_of(100_000, stddev)["weight"].double()
    ratio = float(values.square().mean()) / stddev**2
    limit = 6 * np.sqrt(2 / 100_000)  # six standard errors of the mean square
    assert abs(ratio - 1) < limit
    assert abs(1.05**2 - 1) > 2 * limit and abs(0.95**2 - 1) > 2 * limit


def test_noise_is_normal_up_to_its_tails():
    values = standard_normal(Stream(new_key()).uint64(1_000_000), 1_000_000).numpy()
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for threshold in (3.0, 4.0):
        expected = 2e6 * stats.norm.sf(threshold)
        assert abs((np.abs(values) > threshold).sum() - expected) < 6 * np.sqrt(expected)


@pytest.mark.parametrize("word", [0, 1, 1 << 63, (1 << 63) + 1, (1 << 63) - 1, (1 << 64) - 1])
def test_the_tails_reach_9_standard_deviations_and_are_finite_for_every_word(word):
    value = float(standard_normal(np.array([word, 0], dtype=np.uint64), 1))
    assert 0 <= value < 9.5
    smallest = float(standard_normal(np.zeros(2, dtype=np.uint64), 1))
    assert 9.3 < smallest < 9.5


def test_coordinates_are_independent_also_between_the_two_halves_of_box_muller():
    values = standard_normal(Stream(new_key()).uint64(200_000), 200_000).numpy()
    first, second = values[:100_000], values[100_000:]
    for a, b in ((first, second), (first**2, second**2), (values[1:], values[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(len(a))


def test_every_parameter_gets_noise_of_its_own():
    noisy = noise_of(0, 1.0, weight=(100, 99), bias=(101,))
    assert {name: tuple(value.shape) for name, value in noisy.items()} == {"weight": (100, 99), "bias": (101,)}
    assert all(value.dtype == torch.float32 for value in noisy.values())
    flat = torch.cat([value.flatten() for value in noisy.values()])
    assert len(flat.unique()) > 0.5 * len(flat)


def test_the_same_words_give_the_same_noise_and_the_sum_is_added_to_it():
    words = Stream(new_key()).uint64(1000)
    total = {"weight": torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 50}
    alone, with_sum = add_noise({"weight": torch.zeros(1000)}, 2.0, words), add_noise(total, 2.0, words)
    assert torch.allclose(with_sum["weight"] - alone["weight"], total["weight"], atol=2 * 2.0 / 4096)


def test_released_sums_lie_on_a_grid_so_that_low_bits_tell_nothing():
    grid = 2.0**1 / 4096
    total = {"weight": torch.rand(5000) * 1e-3}
    released = add_noise(total, 2.5, Stream(new_key()).uint64(5000))["weight"].double()
    assert torch.equal(torch.round(released / grid) * grid, released)
