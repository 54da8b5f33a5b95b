"""Images that a caller has in Python give what a folder of them gives."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import sfumato
from sfumato.evaluation.evaluate import calibrate
from tests.data.conftest import refused
from tests.training import faults

CLASSES = ["bars", "dots"]
COUNTS = {"train": 40, "test": 12}
SETTINGS = {
    "data.image_size": 16,
    "model.name": "small_cnn",
    "augmentation.augmult": 2,
    "augmentation.kind": "flip",
    "privacy.noise_multiplier": 1.0,
    "privacy.delta": 1e-3,
    "training.batch_size": 8,
    "training.num_steps": 4,
    "training.checkpoint_every": 1,
    "run.seed": 1,
}
STATED = SETTINGS | {"data.classes": CLASSES}


def made_up(part):
    """(N, 20, 20, 3), and labels: in the order in which a folder's names have them."""
    images = np.random.default_rng(len(part)).integers(0, 256, (COUNTS[part], 20, 20, 3), dtype=np.uint8)
    return images, [2 * place // COUNTS[part] for place in range(COUNTS[part])]


class Items(Dataset):
    """A map-style dataset of PIL images, which names its classes."""

    def __init__(self, part, classes=CLASSES):
        (self.images, self.labels), self.classes = made_up(part), classes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return Image.fromarray(self.images[index]), self.labels[index]


def hugging_face(part):
    import datasets

    images, labels = made_up(part)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    pictures = [Image.fromarray(image) for image in images]
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


def tensors(part):
    images, labels = made_up(part)
    return torch.from_numpy(images).movedim(3, 1), torch.tensor(labels)


def names(part):
    images, labels = made_up(part)
    return list(images), [CLASSES[label] for label in labels]


@pytest.fixture(scope="module")
def of_folder(tmp_path_factory):
    """The weights of a run on a folder."""
    root = tmp_path_factory.mktemp("images")
    for part in COUNTS:
        for place, (image, label) in enumerate(zip(*made_up(part), strict=True)):
            path = root / part / CLASSES[label] / f"{place:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    run = tmp_path_factory.mktemp("runs") / "folder"
    return weights(sfumato.train("image-folder", run, settings=SETTINGS, data_root=root))


def weights(result):
    claim = json.loads(Path(result.run, "privacy.json").read_text())
    return claim["weights_sha256"], result.accuracy, result.epsilon, result.num_examples


@pytest.mark.parametrize(
    ("form", "settings"), [(names, STATED), (tensors, STATED), (Items, SETTINGS), (hugging_face, SETTINGS)]
)
def test_each_form_gives_the_model_of_the_folder(tmp_path, of_folder, form, settings):
    run = tmp_path / "run"
    found = sfumato.train("image-folder", run, settings=settings, data=form("train"), test=form("test"))
    assert weights(found) == of_folder
    again = sfumato.resume(run, data=made_up("train"), test=made_up("test"))  # it is complete
    assert weights(again) == of_folder
    judged = sfumato.evaluate(run, form("test"))
    assert judged.accuracy == found.accuracy and judged.num_images == COUNTS["test"]


SLOW = {"training.num_steps": 24}


def train_slowly(run):
    sfumato.train("image-folder", run, settings=STATED | SLOW, data=made_up("train"), test=made_up("test"))


def test_a_run_that_was_killed_asks_for_the_same_object_and_ends_as_if_nothing_had_been(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    process = faults.fork(train_slowly, run)
    while not (run / "ledger.jsonl").exists() or len((run / "ledger.jsonl").read_text().splitlines()) < 5:
        time.sleep(0.02)
        assert process.is_alive()
    process.kill()
    process.join()
    images, labels = made_up("train")
    other = images.copy()
    other[3, 0, 0] ^= 255
    for data, why in (
        ((other, labels), "images"),
        ((images[:-1], labels[:-1]), "N|num_examples|images"),
        ((images[::-1], labels[::-1]), "images"),
    ):
        refused(why, sfumato.resume, run, data=data, test=made_up("test"))
    refused("in Python data=", sfumato.resume, run)
    found = sfumato.resume(run, data=names("train"), test=tensors("test"))
    undisturbed = sfumato.train("image-folder", whole, settings=STATED | SLOW, data=Items("train"), test=Items("test"))
    assert weights(found) == weights(undisturbed)


def pandas_shuffled(part):
    """A Series whose index says another order than its places."""
    import pandas

    images, labels = made_up(part)
    return images, pandas.Series(labels, index=range(len(labels))[::-1])


class TurnedRound(Items):
    """The same images and classes, numbered the other way."""

    def __init__(self, part):
        super().__init__(part, CLASSES[::-1])
        self.labels = [1 - label for label in self.labels]


def test_a_label_means_what_its_own_object_says_at_its_own_place(tmp_path, of_folder):
    """By names where the object names its classes, whatever their order; by places where an index says others."""
    for name, (train, test) in {"a": (Items, TurnedRound), "b": (TurnedRound, pandas_shuffled)}.items():
        run, given = tmp_path / name, {"data": train("train"), "test": test("test")}
        assert weights(sfumato.train("image-folder", run, settings=STATED, **given)) == of_folder
        judged = [sfumato.evaluate(run, form("test")).accuracy for form in (made_up, TurnedRound, pandas_shuffled)]
        assert set(judged) == {of_folder[1]}


def test_numbers_that_are_names_of_other_classes_are_refused(tmp_path):
    (images, labels), run, settings = made_up("train"), tmp_path / "run", SETTINGS | {"training.num_steps": 1}
    other, shifted = settings | {"data.classes": ["1", "2"]}, (images, [label + 1 for label in labels])
    refused("the number of '2'. Give names", sfumato.train, "image-folder", run, settings=other, data=shifted)
    sfumato.train("image-folder", run, settings=settings | {"data.classes": ["0", "1"]}, data=(images, labels))


def several(labels):
    """What of each image is there, in each of the ways that say so."""
    import datasets

    names = [[name for name, value in zip(CLASSES, row, strict=True) if value] for row in labels]
    numbers = [[place for place, value in enumerate(row) if value] for row in labels]
    images = [Image.fromarray(image) for image in made_up("train")[0]]
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.Sequence(datasets.ClassLabel(names=CLASSES))}
    )
    made = datasets.Dataset.from_dict({"image": images, "label": numbers}, features=kinds)
    return (images, np.array(labels)), (images, names), made


def test_several_labels_are_said_by_numbers_names_or_places(tmp_path):
    rng = np.random.default_rng(0)
    labels = [[1, int(rng.integers(2))] for _ in range(COUNTS["train"])]
    settings = STATED | {"data.task": "multilabel", "training.num_steps": 1}
    digests = set()
    for number, given in enumerate(several(labels)):
        sfumato.train("image-folder", tmp_path / str(number), settings=settings, data=given)
        digests.add((tmp_path / str(number) / "owner" / "images_sha256").read_text())
    assert len(digests) == 1


def test_images_that_were_trained_on_are_told_and_neither_published_nor_calibrated_on(tmp_path):
    run, told = tmp_path / "run", []
    images, labels = made_up("train")
    sfumato.train("image-folder", run, settings=STATED, data=(images, labels), test=made_up("test"))
    own = (np.concatenate([made_up("test")[0], images[:2]]), made_up("test")[1] + labels[:2])
    sfumato.evaluate(run, own, report=told.append)
    assert any("2 of these 14 images were trained on" in line for line in told)
    refused("2 of these 14 images were trained on", sfumato.evaluate, run, own, publish=True)
    refused("2 of these 14 images were trained on", calibrate, run, own)
    assert sfumato.evaluate(run, made_up("test"), publish=True).num_images == 12
    refused("give those to judge by", sfumato.evaluate, run)


@pytest.mark.parametrize(
    ("given", "settings", "why"),
    [
        ({"data": made_up("train")}, SETTINGS, "does not name its classes"),
        ({"data": iter([])}, STATED, "is no data set"),
        ({"data": ([], [])}, STATED, "holds no image"),
        ({"data": (made_up("train")[0], [0], [1, 2])}, STATED, "40 images, 1 labels, 2 groups"),
        ({"data": [3, 4]}, STATED, r"data\[0\] is no pair"),
        ({"data": {"image": [1], "label": [1]}}, STATED, "data of type dict is no data set"),
        ({"data": made_up("train")}, STATED | {"data.exclude": ["*.txt"]}, "data.exclude says nothing"),
        ({"data": (made_up("train")[0], [2] * 40)}, STATED, r"data\[0\] has the label 2, .* from 0 to 1"),
        ({"data": (made_up("train")[0] / 3, made_up("train")[1])}, STATED, r"data\[0\] is no image"),
        ({"data": made_up("train"), "data_root": "."}, STATED, "in the place of data_root"),
        ({"test": made_up("test")}, STATED, "test is given beside data"),
        ({"data": made_up("train")}, STATED | {"data.name": "digits"}, "images of their own"),
        ({"data": made_up("train")}, STATED | {"data.group_by": "group"}, r"data\[0\] does not say whose it is"),
        ({"data": (*made_up("train"), [1.0, float("nan")] * 20)}, STATED, r"data\[1\]: group is nan"),
        (
            {"data": (*made_up("train"), ["a", None] * 20)},
            STATED | {"data.group_by": "group"},
            r"reads no group from data\[",
        ),
        ({"data": made_up("train")}, STATED | {"data.group_by": "(.)"}, "stands in a third place"),
    ],
)
def test_what_is_no_data_set_is_refused_and_leaves_nothing(tmp_path, given, settings, why):
    refused(why, sfumato.train, "image-folder", tmp_path / "run", settings=settings, **given)
    assert not (tmp_path / "run").exists()


def people(part):
    return [f"{part}-{place // 3}" for place in range(COUNTS[part])]


class OfPeople(Items):
    def __init__(self, part):
        super().__init__(part)
        self.people = people(part)

    def __getitem__(self, index):
        return *super().__getitem__(index), self.people[index]


def test_people_are_told_in_a_third_place_as_a_table_tells_them(tmp_path):
    """Three images of each, which all count: a hash of each name decides which ones do not."""
    root, lines = tmp_path / "images", ["file,label,group"]
    for part in COUNTS:
        (root / part).mkdir(parents=True)
        for place, (image, label, person) in enumerate(zip(*made_up(part), people(part), strict=True)):
            Image.fromarray(image).save(root / part / f"{place:03}.png")
            lines.append(f"{part}/{place:03}.png,{CLASSES[label]},{person}")
    (root / "labels.csv").write_text("\n".join(lines))
    settings = STATED | {"data.group_by": "group", "privacy.unit": "person", "privacy.max_images_per_person": 3}
    forms = {
        "arrays": lambda part: (*made_up(part), people(part)),
        "numbers": lambda part: (*made_up(part), np.unique(people(part), return_inverse=True)[1] + 100.0 * len(part)),
        "dataset": OfPeople,
        "hugging face": lambda part: hugging_face(part).add_column("group", people(part)),
    }
    found = []
    for name, form in forms.items():
        given = {"data": form("train"), "test": form("test")}
        found.append(sfumato.train("image-folder", tmp_path / name, settings=settings, **given))
        assert sfumato.evaluate(tmp_path / name, form("test")).num_people == 4
    found.append(sfumato.train("image-folder", tmp_path / "table", settings=settings, data_root=root))
    assert len({(*weights(each), each.unit) for each in found}) == 1 and "one person" in found[0].unit


def test_without_a_test_part_some_are_held_out_by_their_indices_alone(tmp_path):
    result = sfumato.train("image-folder", tmp_path / "run", settings=STATED, data=made_up("train"))
    images, labels = made_up("train")
    again = sfumato.train("image-folder", tmp_path / "again", settings=STATED, data=(255 - images, labels))
    assert result.num_examples == again.num_examples < COUNTS["train"]
