import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.randomness import Stream, new_key
from sfumato.training import noise
from sfumato.training.noise import add_noise, standard_normal


def noise_of(count, stddev, **shapes):
    zeros = {name: torch.zeros(shape) for name, shape in (shapes or {"weight": (count,)}).items()}
    return add_noise(zeros, stddev, Stream(new_key()))


def normals(words):
    """Of one block: radii first, angles after."""
    return standard_normal(words.reshape(1, 2, -1)).reshape(-1)


@pytest.mark.parametrize("stddev", [0.3, 7.7])
def test_noise_has_the_claimed_scale_and_five_per_cent_more_or_less_would_be_seen(stddev):
    values = noise_of(100_000, stddev)["weight"].double()
    ratio = float(values.square().mean()) / stddev**2
    limit = 6 * np.sqrt(2 / 100_000)  # six standard errors of the mean square
    assert abs(ratio - 1) < limit
    assert abs(1.05**2 - 1) > 2 * limit and abs(0.95**2 - 1) > 2 * limit


def test_noise_is_normal_up_to_its_tails():
    values = normals(Stream(new_key()).uint64(1_000_000))
    assert stats.kstest(values, "norm").pvalue > 1e-6
    for threshold in (3.0, 4.0):
        expected = 2e6 * stats.norm.sf(threshold)
        assert abs((np.abs(values) > threshold).sum() - expected) < 6 * np.sqrt(expected)


@pytest.mark.parametrize("word", [0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_the_tails_reach_11_standard_deviations_and_are_finite_for_every_word(word):
    for second in (0, 1, (1 << 32) - 1):
        value = float(normals(np.array([word, second], dtype=np.uint64))[0])
        assert 0 <= value < 11.6
    smallest = float(normals(np.zeros(2, dtype=np.uint64))[0])
    assert 11.5 < smallest < 11.6


def test_both_words_give_all_of_their_bits():
    """The longest radii differ by the low bits of the angle's word; the angle has the high ones."""
    low = [float(normals(np.array([0, bits], dtype=np.uint64))[0]) for bits in range(5)]
    assert sorted(low, reverse=True) == low and len(set(low)) == 5
    high = [normals(np.array([1 << 62, bits << 62], dtype=np.uint64)) for bits in range(4)]
    quarters = [np.round(np.arctan2(float(value[1]), float(value[0])) / (np.pi / 2)) % 4 for value in high]
    assert quarters == [0, 1, 2, 3]


def test_a_radius_has_no_bit_of_its_angle():
    """Of the longest, where each of its lowest bits shows."""
    radii = [
        float(np.hypot(*normals(np.array([0, 5 + (angle << 32)], dtype=np.uint64))))
        for angle in (0, 1, 1 << 31, (1 << 32) - 1)
    ]
    assert radii == pytest.approx([np.sqrt(2 * (95 * np.log(2) - np.log(5.5)))] * 4, rel=1e-12)


def test_every_parameter_gets_noise_of_its_own_and_what_is_done_to_one_with_gradients_on_shows_in_no_other():
    shapes = {"weight": (100, 99), "bias": (101,), "scale": ()}
    with torch.no_grad():
        noisy = noise_of(0, 1.0, **shapes)
    assert {name: value.shape for name, value in noisy.items()} == shapes
    assert {value.dtype for value in noisy.values()} == {torch.float32}
    flat = torch.cat([value.flatten() for value in noisy.values()])
    assert len(flat.unique()) > 0.5 * len(flat)
    before = {name: value.clone() for name, value in noisy.items()}
    noisy["weight"].add_(torch.ones(100, 99, requires_grad=True), alpha=0.1)
    assert torch.equal(noisy["weight"].detach(), before["weight"] + 0.1) and noisy["scale"].equal(before["scale"])
    assert noisy["scale"].untyped_storage().nbytes() == 4


def test_the_same_stream_gives_the_same_noise_and_the_sum_is_added_to_it():
    stream = Stream(new_key())
    total = {"weight": torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 50}
    alone, with_sum = add_noise({"weight": torch.zeros(1000)}, 2.0, stream), add_noise(total, 2.0, stream)
    assert torch.allclose(with_sum["weight"] - alone["weight"], total["weight"], atol=2 * 2.0 / 4096)


def test_released_sums_lie_on_a_grid_so_that_low_bits_tell_nothing():
    grid = 2.0**1 / 4096
    total = {"weight": torch.rand(5000) * 1e-3}
    released = add_noise(total, 2.5, Stream(new_key()))["weight"].double()
    assert torch.equal(torch.round(released / grid) * grid, released)


def test_no_word_of_the_stream_serves_two_coordinates():
    """Every coordinate from words of its own: across pieces, blocks and the two halves of Box-Muller."""
    count = 3 * noise._PIECE + 5
    values = noise_of(count, 1.0)["weight"]
    assert len(values.unique()) > count / 20  # values lie on a grid
    for distance in (1, noise.BLOCK // 2, noise.BLOCK, noise._PIECE, 2 * noise._PIECE):
        a, b = values[distance:].double(), values[:-distance].double()
        for first, second in ((a, b), (a.square() - 1, b.square() - 1)):
            assert abs(float((first * second).mean())) < 6 * 2 / len(a) ** 0.5


@pytest.mark.parametrize("threads", [1, 5])
def test_neither_threads_nor_pieces_decide_which_noise_a_coordinate_gets(monkeypatch, threads):
    key, zeros = new_key(), {"weight": torch.zeros(200_001), "bias": torch.zeros(7)}
    expected = add_noise(zeros, 1.0, Stream(key))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(noise, "_PIECE", threads * noise.BLOCK)
    again = add_noise(zeros, 1.0, Stream(key))
    assert all(again[name].equal(expected[name]) for name in zeros)
