"""A user's folder as a data set: what is held out, what is public, what the owner is told."""

import hashlib

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.config import DataConfig, PrivacyConfig, parse
from sfumato.data import decoding, layouts, listing
from sfumato.data.folders import decode_files, labelled_images
from sfumato.data.layouts import HELD_OUT_FRACTION, hash_fraction, hold_out, is_held_out
from sfumato.data.listing import ImageFile
from sfumato.data.loading import facts, list_for, load, load_for
from sfumato.data.store import FOR_OWNER
from sfumato.data.views import Views
from tests.data.conftest import quiet, refused


def config(**keys):
    return DataConfig(**({"name": "folder", "image_size": 12, "channels": 1} | keys))


def labelled(name, part=None, group=None):
    return ImageFile(None, name, (0, 0, 0), label="cat", part=part, group=group)


def split(files, which):
    """The names of each part."""
    return {part: [files[at].name for at in places] for part, places in layouts.split(files, which).items()}


def pixels(images, index):
    return images.integers(torch.tensor([index]))[0].to(torch.int32)


@pytest.fixture
def with_table(tmp_path, write_image):
    """Writes images 00.png, 01.png, ... with a table of their labels and groups, into a folder, which it gives."""

    def write(rows):
        write_image(*(f"{place:02}.png" for place in range(len(rows))))
        lines = [
            "file,label,group",
            *(f'{place:02}.png,{label},"{group}"' for place, (label, group) in enumerate(rows)),
        ]
        (tmp_path / "images" / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
        return tmp_path / "images"

    return write


def test_the_split_is_a_fixed_public_function_of_the_name():
    truth = int.from_bytes(hashlib.sha256(b"sfumato split 1\0test\0NORMAL/0.png").digest()[:6], "big") / 2**48
    assert hash_fraction("test", "NORMAL/0.png") == truth
    assert [i for i in range(12) if is_held_out("test", f"NORMAL/{i}.png")] == [3, 9]  # others would move users' images
    names = [f"a/{i}.png" for i in range(5000)]
    test, valid = (np.array([is_held_out(part, name) for name in names]) for part in ("test", "valid"))
    assert abs(test.mean() - HELD_OUT_FRACTION) < 0.02 and abs((test & valid).mean() - HELD_OUT_FRACTION**2) < 0.01
    kept, held_out = hold_out("x", 100, 20)
    assert sorted(kept + held_out) == list(range(100)) and len(held_out) == 20
    assert hold_out("x", 100, 20) == (kept, held_out) != hold_out("y", 100, 20)


@pytest.mark.parametrize("which", ["train", "train+valid"])
def test_adding_an_image_moves_no_other(which):
    names = [f"cat/{i}.png" for i in range(300)]
    before = split([labelled(name) for name in names], which)
    after = split([labelled(name) for name in ["cat/new.png", *names]], which)
    assert {part: [name for name in own if name != "cat/new.png"] for part, own in after.items()} == before
    assert sum(map(bool, before.values())) == (3 if which == "train" else 2) and sum(map(len, after.values())) == 301


def test_groups_never_straddle_and_are_hashed_instead_of_the_path():
    files = [labelled(f"p{i // 7}/{i}.png", group=f"p{i // 7}") for i in range(700)]
    groups = {part: {name.split("/")[0] for name in names} for part, names in split(files, "train").items()}
    assert groups["train"] | groups["valid"] | groups["test"] == {f"p{i}" for i in range(100)}
    assert sum(map(len, groups.values())) == 100 and all(groups.values())
    assert groups["test"] == {f"p{i}" for i in range(100) if is_held_out("test", f"p{i}")}


def test_a_group_on_both_sides_of_a_given_split_is_refused():
    both = [labelled(f"{part}/0.png", part, group) for part, group in (("train", "p"), ("valid", "p"), ("test", "q"))]
    assert len(split(both, "train+valid")["train"]) == 2  # here valid/ is trained on
    refused(r"one group has images on both sides: train/0.png \(train\) and valid/0.png", split, both, "train")
    both += [labelled(f"{part}/1.png", part, "r") for part in ("valid", "train")]
    refused("So have 1 more groups. Move all of a group", split, both, "train")


@pytest.mark.parametrize(
    "present, which, expected",
    [
        ("train valid test", "train+valid", {"train": "train valid", "test": "test"}),
        ("train valid test", "train", {"train": "train", "valid": "valid", "test": "test"}),
        ("train test", "train+valid", {"train": "train", "test": "test"}),
        ("train test", "train", {"train": "train", "valid": "train", "test": "test"}),
        *(("train valid", which, {"train": "train", "valid": "valid"}) for which in ("train+valid", "train")),
    ],
)
def test_given_parts_are_kept_and_what_is_not_held_out_is_by_hash(present, which, expected):
    parts = split([labelled(f"{part}/cat/{i}.png", part) for part in present.split() for i in range(30)], which)
    found = {part: {name.split("/")[0] for name in names} for part, names in parts.items() if names}
    assert found == {part: set(folders.split()) for part, folders in expected.items()}


def test_a_folder_with_valid_and_no_test_holds_out_valid_and_has_no_test_images(tmp_path, write_image):
    write_image(*(f"{'train' if n < 8 else 'val'}/{label}/{n}.png" for n in range(12) for label in ("cat", "dog")))
    for which in ("train", "train+valid"):
        data = load(config(split=which), tmp_path / "images", quiet)
        assert (len(data.train), len(data.held_out_files), data.held_out_name) == (16, 8, "valid")
    values = {"data": {"name": "folder", "path": str(tmp_path / "images"), "split": "train", "held_out": "test"}}
    refused("has valid/ but no test/. Add test/", load_for, parse(values), None, quiet)
    write_image(*(f"test/{label}/0.png" for label in ("cat", "dog")))
    lines = []
    load(config(split="train+valid"), tmp_path / "images", lines.append)
    assert any(line.startswith("24 images to train on, 8 of them in valid/ (cat 12, dog 12), 2 held") for line in lines)


def test_a_folder_of_classes_is_a_data_set(two_classes):
    lines = []
    dataset = load(config(), two_classes, lines.append)
    assert dataset.classes == ("cat", "dog") and dataset.held_out_name == "test" and dataset.train.shape == (1, 12, 12)
    names = [f"{label}/{i:02}.png" for label in ("cat", "dog") for i in range(30)]
    train = [name for name in names if not is_held_out("test", name)]
    assert len(dataset.train) == len(train) and len(dataset.held_out) == 60 - len(train) > 0
    for index, name in enumerate(train):
        truth = np.asarray(Image.open(two_classes / name)).astype(np.int32) * 257
        assert np.array_equal(pixels(dataset.train, index)[0], truth)
        assert dataset.classes[int(dataset.train.labels[index])] == name.split("/")[0]
    cats = sum(name.startswith("cat") for name in train)
    said = f"{len(train)} images to train on (cat {cats}, dog {len(train) - cats}), {60 - len(train)} held out as test"
    assert any(line.startswith(said) and "20%, by a fixed hash" in line for line in lines)
    assert any("public" in line and "cat, dog" in line for line in lines)
    assert dataset.train.mean == dataset.train.std == (0.5,)
    assert facts(config(), two_classes, quiet) == dataset.facts
    assert not any(path.suffix != ".png" for path in two_classes.rglob("*") if path.is_file())  # nothing beside them
    for name in ("README.txt", "LICENSE", "cat/readme.md"):
        (two_classes / name).write_text("x")
    assert load(config(), two_classes, lines.append).facts == dataset.facts
    assert "passed over: LICENSE, README.txt, cat/readme.md" in lines


def test_listed_classes_give_the_label_order_and_defaults_are_used(two_classes):
    dataset = load(DataConfig(name="folder", path=str(two_classes), classes=["dog", "cat"]), None, quiet)
    assert dataset.classes == ("dog", "cat") and dataset.train.labels[0] == 1  # "cat/..." comes first by name
    assert dataset.train.shape == (3, 32, 32) and dataset.train.integers().dtype == torch.uint8


def test_a_start_lists_the_folder_once(two_classes, monkeypatch):
    """Facts follow from the listing, and so does each split."""
    calls, walk = [], listing.os.walk
    monkeypatch.setattr(listing.os, "walk", lambda *given, **more: calls.append(given) or walk(*given, **more))
    recipe = parse({"data": {"name": "folder", "path": str(two_classes), "split": "train", "held_out": "test"}})
    listed = list_for(recipe, None, quiet)
    tuning, final = listed.load(), listed.load(on_test=True)
    assert len(calls) == 1 and listed.facts == tuning.facts == final.facts
    assert torch.equal(tuning.train.integers(), final.train.integers())
    assert (tuning.held_out_name, final.held_out_name) == ("valid", "test")
    whole = load(recipe.data.model_copy(update={"split": "train+valid"}), None, quiet)
    assert len(tuning.train) + len(tuning.held_out) == len(whole.train)
    assert torch.equal(final.held_out.integers(), whole.held_out.integers())


@pytest.mark.parametrize("held_out", [False, True])
def test_an_unreadable_image_is_named_keeps_its_place_and_counts_for_nothing(two_classes, held_out):
    whole = load(config(), two_classes, quiet)
    name = next(f"cat/{i:02}.png" for i in range(30) if is_held_out("test", f"cat/{i:02}.png") == held_out)
    (two_classes / name).write_bytes((two_classes / name).read_bytes()[:60])
    for _ in range(2):  # from the cache as well
        lines = []
        dataset = load(config(), two_classes, lines.append)
        assert sum(f"unreadable image {two_classes / name}" in line for line in lines) == 1
        before, part = (whole.held_out_files, dataset.held_out_files) if held_out else (whole.train, dataset.train)
        assert dataset.facts == whole.facts and torch.equal(part.labels, before.labels)
        assert part.readable.tolist() == [False] + [True] * (len(part) - 1)
        assert not pixels(part, 0).any() and torch.equal(pixels(part, 1), pixels(before, 1))
        assert len(dataset.held_out) == len(whole.held_out) - held_out and dataset.held_out.readable.all()


def test_an_empty_folder_is_refused_by_the_class_that_has_no_image(tmp_path):
    refused("class cat has no training image", load, config(classes=["cat", "dog"]), tmp_path, quiet)


def test_a_folder_of_nothing_but_damage_is_refused(two_classes):
    for path in two_classes.rglob("*.png"):
        path.write_bytes(b"x")
    refused("not one training image can be decoded", load, config(), two_classes, quiet)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"classes": ["cat", "dog", "bird"]}, "class bird has no training image"),
        ({"classes": ["cat", "dog", "dog"]}, "'dog' more than once"),
        ({"mean": [0.5, 0.5]}, "one finite number per channel"),
        ({"class_proportions": [0.3, 0.3]}, "class_proportions"),
        ({"class_proportions": [0.2, 0.3, 0.5]}, "one share for each of 2 classes"),
        ({"group_by": "group"}, "has no \\(group\\)"),
    ],
)
def test_a_recipe_that_does_not_fit_the_folder_is_refused_before_an_image_is_decoded(two_classes, keys, message):
    refused(message, facts, config(**keys), two_classes, quiet)


def test_one_class_and_no_folder_are_refused_and_classes_one_level_too_deep_pointed_at(
    tmp_path, two_classes, write_image, monkeypatch
):
    refused("does not lie directly in a class folder.*Take --data-root .*/images", load, config(), tmp_path, quiet)
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))  # meant for public data sets: a folder is asked for explicitly
    refused("--data-root FOLDER", load, config(), None, quiet)


def test_a_table_with_groups_is_a_data_set(with_table):
    root = with_table([("cat" if i % 3 else "dog", f"p{i // 4}") for i in range(60)])
    stated = {"classes": ["cat", "dog"]}
    dataset = load(config(group_by="group", **stated), root, quiet)
    assert dataset.classes == ("cat", "dog") and dataset.train.largest_group()[1] == 4
    assert not set(dataset.train.groups) & set(dataset.held_out.groups)
    assert set(dataset.train.groups) == {f"p{i}" for i in range(15) if not is_held_out("test", f"p{i}")}
    lines = []
    limited = load(config(group_by="group", **stated), root, lines.append, PrivacyConfig(max_images_per_person=3))
    count = len(limited.train), int(limited.train.readable.sum())
    assert count[0] > count[1] and any(
        f"{count[0]} images to train on, of which {count[1]} contr" in line for line in lines
    )
    assert limited.facts == dataset.facts and limited.train.largest_group()[1] == 3
    by_path = load(config(group_by=r"(\d)\d\.png", **stated), root, quiet)
    assert set(by_path.train.groups) | set(by_path.held_out.groups) == set("012345")


def test_images_to_classify_are_decoded_in_their_order_and_one_bad_file_stops_no_other(two_classes):
    (two_classes / "cat/01.png").write_bytes(b"x")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(two_classes / "cat/02.tiff")
    files = [two_classes / name for name in ("dog/07.png", "cat/00.png", "cat/01.png", "cat/02.tiff", "cat/03.png")]
    images, reasons = decode_files(files, image_size=12, channels=1, mean=(0.5,), std=(0.25,))
    assert images.readable.tolist() == [True, True, False, False, True]
    assert [reason is None for reason in reasons] == images.readable.tolist() and "32 bits" in reasons[3]
    for index in (0, 1, 4):
        truth = np.asarray(Image.open(files[index])) / 255
        np.testing.assert_allclose(images.batch(torch.tensor([index]))[0, 0], (truth - 0.5) / 0.25, atol=1e-5)


def test_classes_are_never_read_from_a_table_of_private_labels(with_table):
    rows = [("cat" if i % 3 else "dog", f"p{i}") for i in range(60)]
    rows[7] = ("hiv-positive", "p7")
    root = with_table(rows)
    refused(r"does not state the classes.*'hiv-positive'.*--set 'data.classes", facts, config(), root, quiet)
    refused("07.png has the label hiv-positive, which is not", facts, config(classes=["cat", "dog"]), root, quiet)
    assert load(config(classes=["cat", "dog", "hiv-positive"]), root, quiet).classes == ("cat", "dog", "hiv-positive")


def test_one_person_is_one_group_in_every_spelling_and_case_keeps_groups_apart(with_table):
    spellings, lines = ["Zo\u00eb K.", "Zoe\u0308 K.", " Zo\u00eb K. ", "ZO\u00cb K."], []
    assert not is_held_out("test", spellings[0])
    groups = [*spellings, *(f"p{i}" for i in range(4, 80))]
    root = with_table([("cat" if i % 2 else "dog", group) for i, group in enumerate(groups)])
    data = load(config(classes=["cat", "dog"], group_by="group"), root, lines.append)
    assert data.train.largest_group() == (spellings[0], 3)
    assert any("ZO\u00cb K. / Zo\u00eb K." in line and "different people" in line for line in lines)


def test_copies_of_an_image_are_counted_and_named_to_the_owner(two_classes):
    lines = []
    load(config(), two_classes, lines.append)
    assert not any("are copies of" in line for line in lines)
    train, held_out = (
        next(f"cat/{i:02}.png" for i in range(30) if is_held_out("test", f"cat/{i:02}.png") == side)
        for side in (False, True)
    )
    again = next(f"dog/a{i}.png" for i in range(99) if not is_held_out("test", f"dog/a{i}.png"))
    (two_classes / again).write_bytes((two_classes / train).read_bytes())
    for name in ("cat/broken-1.png", "cat/broken-2.png"):
        (two_classes / name).write_bytes(b"broken")
    load(config(), two_classes, lines.append)
    (line,) = [line for line in lines if "are copies of" in line]
    assert "after resizing: 1 (" in line and train in line and again in line
    bitmap = next(f"cat/b{i}.bmp" for i in range(99) if not is_held_out("test", f"cat/b{i}.bmp"))
    Image.open(two_classes / held_out).save(two_classes / bitmap)  # the same pixels in other bytes
    for _ in range(2):  # at each start
        lines.clear()
        load(config(), two_classes, lines.append)
        told = [line for line in lines if "held-out images that are copies of training images: 1 (" in line]
        assert len(told) == 1 and held_out in told[0] and bitmap in told[0] and again not in told[0]


def test_copies_of_one_person_concern_nobody_where_people_are_the_unit(two_classes):
    grouped = config(group_by="([0-9]+)[a-z]?[.]")
    (two_classes / "cat/00b.png").write_bytes((two_classes / "cat/00.png").read_bytes())
    person = PrivacyConfig(unit="person", max_images_per_person=9)
    told = {}
    for across in (False, True):
        if across:
            (two_classes / "cat/40.png").write_bytes((two_classes / "cat/00.png").read_bytes())
        for privacy in (None, PrivacyConfig(), person):
            lines = []
            load(grouped, two_classes, lines.append, privacy)
            told[across, privacy] = [line for line in lines if "files that are copies of" in line]
    assert told[False, person] == []
    (line,) = told[True, person]
    assert "after resizing: 1 (" in line and "cat/40.png" in line and "other groups" in line
    (line,) = told[True, PrivacyConfig()]
    assert "after resizing: 2 (" in line and "epsilon" in line
    assert ["epsilon" in line for across in (False, True) for line in told[across, None]] == [False, False]


def test_a_resize_ratio_is_kept_from_training_to_answers(two_classes):
    """What is seen is the centre of an image at 1.25 times the size, in training, scoring and answers alike."""
    wide = config(image_size=8, resize_ratio=1.25, channels=3)
    data = load(wide, two_classes, quiet)
    whole = load(config(image_size=10, channels=3), two_classes, quiet)
    rows = torch.arange(5)
    assert data.train.shape == (3, 8, 8) and facts(wide, two_classes, quiet) == data.facts
    assert torch.equal(data.train.batch(rows), whole.train.batch(rows)[:, :, 1:-1, 1:-1])
    views = Views("crop", 6, 4).of_bits(data.train, rows, torch.arange(30).view(5, 6) * 10**8, torch.device("cpu"))
    assert views.shape == (5, 6, 3, 8, 8) and not torch.equal(views[:, 0], views[:, 5])
    settings = {"image_size": 8, "channels": 3, "mean": data.train.mean, "std": data.train.std}
    files = [two_classes / f"cat/{i:02}.png" for i in range(30)]
    images, _ = decode_files(files, resize_ratio=1.25, **settings)
    scored, _ = labelled_images(two_classes, data.classes, data=wide, resize_ratio=1.25, report=quiet, **settings)
    assert images.shape == scored.shape == (3, 8, 8)
    assert torch.equal(images.batch(rows), scored.batch(rows))


@pytest.mark.parametrize("resize", ["crop", "pad", "stretch"])
def test_how_pictures_become_squares_is_kept_from_training_to_answers_and_much_loss_is_told(two_classes, resize):
    said, own = [], config(image_size=8, resize=resize, channels=3)
    wide = Image.fromarray(np.arange(48 * 16, dtype=np.uint16).reshape(16, 48) * 80)
    for number in range(7):
        wide.save(two_classes / f"cat/wide-{number}.png")
    Image.new("L", (20, 30), 9).save(two_classes / "cat/00.png")  # loses exactly a third
    (two_classes / "cat/broken.png").write_bytes(b"")
    for _ in range(2):  # at each start
        told = []
        data = load(own, two_classes, told.append)
        said.append([line for line in told if "that lose more than a third of their area" in line])
    first, files = torch.tensor([0]), [two_classes / "cat/wide-0.png"]
    settings = {"image_size": 8, "channels": 3, "mean": data.train.mean, "std": data.train.std}
    answered = decode_files(files, resize=resize, **settings)[0].batch(first)
    assert any(torch.equal(row, answered[0]) for row in data.train.batch(torch.arange(len(data.train))))
    assert torch.equal(answered, decode_files(files, **settings)[0].batch(first)) == (resize == "crop")
    assert said[0] == said[1] and len(said[0]) == (resize == "crop")
    if said[0]:
        assert "taken: 7 of 68" in said[0][0] and FOR_OWNER in said[0][0]


def test_a_look_before_a_run_sees_one_file_of_each_kind(two_classes, monkeypatch):
    Image.new("L", (48, 16)).save(two_classes / "cat/wide.bmp")
    seen, lines = [], []
    decode = decoding.decode_images
    monkeypatch.setattr(decoding, "decode_images", lambda files, **how: seen.extend(files) or decode(files, **how))
    facts(config(), two_classes, lines.append)
    assert sorted(file.name for file in seen) == ["cat/00.png", "cat/wide.bmp"]
    assert any("one of each kind of file looked at, that lose" in line and "taken: 1 of 2" in line for line in lines)


def test_a_folder_whose_values_stay_below_a_sixteenth_of_white_is_told(tmp_path, write_image):
    said = []
    for name in ("cat", "dog"):
        for number in range(30):
            path = tmp_path / "dark" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            values = np.random.default_rng(number).integers(0, 3000, (8, 8)).astype(np.uint16)
            Image.fromarray(values).save(path)
    load(config(channels=1), tmp_path / "dark", said.append)
    assert any("a sixteenth of white" in line for line in said)
