"""Public sets that are not here, by generated files of the same layout: real formats, few images."""

import dataclasses
import hashlib
import itertools
import pickle
import shutil

import numpy as np
import pytest
import torch
import torchvision
from scipy.io import loadmat, savemat

from sfumato.config import DataConfig, parse
from sfumato.data import catalogue
from sfumato.data.loading import load, load_for
from tests.data.conftest import encoded, quiet, refused


def small(monkeypatch, name, **facts):
    """The same set with other public numbers."""
    monkeypatch.setitem(catalogue.NAMED, name, dataclasses.replace(catalogue.NAMED[name], **facts))


def test_svhn_is_read_with_the_digit_zero_in_its_place_and_a_damaged_file_refused(tmp_path, monkeypatch):
    small(monkeypatch, "svhn", num_train=40, num_valid=10, num_test=20)
    rng, split_list = np.random.default_rng(0), {}
    for part, count in (("train", 40), ("test", 20)):
        pixels, path = rng.integers(0, 256, (32, 32, 3, count), dtype=np.uint8), tmp_path / f"{part}_32x32.mat"
        savemat(path, {"X": pixels, "y": (np.arange(count) % 10 + 1)[:, None]})
        split_list[part] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", split_list)
    dataset = load(DataConfig(name="svhn"), tmp_path, quiet)
    assert (len(dataset.train), len(dataset.held_out), dataset.classes[0]) == (40, 20, "0")
    held = loadmat(tmp_path / "train_32x32.mat")
    assert dataset.train.labels.tolist() == [int(label) % 10 for label in held["y"].ravel()]
    one = dataset.train.integers(torch.tensor([3]))[0]
    assert np.array_equal(one.permute(1, 2, 0).numpy(), held["X"][..., 3])
    tuning = load(DataConfig(name="svhn", split="train"), tmp_path, quiet)
    assert (len(tuning.train), len(tuning.held_out), tuning.held_out_name) == (30, 10, "valid")
    (tmp_path / "test_32x32.mat").write_bytes((tmp_path / "test_32x32.mat").read_bytes()[:500])
    refused("data set svhn in .* is damaged: Dataset not found", load, DataConfig(name="svhn"), tmp_path, quiet)


@pytest.fixture
def imagenet32(tmp_path, monkeypatch):
    small(monkeypatch, "imagenet32", num_train=100, num_valid=10, num_test=20)
    folder = tmp_path / "imagenet32"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in [(f"train_data_batch_{i}", 10) for i in range(1, 11)] + [("val_data", 20)]:
        held = {
            "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            "labels": [int(label) for label in rng.integers(1, 1001, count)],
            "mean": rng.random(3072),
        }
        (folder / name).write_bytes(pickle.dumps(held, protocol=5 if name == "val_data" else 2))
    return tmp_path


def test_imagenet_32_is_read_once_to_a_map_and_scaled_from_minus_one_to_one(imagenet32):
    lines = []
    dataset = load(DataConfig(name="imagenet32"), imagenet32, lines.append)
    assert len(lines) == 11 and len(dataset.train) == 100 and dataset.train.store is not None
    held = pickle.loads((imagenet32 / "imagenet32/train_data_batch_3").read_bytes())
    rows = dataset.train.integers(torch.arange(20, 30))
    assert np.array_equal(rows.flatten(1).numpy(), held["data"])
    assert dataset.train.labels[20:30].tolist() == [label - 1 for label in held["labels"]]
    batch = dataset.train.batch(torch.arange(100))
    assert -1 <= float(batch.min()) < -0.99 and 0.99 < float(batch.max()) <= 1
    lines.clear()
    again = load(DataConfig(name="imagenet32"), imagenet32, lines.append)
    assert not lines and torch.equal(again.train.labels, dataset.train.labels)
    part = load(DataConfig(name="imagenet32", split="train"), imagenet32, quiet)
    same = load(DataConfig(name="imagenet32", num_examples=90), imagenet32, quiet)
    assert torch.equal(part.train.integers(), same.train.integers())


@pytest.mark.parametrize(
    ("name", "like", "says"),
    [
        ("train_data_batch_7", "val_data", "its files hold 110 images to train on and 20 in val_data, not 100"),
        ("val_data", "train_data_batch_7", "and 10 in val_data, not 100 images to train on and 20"),
    ],
)
def test_imagenet_32_of_other_numbers_of_images_is_refused(imagenet32, name, like, says):
    shutil.copy(imagenet32 / "imagenet32" / like, imagenet32 / "imagenet32" / name)
    refused(says, load, DataConfig(name="imagenet32"), imagenet32, quiet)


class Runs:
    def __reduce__(self):
        return (print, ("run",))


class ForgedType:
    """With an object field, of which its state says that there is none: bytes become pointers."""

    def __reduce__(self):
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)


class Forged:
    def __reduce__(self):
        return np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (4,), ForgedType(), False, b"A" * 32)


def batch(**changed):
    return {"data": np.zeros((10, 3072), np.uint8), "labels": [1] * 10} | changed


CONTENTS = {
    "empty": b"",
    "call in a part": pickle.dumps({"data": Runs()}),
    "forged": pickle.dumps({"data": Forged(), "labels": [1]}, protocol=2),
    "objects": pickle.dumps(batch(data=np.array([[None]])), protocol=2),
    "floats": pickle.dumps(batch(data=np.full((10, 3072), 300.7)), protocol=2),
    "label 5000": pickle.dumps(batch(labels=[5000] * 10), protocol=2),
    "few labels": pickle.dumps(batch(labels=[1] * 9), protocol=2),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_pickle_that_would_run_code_or_is_damaged_is_refused(imagenet32, content, capsys):
    (imagenet32 / "imagenet32/train_data_batch_4").write_bytes(content)
    refused("train_data_batch_4 is damaged", load, DataConfig(name="imagenet32"), imagenet32, quiet)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("name", "size"), [("imagenet", 224), ("places365", 256)])
def test_sets_of_folders_are_decoded_once_and_bad_files_keep_their_place(tmp_path, monkeypatch, name, size):
    small(monkeypatch, name, num_train=12, num_valid=3 if name == "imagenet" else 0, num_test=4, classes=("1", "2"))
    home = tmp_path / catalogue.NAMED[name].folders[0]
    for place, (part, label) in enumerate(itertools.product(("train", "val"), ("n01", "n02"))):
        (home / part / label).mkdir(parents=True)
        for number in range(6 if part == "train" else 2):
            (home / part / label / f"{number}.JPEG").write_bytes(encoded([place, number], "JPEG", (40, 50, 3)))
    (home / "train/n02/3.JPEG").write_bytes((home / "train/n02/3.JPEG").read_bytes()[:100])
    lines = []
    config = DataConfig(name=name, image_size=48)
    dataset = load(config, tmp_path, lines.append)
    assert (len(dataset.train), len(dataset.held_out)) == (12, 4) and dataset.train.shape == (3, 48, 48)
    assert dataset.train.readable.tolist() == [index != 9 for index in range(12)]
    assert dataset.train.labels.tolist() == [0] * 6 + [1] * 6 and any("3.JPEG" in line for line in lines)
    assert load(DataConfig(name=name), tmp_path, quiet).train.shape == (3, size, size)
    values = {"data": {"name": name, "split": "train", "held_out": "test", "image_size": 48}}
    on_test = load_for(parse(values), tmp_path, quiet)
    assert len(on_test.train) == (9 if name == "imagenet" else 12) and on_test.held_out_name == "test"
    if name == "places365":
        refused("has no validation images", load, DataConfig(name=name, split="train"), tmp_path, quiet)
    (home / "val/n02").rename(home / "val/n00")  # its images would have the labels of others
    refused("has a folder n00/, which .* has not", load, config, tmp_path, quiet)
    (home / "val/n00").rename(home / "val/n02")
    (home / "val/n02/1.JPEG").unlink()
    refused("holds 3 images in 2 folders, not 4 in 2", load, config, tmp_path, quiet)
