"""ImageNet from its published archives, of the same layout and few images: the same data set as unpacked folders."""

import io
import shutil
import tarfile

import numpy as np
import pytest
import torch

from sfumato.config import DataConfig
from sfumato.data.catalogue import ARCHIVES, missing
from sfumato.data.loading import load
from tests.data.conftest import encoded, quiet, refused, tar_of
from tests.data.test_benchmarks import small

SYNSETS = ("n01440764", "n02102040")
CONFIG = DataConfig(name="imagenet", image_size=48)
TRAIN, VALIDATION = ARCHIVES.values()


def jpeg(number):
    return encoded(number, "JPEG", (40, 50, 3))


def kit():
    """As in the development kit: numbers in no order of synsets, and families of classes after the classes."""
    from scipy.io import savemat

    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    rows = [(1, SYNSETS[1], "collie", 0), (2, SYNSETS[0], "tench", 0), (3, "n00001740", "entity", 2)]
    file = io.BytesIO()
    savemat(file, {"synsets": np.array(rows, dtype=kinds)})
    return {"ILSVRC2012_validation_ground_truth.txt": b"2\n1\n1\n2\n", "meta.mat": file.getvalue()}


def validation_synset(number):
    return SYNSETS[0] if number in (1, 4) else SYNSETS[1]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Classes out of order in the archive, and images out of order in each."""
    small(monkeypatch, "imagenet", num_train=6, num_valid=2, num_test=4, classes=("1", "2"))
    home = tmp_path / "tars" / "imagenet"
    home.mkdir(parents=True)
    nested = {}
    for place, synset in reversed(list(enumerate(SYNSETS))):
        members = {f"{synset}_{number}.JPEG": jpeg(10 * place + number) for number in (7, 18, 2)}
        nested[f"{synset}.tar"] = tar_of(members.items())
    (home / TRAIN).write_bytes(tar_of(nested.items()))
    images = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(100 + number) for number in (3, 1, 2, 4)}
    (home / VALIDATION).write_bytes(tar_of(images.items()))
    rows = "".join(f"ILSVRC2012_val_{number:08d},{validation_synset(number)} 1 2 3 4 \n" for number in (4, 3, 1, 2))
    (home / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + rows)
    return home


def unpack(home, root):
    with tarfile.open(home / TRAIN) as outer:
        for member in outer:
            folder = root / "imagenet/train" / member.name.removesuffix(".tar")
            folder.mkdir(parents=True)
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                for image in inner:
                    (folder / image.name).write_bytes(inner.extractfile(image).read())
    with tarfile.open(home / VALIDATION) as tar:
        for member in tar:
            folder = root / "imagenet/val" / validation_synset(int(member.name[15:23]))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / member.name).write_bytes(tar.extractfile(member).read())


def same(one, other):
    pairs = (one.train, other.train), (one.held_out, other.held_out)
    seen = [[(part.integers(), part.labels, part.readable) for part in pair] for pair in pairs]
    return all(torch.equal(a, b) for pair in seen for a, b in zip(*pair, strict=True))


def test_archives_are_the_data_set_that_their_unpacked_folders_are(home, tmp_path):
    unpack(home, tmp_path / "folders")
    dataset = load(CONFIG, home.parent, quiet)
    assert len(dataset.train) == 6 and same(dataset, load(CONFIG, tmp_path / "folders", quiet))
    assert {path.name for path in home.iterdir()} == {TRAIN, VALIDATION, "LOC_val_solution.csv"}  # and no more


def test_one_part_may_be_unpacked_and_the_other_not(home, tmp_path):
    unpack(home, tmp_path / "folders")
    whole = load(CONFIG, home.parent, quiet)
    (home / VALIDATION).unlink()
    shutil.move(tmp_path / "folders/imagenet/val", home / "val")
    assert same(whole, load(CONFIG, home.parent, quiet))


@pytest.mark.parametrize("form", ["folder", "tar.gz"])
def test_the_development_kit_labels_as_the_table_does(home, form):
    by_table = load(CONFIG, home.parent, quiet)
    (home / "LOC_val_solution.csv").unlink()
    files = {f"ILSVRC2012_devkit_t12/data/{name}": content for name, content in kit().items()}
    if form == "folder":
        (home / "ILSVRC2012_devkit_t12/data").mkdir(parents=True)
        for name, content in files.items():
            (home / name).write_bytes(content)
    else:
        (home / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(tar_of(files.items(), "w:gz"))
    assert by_table.held_out.labels.tolist() == [0, 0, 1, 1]
    assert same(by_table, load(CONFIG, home.parent, quiet))


def test_an_image_with_damaged_bytes_keeps_its_place_and_is_named(home):
    whole, lines = load(CONFIG, home.parent, quiet), []
    content = (home / TRAIN).read_bytes()
    (home / TRAIN).write_bytes(content.replace(jpeg(7), bytes(len(jpeg(7)))))
    dataset = load(CONFIG, home.parent, lines.append)
    assert dataset.train.readable.tolist() == [True, True, False, True, True, True]
    assert dataset.train.labels.tolist() == whole.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert any("img_train.tar: train/n01440764/n01440764_7.JPEG" in line and "nothing" in line for line in lines)


@pytest.mark.parametrize("name", [TRAIN, VALIDATION])
def test_an_archive_that_is_cut_short_is_refused(home, name):
    content = (home / name).read_bytes()
    for end in (len(content) // 2, 5120, 0):
        (home / name).write_bytes(content[:end])
        refused(rf"{name}.* is cut short.* damaged.*Put the original archive", load, CONFIG, home.parent, quiet)


def test_a_class_that_is_cut_short_is_refused_by_its_name(home):
    with tarfile.open(home / TRAIN) as outer:
        nested = {member.name: outer.extractfile(member).read() for member in outer}
    whole, at = nested["n01440764.tar"], nested["n01440764.tar"].index(jpeg(2))
    for end in (at + 50, (at + len(jpeg(2)) + 511) // 512 * 512):  # within an image, and where a header would begin
        nested["n01440764.tar"] = whole[:end]
        (home / TRAIN).write_bytes(tar_of(nested.items()))
        refused(r"img_train.tar: n01440764.tar is cut short", load, CONFIG, home.parent, quiet)


TRAIN_FAULTS = {
    "a class is missing": ({"n01440764.tar": tar_of([("a.JPEG", jpeg(1))])}, "holds 1 images in 1 folders, not 6 in 2"),
    "no synset": ({"cats.tar": tar_of([("a.JPEG", jpeg(1))])}, "cats.tar is no archive of a class"),
    "no image": ({"n01440764.tar": tar_of([("a.txt", b"a")])}, "a.txt is no image"),
    "compressed": ({"n01440764.tar": tar_of([("a.JPEG", jpeg(1))], "w:gz")}, "n01440764.tar is cut short, damaged or"),
}


@pytest.mark.parametrize(("members", "words"), TRAIN_FAULTS.values(), ids=TRAIN_FAULTS.keys())
def test_an_archive_of_something_else_is_refused(home, members, words):
    (home / TRAIN).write_bytes(tar_of(members.items()))
    refused(words, load, CONFIG, home.parent, quiet)


TABLE, DEVKIT, HEAD = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12", "ImageId,PredictionString\n"
FAULTY_LABELS = [
    ({}, f"has no labels beside it. Put {TABLE}, {DEVKIT}.tar.gz or"),
    ({TABLE: HEAD + "ILSVRC2012_val_00000001,n01440764\n"}, "val_00000003.JPEG has no label"),
    ({TABLE: HEAD}, f"{TABLE} is damaged"),
    ({TABLE: "ImageId,Other\nILSVRC2012_val_00000003,n01440764\n"}, f"{TABLE} is damaged"),
    ({TABLE: HEAD + "ILSVRC2012_val_00000003,tench\n"}, "has no synset"),
    # A line too many somewhere would give all later images labels of others.
    ({"ILSVRC2012_validation_ground_truth.txt": b"2\n2\n1\n1\n2\n"}, "4 images, and there are labels of 5"),
    ({"ILSVRC2012_validation_ground_truth.txt": b"5\n"}, "devkit_t12.tar.gz is damaged"),
    ({"meta.mat": b"5\n"}, "devkit_t12.tar.gz is damaged"),
]


@pytest.mark.parametrize(("given", "words"), FAULTY_LABELS)
def test_labels_that_are_missing_or_damaged_are_refused(home, given, words):
    (home / TABLE).unlink()
    if TABLE in given:
        (home / TABLE).write_text(given[TABLE])
    elif given:
        members = {f"{DEVKIT}/data/{each}": content for each, content in {**kit(), **given}.items()}
        (home / f"{DEVKIT}.tar.gz").write_bytes(tar_of(members.items(), "w:gz"))
    refused(words, load, CONFIG, home.parent, quiet)


def test_archives_stand_in_the_place_of_folders_for_what_can_be_trained_here(home):
    assert missing("imagenet", home.parent) is None
    (home / VALIDATION).unlink()
    assert missing("imagenet", home.parent) == str(home / "val")
