"""Words for views: of any examples, whatever else is drawn."""

import numpy as np
import pytest
import scipy.stats
import torch

from sfumato.data.images import ImageSet
from sfumato.data.views import Views, ViewWords
from sfumato.randomness import Stream

KEY = bytes(range(32))


@pytest.mark.parametrize("num_views", [1, 16, 50])
def test_words_are_those_of_the_library_s_chacha20_at_the_example_s_place(num_views):
    blocks = -(-num_views // 16)
    whole = Stream(KEY).uint32(300 * 16 * blocks).reshape(300, -1)
    indices = np.array([299, 0, 7, 7, 150])
    assert np.array_equal(ViewWords(KEY, num_views)[indices], whole[indices, :num_views])
    assert not np.array_equal(ViewWords(KEY[::-1], num_views)[indices], whole[indices, :num_views])
    assert ViewWords(KEY, num_views)[indices[:0]].shape == (0, num_views)


def test_words_do_not_depend_on_what_else_is_drawn():
    words = ViewWords(KEY, 8)
    drawn = np.random.default_rng(0).permutation(50_000)[:4_000]
    assert np.array_equal(words[drawn][17:40], words[drawn[17:40]])
    assert np.array_equal(words[np.array([2**31])], ViewWords(KEY, 8)[np.array([5, 2**31])][1:])


def test_words_are_uniform():
    words = ViewWords(KEY, 16)[np.arange(50_000)]
    assert words.dtype == np.uint32 and words.shape == (50_000, 16)
    for bits in (words >> 24, words & 0xFF):
        assert scipy.stats.chisquare(np.bincount(bits.ravel(), minlength=256)).pvalue > 1e-4
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / np.sqrt(32 * words.size)
    assert len(np.unique(words, axis=0)) == 50_000


def test_views_are_those_of_the_words_of_all_examples():
    pixels, half = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8), (0.5,) * 3
    images = ImageSet(pixels, torch.arange(30), torch.ones(30, dtype=torch.bool), half, half)
    views, words, chosen = Views("crop_flip", 4, 2), ViewWords(KEY, 4), torch.tensor([28, 3, 3])
    of_all, _ = views.with_labels(images, chosen, words[np.arange(30)], torch.device("cpu"))
    of_chosen, labels = views.with_labels(images, chosen, words, torch.device("cpu"))
    assert torch.equal(of_all, of_chosen) and of_chosen.shape == (3, 4, 3, 8, 8) and labels.tolist() == [28, 3, 3]
