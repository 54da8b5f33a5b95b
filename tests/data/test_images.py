import dataclasses

import pytest
import torch

from sfumato.config import DataConfig
from sfumato.data.examples import Dataset, check_proportions
from sfumato.data.images import ImageSet, normalisation
from tests.data.conftest import refused


def image_set(dtype=torch.uint8, channels=3, count=9, labels=None, groups=None):
    images = torch.randint(0, 256 if dtype == torch.uint8 else 65536, (count, channels, 8, 8)).to(dtype)
    labels = torch.arange(count) % 2 if labels is None else torch.tensor(labels)
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.5, 0.6, 0.7)[:channels]
    return ImageSet(
        images, labels, torch.ones(count, dtype=torch.bool), mean, std, 255 if dtype == torch.uint8 else 65535, groups
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_is_scaled_to_one_and_normalised_by_the_constants(dtype, channels):
    images = image_set(dtype, channels)
    indices = torch.tensor([3, 0, 3, 8])
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (images.mean, images.std))
    stored = torch.stack([images.stored[i].to(torch.float64) for i in indices.tolist()])
    batch = images.batch(indices)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch.double(), (stored / images.max_value - mean) / std, rtol=0, atol=1e-6)


def test_an_empty_batch_has_the_shape_of_one():
    assert image_set().batch(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 8, 8)


def test_an_image_in_a_batch_does_not_depend_on_the_others():
    images = image_set(count=40)
    whole = images.batch(torch.arange(40))
    for i in (0, 7, 39):
        assert torch.equal(images.batch(torch.tensor([i]))[0], whole[i])


def test_a_subset_keeps_order_flags_and_groups():
    images = image_set(torch.uint16, 1, groups=list("abcdefghi"))
    part = images.subset([5, 2])
    assert part.stored.dtype == torch.uint16 and part.groups == ["f", "c"]
    assert torch.equal(part.batch(torch.arange(2)), images.batch(torch.tensor([5, 2])))
    assert images.subset([]).batch(torch.tensor([], dtype=torch.int64)).shape == (0, 1, 8, 8)


def test_the_largest_group_is_named_with_its_size():
    assert image_set(groups=list("abacadaea")).largest_group() == ("a", 5)
    assert image_set().largest_group() is None


def test_facts_are_those_of_the_training_images():
    facts = Dataset("x", ("a", "b"), image_set(count=5), image_set(count=3), "test").facts
    assert (facts.num_examples, facts.num_classes, facts.image_size, facts.channels) == (5, 2, 8, 3)


@pytest.mark.parametrize(
    "mean, std", [([0.5], None), (None, [1.0]), ([0.1, 0.2, float("nan")], None), ([0.0, 0.0, float("inf")], None)]
)
def test_normalisation_needs_one_finite_number_per_channel(mean, std):
    refused("one finite number per channel", normalisation, mean, std, 3, ((0.5,) * 3, (0.5,) * 3))


def test_proportions_are_one_share_per_class():
    for shares in ([0.5], [0.3, 0.3], [0.5, 0.5, 0.5]):
        refused("class_proportions", check_proportions, DataConfig(name="folder", class_proportions=shares), 2)
    check_proportions(DataConfig(name="folder", class_proportions=[0.75, 0.25]), 2)
    check_proportions(DataConfig(name="folder"), 2)


@pytest.mark.parametrize("image_size", [None, 20])
def test_what_is_seen_of_a_larger_image_is_its_centre(image_size):
    images = image_set()
    whole = dataclasses.replace(images, image_size=image_size)
    side = (image_size or 8) - 4
    seen = dataclasses.replace(whole, crop=side)
    rows = torch.arange(9)
    assert seen.shape == (3, side, side)
    assert torch.equal(seen.batch(rows), whole.batch(rows)[:, :, 2:-2, 2:-2])
    assert torch.equal(seen.whole(rows), whole.batch(rows))
    assert list(seen.content()) != list(whole.content())  # another run
