"""Images as a network takes them, and the digest of all that a run depends on."""

from dataclasses import replace

import pytest
import torch

from sfumato.config import DataConfig
from sfumato.data import store
from sfumato.data.examples import Dataset, dataset_digest
from sfumato.data.images import ImageSet
from sfumato.data.loading import load
from tests.data.conftest import quiet


def image_set(dtype=torch.uint8, channels=3, count=9, groups=None):
    max_value, source = 255 if dtype == torch.uint8 else 65535, torch.Generator().manual_seed(0)
    images = torch.randint(0, max_value + 1, (count, channels, 8, 8), generator=source).to(dtype)
    labels, readable = torch.arange(count) % 2, torch.ones(count, dtype=torch.bool)
    mean, std = (0.1, 0.2, 0.3)[:channels], (0.5, 0.6, 0.7)[:channels]
    return ImageSet(images, labels, readable, mean, std, max_value, groups)


@pytest.mark.parametrize(("dtype", "channels"), [(torch.uint8, 3), (torch.uint16, 1)])
def test_a_batch_is_scaled_to_one_and_normalised_by_the_constants(dtype, channels):
    images = image_set(dtype, channels)
    indices = torch.tensor([3, 0, 3, 8])
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (images.mean, images.std))
    stored = torch.stack([images.stored[i].to(torch.float64) for i in indices.tolist()])
    batch = images.batch(indices)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch.double(), (stored / images.max_value - mean) / std, rtol=0, atol=1e-6)


def test_an_image_in_a_batch_does_not_depend_on_the_others():
    images = image_set(count=40)
    alone = [images.batch(torch.tensor([i])) for i in range(40)]
    assert torch.equal(images.batch(torch.arange(40)), torch.cat(alone))


def test_a_subset_keeps_order_flags_and_groups():
    images = image_set(torch.uint16, 1, groups=list("abcdefghi"))
    part = images.subset([5, 2])
    assert part.stored.dtype == torch.uint16 and part.groups == ["f", "c"]
    assert torch.equal(part.batch(torch.arange(2)), images.batch(torch.tensor([5, 2])))
    assert images.subset([]).batch(torch.tensor([], dtype=torch.int64)).shape == (0, 1, 8, 8)


@pytest.mark.parametrize("image_size", [None, 20])
def test_what_is_seen_of_a_larger_image_is_its_centre(image_size):
    images = image_set()
    whole = replace(images, image_size=image_size)
    side = (image_size or 8) - 4
    seen = replace(whole, crop=side)
    rows = torch.arange(9)
    assert seen.shape == (3, side, side)
    assert torch.equal(seen.batch(rows), whole.batch(rows)[:, :, 2:-2, 2:-2])
    assert torch.equal(seen.whole(rows), whole.batch(rows))
    assert list(seen.content()) != list(whole.content())  # another run


def make_dataset(num_train=6):
    """The first of ten images are trained on."""
    images = image_set(channels=1, count=10, groups=[f"p{i}" for i in range(10)])
    train, held_out = images.subset(range(num_train)), images.subset(range(num_train, 10))
    return Dataset("folder", ("a", "b"), train, held_out, "test")


def one_pixel(images):
    pixels = images.integers().clone()
    pixels[3, 0, 4, 4] ^= 1
    return replace(images, stored=pixels, rows=None)


CHANGES = {
    "an image added": lambda s: s.subset([0, 1, 2, 3, 3]),
    "an image removed": lambda s: s.subset([0, 1, 2]),
    "two images swapped": lambda s: s.subset([0, 3, 2, 1]),
    "one bit of one pixel": one_pixel,
    "one label": lambda s: replace(s, labels=s.labels ^ (torch.arange(len(s)) == 1)),
    "one readable flag": lambda s: replace(s, readable=torch.arange(len(s)) != 2),
    "one group": lambda s: replace(s, groups=[s.groups[1], *s.groups[1:]]),
    "no groups": lambda s: replace(s, groups=None),
    "the mean": lambda s: replace(s, mean=(0.25,)),
    "the scale": lambda s: replace(s, max_value=16),
    "the shape": lambda s: replace(s, stored=s.stored.view(-1, 1, 4, 16)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_data_changes_the_digest(change):
    dataset = make_dataset()
    dataset = replace(dataset, train=dataset.train.subset([0, 1, 2, 3]))
    for part in ("train", "held_out_files"):
        other = replace(dataset, **{part: CHANGES[change](getattr(dataset, part))})
        assert dataset_digest(other) != dataset_digest(dataset)


def test_names_change_the_digest_and_a_copy_does_not():
    dataset = make_dataset()
    first = dataset_digest(dataset)
    assert dataset_digest(make_dataset()) == first and len(first) == 64
    assert dataset_digest(replace(dataset, classes=("b", "a"))) != first
    assert dataset_digest(replace(dataset, held_out_name="valid")) != first
    assert dataset_digest(make_dataset(5)) != first  # an image moved to the held-out part


def test_a_held_out_image_that_cannot_be_read_is_covered_as_well():
    """Its place and its label are: another one that cannot be read would leave the same images to evaluate."""
    dataset = make_dataset()

    def with_unreadable(at, label):
        files = dataset.held_out_files
        is_it = torch.arange(len(files)) == at
        labels = torch.where(is_it, label, files.labels)
        changed = replace(files, readable=~is_it, labels=labels)
        return dataset_digest(replace(dataset, held_out_files=changed))

    assert with_unreadable(1, 0) != with_unreadable(1, 1)


def test_images_on_disk_have_the_digest_of_the_same_images_in_memory(two_classes):
    config = DataConfig(name="folder", image_size=12, channels=1)
    on_disk = load(config, two_classes, quiet)
    with store.switched_off():
        in_memory = load(config, two_classes, quiet)
    assert on_disk.train.store is not None and in_memory.train.store is None
    assert dataset_digest(on_disk) == dataset_digest(in_memory)
