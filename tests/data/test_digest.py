import dataclasses

import pytest
import torch

from sfumato.config import DataConfig
from sfumato.data import store
from sfumato.data.examples import Dataset, dataset_digest
from sfumato.data.images import ImageSet
from sfumato.data.loading import load


def make_dataset(num_train=6):
    """The first of ten images are trained on."""
    pixels = torch.randint(0, 256, (10, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels, readable, groups = torch.arange(10) % 2, torch.ones(10, dtype=torch.bool), [f"p{i}" for i in range(10)]
    images = ImageSet(pixels, labels, readable, (0.5,), (0.5,), groups=groups)
    train, held_out = images.subset(range(num_train)), images.subset(range(num_train, 10))
    return Dataset("folder", ("a", "b"), train, held_out, "test")


altered = dataclasses.replace


def one_pixel(images):
    pixels = images.integers().clone()
    pixels[3, 0, 4, 4] ^= 1
    return altered(images, stored=pixels, rows=None)


CHANGES = {
    "an image added": lambda s: s.subset([0, 1, 2, 3, 3]),
    "an image removed": lambda s: s.subset([0, 1, 2]),
    "two images swapped": lambda s: s.subset([0, 3, 2, 1]),
    "one bit of one pixel": one_pixel,
    "one label": lambda s: altered(s, labels=s.labels ^ (torch.arange(len(s)) == 1)),
    "one readable flag": lambda s: altered(s, readable=torch.arange(len(s)) != 2),
    "one group": lambda s: altered(s, groups=["q", *s.groups[1:]]),
    "no groups": lambda s: altered(s, groups=None),
    "the mean": lambda s: altered(s, mean=(0.25,)),
    "the scale": lambda s: altered(s, max_value=16),
    "the shape": lambda s: altered(s, stored=s.stored.view(-1, 1, 4, 16)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_data_changes_the_digest(change):
    dataset = make_dataset()
    dataset = dataclasses.replace(dataset, train=dataset.train.subset([0, 1, 2, 3]))
    for part in ("train", "held_out_files"):
        other = dataclasses.replace(dataset, **{part: CHANGES[change](getattr(dataset, part))})
        assert dataset_digest(other) != dataset_digest(dataset)


def test_names_change_the_digest_and_a_copy_does_not():
    dataset = make_dataset()
    first = dataset_digest(dataset)
    assert dataset_digest(make_dataset()) == first and len(first) == 64
    assert dataset_digest(dataclasses.replace(dataset, classes=("b", "a"))) != first
    assert dataset_digest(dataclasses.replace(dataset, held_out_name="valid")) != first


def test_an_image_that_moves_to_the_held_out_part_changes_the_fingerprint():
    assert dataset_digest(make_dataset(5)) != dataset_digest(make_dataset(6))


def test_a_held_out_image_that_cannot_be_read_is_covered_as_well():
    """Its place and its label are: another one that cannot be read would leave the same images to evaluate."""
    dataset = make_dataset()

    def with_unreadable(at, label):
        files = dataset.held_out_files
        is_it = torch.arange(len(files)) == at
        labels = torch.where(is_it, label, files.labels)
        changed = dataclasses.replace(files, readable=~is_it, labels=labels)
        return dataset_digest(dataclasses.replace(dataset, held_out_files=changed))

    assert with_unreadable(1, 0) != with_unreadable(1, 1)


def test_images_on_disk_have_the_digest_of_the_same_images_in_memory(two_classes):
    config = DataConfig(name="folder", image_size=12, channels=1)
    on_disk = load(config, two_classes, lambda line: None)
    with store.switched_off():
        in_memory = load(config, two_classes, lambda line: None)
    assert on_disk.train.store is not None and in_memory.train.store is None
    assert dataset_digest(on_disk) == dataset_digest(in_memory)
