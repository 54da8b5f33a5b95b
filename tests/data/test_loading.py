import hashlib
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR100

from sfumato.config import DataConfig, parse
from sfumato.data.catalogue import NAMED, Facts, public_facts
from sfumato.data.loading import facts, load, load_for
from tests.data.conftest import quiet, refused

LAYOUT = {
    "mnist": "MNIST/raw",
    "fashion_mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}


def real_data(name):
    root = Path(os.environ.get("SFUMATO_DATA", "/nonexistent"))
    if not (root / LAYOUT[name]).is_dir():
        pytest.skip(f"{name} is not there: SFUMATO_DATA names no folder with {LAYOUT[name]}")
    return root


@pytest.fixture(autouse=True)
def no_data_root(request, monkeypatch):
    if "real" not in request.node.name:
        monkeypatch.delenv("SFUMATO_DATA", raising=False)


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_the_real_files_give_what_the_public_facts_say(name):
    root = real_data(name)
    final, tuning = (load(DataConfig(name=name, split=split), root, quiet) for split in ("train+valid", "train"))
    for dataset, split in ((final, "train+valid"), (tuning, "train")):
        assert dataset.facts == public_facts(DataConfig(name=name, split=split))
        assert dataset.train.readable.all() and dataset.train.labels.bincount().min() > 40_000 / len(dataset.classes)
    assert (final.held_out_name, len(final.held_out)) == ("test", 10_000)
    assert (tuning.held_out_name, len(tuning.held_out)) == ("valid", 5_000)
    assert final.held_out.labels.bincount().max() < 12_000 / len(final.classes)
    # The published constants are those of the training images, to the digits that are printed.
    for channel, (mean, std) in enumerate(zip(final.train.mean, final.train.std, strict=True)):
        pixels, levels = final.train.integers()[:, channel].numpy().ravel(), np.arange(256) / 255
        counts = np.bincount(pixels, minlength=256) / len(pixels)
        assert abs(counts @ levels - mean) < 1e-4
        assert abs(np.sqrt(counts @ (levels - mean) ** 2) - std) < 1e-4
    # The validation images are training images, and no others.
    assert contents(tuning.train, tuning.held_out) == contents(final.train)


def digests(images, labels):
    rows = zip(images, labels, strict=True)
    return sorted(hashlib.sha256(image.tobytes() + bytes([label])).digest() for image, label in rows)


def contents(*parts):
    """All images with their labels, whatever their order."""
    return sorted(digest for part in parts for digest in digests(part.integers().numpy(), part.labels.tolist()))


def test_digits_are_split_without_overlap_and_the_same_each_time():
    configs = [DataConfig(name="digits", split=split) for split in ("train+valid", "train")]
    final, tuning = (load(config, None, quiet) for config in configs)
    assert (len(final.train), len(final.held_out), len(tuning.train), len(tuning.held_out)) == (1437, 360, 1150, 287)
    for config, dataset in zip(configs, (final, tuning), strict=True):
        assert dataset.facts == public_facts(config) == facts(config, None, quiet)
    bunch = load_digits()
    assert contents(final.train, final.held_out) == digests(bunch.images.astype(np.uint8), bunch.target.tolist())
    assert contents(tuning.train, tuning.held_out) == contents(final.train)
    assert torch.equal(load(DataConfig(name="digits"), None, quiet).train.integers(), final.train.integers())
    batch = final.train.batch(torch.arange(1437))
    assert batch.min() == -1 and batch.max() == 1


SPLITS = ["train", "train+valid"]


@pytest.mark.parametrize("split", SPLITS)
def test_a_smaller_portion_is_part_of_a_larger_and_the_held_out_images_stay(split):
    everything = load(DataConfig(name="digits", split=split), None, quiet)
    before: set = set()
    for count in (1, 100, 900, len(everything.train)):
        config = DataConfig(name="digits", split=split, num_examples=count)
        portion = load(config, None, quiet)
        assert len(portion.train) == count and portion.facts == public_facts(config) == facts(config, None, quiet)
        now = set(contents(portion.train))
        assert before <= now <= set(contents(everything.train)) and portion.held_out_name == everything.held_out_name
        assert contents(portion.held_out) == contents(everything.held_out)
        before = now
    assert torch.equal(portion.train.integers(), everything.train.integers())
    # De et al. (2022), Table 11: 1,271,167 images of ImageNet by number are those of its split.
    one, other = (load(DataConfig(name="digits", split=of, num_examples=100), None, quiet).train for of in SPLITS)
    assert torch.equal(one.integers(), other.integers()) and torch.equal(one.labels, other.labels)


def test_trained_on_train_and_measured_on_test():
    def asked(**data):
        return load_for(parse({"data": {"name": "digits", **data}}), None, quiet)

    plain, on_test = asked(split="train"), asked(split="train", held_out="test")
    assert torch.equal(plain.train.integers(), on_test.train.integers()) and on_test.held_out_name == "test"
    assert contents(on_test.held_out) == contents(asked().held_out) != contents(plain.held_out)
    assert asked(held_out="test").held_out_name == "test" and asked(split="train", held_out="valid")
    refused("images that are trained on", asked, held_out="valid")


def test_the_names_of_real_cifar100_classes_are_those_of_its_files():
    root = real_data("cifar100")
    assert tuple(CIFAR100(root).classes) == NAMED["cifar100"].classes  # which compares checksums first


@pytest.mark.parametrize(("split", "count"), [("train+valid", 1437), ("train", 1150)])
def test_more_images_than_there_are_are_refused_never_claimed(split, count):
    config = DataConfig(name="digits", split=split, num_examples=count + 1)
    for ask in (load, facts):
        refused(f"data.num_examples = {count + 1} is more than the {count} images", ask, config, None, quiet)


def test_the_images_of_a_folder_are_counted_never_stated(two_classes):
    given = DataConfig(name="folder", num_examples=20)
    for ask in (load, facts):
        refused("data.num_examples = 20 does not fit a folder", ask, given, two_classes, quiet)


def test_imagenet_has_public_numbers_and_fewer_images_are_refused(tmp_path):
    """De et al. 2022, Table 11: 10,000 of the 1,281,167 training images are for validation."""
    assert public_facts(DataConfig(name="imagenet")).num_examples == 1_281_167
    assert public_facts(DataConfig(name="imagenet", split="train")) == Facts(1_271_167, 1000, 224, 3)
    refused(f"{tmp_path}/imagenet/train is missing", load, DataConfig(name="imagenet"), tmp_path, quiet)


def test_every_name_that_a_recipe_may_have_and_no_other_has_public_facts():
    assert set(get_args(DataConfig.model_fields["name"].annotation)) == {*NAMED, "folder"}
    for name, named in NAMED.items():
        channels, size, _ = named.shape
        known = public_facts(DataConfig(name=name))
        assert known == Facts(named.num_train, len(named.classes), size, channels)
        assert public_facts(DataConfig(name=name, split="train")).num_examples == named.num_train - named.num_valid


def test_what_is_stated_of_a_named_set_must_be_true():
    stated = {"classes": [str(i) for i in range(10)], "image_size": 8, "channels": 1}
    assert load(DataConfig(name="digits", **stated), None, quiet).train.shape == (1, 8, 8)
    dataset = load(DataConfig(name="digits", mean=[0.25], std=[0.5]), None, quiet)
    assert dataset.train.mean == (0.25,) and dataset.train.batch(torch.arange(9)).max() == (1 - 0.25) / 0.5
    for key, value in (("classes", list("abcdefghij")), ("group_by", "(x)"), ("class_proportions", [1.0])):
        refused(f"data.{key}", load, DataConfig(name="digits", **{key: value}), None, quiet)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_files_are_named_with_the_remedy(name, tmp_path):
    refused(r"--data-root or the variable SFUMATO_DATA", load, DataConfig(name=name), None, quiet)
    refused(f"{tmp_path}/{LAYOUT[name]}.* is missing.*--data-root", load, DataConfig(name=name), tmp_path, quiet)


def write_idx(root):
    """Files in MNIST's form: sizes right, pixels zero."""
    folder = root / "MNIST/raw"
    folder.mkdir(parents=True)
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        size, shape = count.to_bytes(4, "big"), 2 * (28).to_bytes(4, "big")
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + size + shape + bytes(count * 784))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + size + bytes(count))
    return folder


def test_damaged_idx_files_are_named(tmp_path):
    folder = write_idx(tmp_path)
    images = folder / "train-images-idx3-ubyte"
    data = images.read_bytes()
    for damaged in (data[:-1], b"x" + data[1:]):
        images.write_bytes(damaged)
        refused(f"{images} is damaged", load, DataConfig(name="mnist"), tmp_path, quiet)


def test_damaged_real_cifar_batches_are_named_before_they_are_unpickled(tmp_path):
    folder, copy = real_data("cifar10") / LAYOUT["cifar10"], tmp_path / LAYOUT["cifar10"]
    copy.mkdir()
    for path in folder.iterdir():
        os.symlink(path, copy / path.name)
    content = (folder / "data_batch_3").read_bytes()
    (copy / "data_batch_3").unlink()
    (copy / "data_batch_3").write_bytes(content[:1000] + b"\0\1\2\3" + content[1004:])
    refused(f"cifar10 in {tmp_path} is damaged: Dataset not found", load, DataConfig(name="cifar10"), tmp_path, quiet)


def test_no_pickle_beside_the_images_is_read_in_their_place(tmp_path):
    """torchvision's own class of MNIST prefers files of an old format, pickles, where they are there."""
    write_idx(tmp_path)
    processed = tmp_path / "MNIST" / "processed"
    processed.mkdir()
    for name, count in (("training.pt", 60_000), ("test.pt", 10_000)):
        torch.save((torch.ones(count, 28, 28, dtype=torch.uint8), torch.ones(count).long()), processed / name)
    dataset = load(DataConfig(name="mnist"), tmp_path, quiet)
    assert not dataset.train.integers().any() and not dataset.held_out.labels.any()


def test_real_images_are_resized_and_grey_ones_made_colour():
    root = real_data("mnist")
    parsed = parse({"data": {"name": "mnist", "image_size": 64, "channels": 3, "num_examples": 100}})
    dataset = load(parsed.data, root, quiet)
    batch = dataset.train.batch(torch.arange(5))
    assert dataset.train.shape == batch.shape[1:] == (3, 64, 64) and dataset.facts.image_size == 64
    unit = batch * torch.tensor(dataset.train.std)[:, None, None] + torch.tensor(dataset.train.mean)[:, None, None]
    assert torch.equal(unit[:, 0], unit[:, 1]) and unit.min() > -1e-5 and unit.max() < 1 + 1e-5
    native = load(parse({"data": {"name": "mnist", "num_examples": 100}}).data, root, quiet)
    smaller = torch.nn.functional.adaptive_avg_pool2d(unit[:, :1], 4)
    truth = torch.nn.functional.adaptive_avg_pool2d(native.train.integers(torch.arange(5)) / 255, 4)
    assert (smaller - truth).abs().max() < 0.02
    assert torch.equal(dataset.train.batch(torch.tensor([3])), batch[3:4])
