import hashlib

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.config import DataConfig, parse
from sfumato.data import splitting
from sfumato.data.folders import decode_files, labelled_images
from sfumato.data.listing import ImageFile
from sfumato.data.loading import facts, load, load_for
from sfumato.data.splitting import HELD_OUT_FRACTION, hash_fraction, hold_out, is_held_out
from sfumato.data.views import Views
from sfumato.errors import InputError


def quiet(line):
    pass


def config(**keys):
    return DataConfig(**({"name": "folder", "image_size": 12, "channels": 1} | keys))


def labelled(name, part=None, group=None):
    return ImageFile(None, name, (0, 0, 0), label="cat", part=part, group=group)


def split(files, which):
    return {part: [files[place] for place in places] for part, places in splitting.split(files, which).items()}


def pixels(images, index):
    return images.integers(torch.tensor([index]))[0].to(torch.int32)


def test_the_split_is_a_fixed_public_function_of_the_name():
    truth = int.from_bytes(hashlib.sha256(b"sfumato split 1\0test\0NORMAL/0.png").digest()[:6], "big") / 2**48
    assert hash_fraction("test", "NORMAL/0.png") == truth
    assert [i for i in range(12) if is_held_out("test", f"NORMAL/{i}.png")] == [
        3,
        9,
    ]  # changed values would move users' images
    names = [f"a/{i}.png" for i in range(5000)]
    test = np.mean([is_held_out("test", name) for name in names])
    both = np.mean([is_held_out("test", name) and is_held_out("valid", name) for name in names])
    assert abs(test - HELD_OUT_FRACTION) < 0.02 and abs(both - HELD_OUT_FRACTION**2) < 0.01
    assert all(0 <= hash_fraction("test", name) < 1 for name in names)


def test_hold_out_is_exact_and_deterministic():
    kept, held_out = hold_out("x", 100, 20)
    assert sorted(kept + held_out) == list(range(100)) and len(held_out) == 20
    assert hold_out("x", 100, 20) == (kept, held_out) != hold_out("y", 100, 20)


@pytest.mark.parametrize("which", ["train", "train+valid"])
def test_adding_an_image_moves_no_other(which):
    names = [f"cat/{i}.png" for i in range(300)]
    before = {item.name: part for part, items in split([labelled(n) for n in names], which).items() for item in items}
    after = {
        item.name: part
        for part, items in split([labelled(n) for n in [*names, "cat/new.png"]], which).items()
        for item in items
    }
    assert {name: after[name] for name in names} == before and len(after) == 301
    assert len(set(before.values())) == (3 if which == "train" else 2)


def test_groups_never_straddle_and_are_hashed_instead_of_the_path():
    files = [labelled(f"cat/{i}.png", group=f"p{i // 7}") for i in range(700)]
    parts = split(files, "train")
    groups = {part: {item.group for item in items} for part, items in parts.items()}
    assert groups["train"] | groups["valid"] | groups["test"] == {f"p{i}" for i in range(100)}
    assert sum(map(len, groups.values())) == 100 and all(groups.values())
    assert groups["test"] == {f"p{i}" for i in range(100) if is_held_out("test", f"p{i}")}


def test_a_group_on_both_sides_of_a_given_split_is_refused():
    files = [labelled("train/cat/0.png", "train", "p1"), labelled("test/cat/1.png", "test", "p1")]
    with pytest.raises(
        InputError, match=r"group p1 has images on both sides: train/cat/0.png \(train\) and test/cat/1.png \(test\)"
    ):
        split(files, "train+valid")
    both = [
        labelled("train/cat/0.png", "train", "p1"),
        labelled("valid/cat/1.png", "valid", "p1"),
        labelled("test/cat/2.png", "test", "p2"),
    ]
    assert len(split(both, "train+valid")["train"]) == 2  # here valid/ is trained on
    with pytest.raises(InputError, match="both sides"):
        split(both, "train")


@pytest.mark.parametrize(
    "present, which, expected",
    [
        ("train valid test", "train+valid", {"train": "train valid", "test": "test"}),
        ("train valid test", "train", {"train": "train", "valid": "valid", "test": "test"}),
        ("train test", "train+valid", {"train": "train", "test": "test"}),
        ("train valid", "train+valid", {"train": "train", "valid": "valid"}),
        ("train valid", "train", {"train": "train", "valid": "valid"}),
    ],
)
def test_given_parts_are_kept(present, which, expected):
    parts = split([labelled(f"{part}/cat/{i}.png", part) for part in present.split() for i in range(30)], which)
    assert {part: {item.part for item in items} for part, items in parts.items() if items} == {
        k: set(v.split()) for k, v in expected.items()
    }


def test_what_the_folder_does_not_hold_out_is_held_out_by_hash():
    files = [labelled(f"{part}/cat/{i}.png", part) for part in ("train", "test") for i in range(200)]
    assert {item.part for item in split(files, "train")["valid"]} == {"train"} and len(
        split(files, "train")["test"]
    ) == 200


def test_a_folder_with_valid_and_no_test_holds_out_valid_and_has_no_test_images(tmp_path, write_image):
    for part, count in (("train", 8), ("val", 4)):
        for label in ("cat", "dog"):
            for number in range(count):
                write_image(f"{part}/{label}/{number}.png")
    for which in ("train", "train+valid"):
        data = load(config(split=which), tmp_path / "images", quiet)
        assert (len(data.train), len(data.held_out_files), data.held_out_name) == (16, 8, "valid")
    values = {"data": {"name": "folder", "path": str(tmp_path / "images"), "split": "train", "held_out": "test"}}
    with pytest.raises(InputError, match="has valid/ but no test/. Add test/"):
        load_for(parse(values), None, quiet)


def test_a_folder_of_classes_is_a_data_set(two_classes):
    lines = []
    dataset = load(config(), two_classes, lines.append)
    assert dataset.classes == ("cat", "dog") and dataset.held_out_name == "test" and dataset.shape == (1, 12, 12)
    names = [f"{label}/{i:02}.png" for label in ("cat", "dog") for i in range(30)]
    train = [name for name in names if not is_held_out("test", name)]
    assert len(dataset.train) == len(train) and len(dataset.held_out) == 60 - len(train) > 0
    for index, name in enumerate(train):
        truth = torch.from_numpy(np.asarray(Image.open(two_classes / name)).astype(np.int32)) * 257
        assert torch.equal(pixels(dataset.train, index)[0], truth)
        assert dataset.classes[int(dataset.train.labels[index])] == name.split("/")[0]
    cats = sum(name.startswith("cat") for name in train)
    said = f"{len(train)} images to train on (cat {cats}, dog {len(train) - cats}), {60 - len(train)} held out as test"
    assert any(line.startswith(said) and "20%, by a fixed hash" in line for line in lines)
    assert dataset.mean == dataset.std == (0.5,)
    assert facts(config(), two_classes, quiet) == dataset.facts


def test_adding_one_image_changes_the_training_set_by_that_image_alone(two_classes, write_image):
    before = load(config(), two_classes, quiet).train
    new = next(name for name in (f"cat/new{i}.png" for i in range(99)) if not is_held_out("test", name))
    write_image(new)
    after = load(config(), two_classes, quiet).train
    assert len(after) == len(before) + 1
    index = next(
        i for i in range(len(after)) if i == len(before) or not torch.equal(pixels(after, i), pixels(before, i))
    )
    rest = after.subset([i for i in range(len(after)) if i != index])
    assert torch.equal(rest.integers().to(torch.int32), before.integers().to(torch.int32)) and torch.equal(
        rest.labels, before.labels
    )


def test_listed_classes_give_the_label_order(two_classes):
    dataset = load(config(classes=["dog", "cat"]), two_classes, quiet)
    assert dataset.classes == ("dog", "cat") and dataset.train.labels[0] == 1  # "cat/..." comes first by name


def test_the_defaults_are_stated_and_used(two_classes):
    dataset = load(DataConfig(name="folder", path=str(two_classes)), None, quiet)
    assert dataset.shape == (3, 32, 32) and dataset.train.integers().dtype == torch.uint8


def test_an_unreadable_training_image_is_named_and_keeps_its_index(two_classes):
    whole = load(config(), two_classes, quiet)
    name = next(f"cat/{i:02}.png" for i in range(30) if not is_held_out("test", f"cat/{i:02}.png"))
    (two_classes / name).write_bytes((two_classes / name).read_bytes()[:60])
    lines = []
    dataset = load(config(), two_classes, lines.append)
    assert dataset.facts == whole.facts and torch.equal(dataset.train.labels, whole.train.labels)
    assert dataset.train.readable.tolist() == [False] + [True] * (len(whole.train) - 1)
    assert not pixels(dataset.train, 0).any() and torch.equal(pixels(dataset.train, 1), pixels(whole.train, 1))
    assert sum(f"unreadable image {two_classes / name}" in line for line in lines) == 1
    lines.clear()
    load(config(), two_classes, lines.append)
    assert sum(f"unreadable image {two_classes / name}" in line for line in lines) == 1  # from the cache as well


def test_an_unreadable_held_out_image_is_named_keeps_its_place_and_is_not_evaluated(two_classes):
    whole = load(config(), two_classes, quiet)
    name = next(f"cat/{i:02}.png" for i in range(30) if is_held_out("test", f"cat/{i:02}.png"))
    (two_classes / name).write_bytes(b"")
    lines = []
    dataset = load(config(), two_classes, lines.append)
    assert (
        len(dataset.held_out) == len(whole.held_out) - 1
        and dataset.held_out.readable.all()
        and len(dataset.train) == len(whole.train)
    )
    files, at = dataset.held_out_files, dataset.held_out_files.readable.tolist().index(False)  # all keep their places
    assert len(files) == len(whole.held_out_files) == len(whole.held_out) and files.readable.sum() == len(files) - 1
    others = torch.arange(len(files)) != at
    assert torch.equal(files.integers()[others], whole.held_out.integers()[others]) and torch.equal(
        files.labels, whole.held_out.labels
    )
    assert any(f"unreadable image {two_classes / name}" in line for line in lines)


def test_a_folder_of_nothing_but_damage_is_refused(two_classes):
    for path in two_classes.rglob("*.png"):
        path.write_bytes(b"x")
    with pytest.raises(InputError, match="not one training image can be decoded"):
        load(config(), two_classes, quiet)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"classes": ["cat", "dog", "bird"]}, "class bird has no training image"),
        ({"classes": ["cat", "dog", "dog"]}, "'dog' more than once"),
        ({"classes": ["cat"]}, "dog/00.png lies outside the classes cat"),
        ({"mean": [0.5, 0.5]}, "one finite number per channel"),
        ({"class_proportions": [0.2, 0.3, 0.5]}, "one share for each of 2 classes"),
        ({"group_by": "group"}, "has no \\(group\\)"),
    ],
)
def test_a_recipe_that_does_not_fit_the_folder_is_refused(two_classes, keys, message):
    with pytest.raises(InputError, match=message):
        load(config(**keys), two_classes, quiet)
    with pytest.raises(InputError, match=message):  # before an image is decoded, too
        facts(config(**keys), two_classes, quiet)


def test_one_class_and_no_folder_are_refused(tmp_path, write_image, monkeypatch):
    write_image("cat/0.png")
    with pytest.raises(InputError, match="two classes or more, not 1"):
        load(config(), tmp_path / "images", quiet)
    monkeypatch.setenv("SFUMATO_DATA", str(tmp_path))  # meant for public data sets: a folder is asked for explicitly
    with pytest.raises(InputError, match="--data-root FOLDER"):
        load(config(), None, quiet)


def test_a_table_with_groups_is_a_data_set(tmp_path, write_image):
    rows = ["file,label,group"]
    for i in range(60):
        write_image(f"{i:02}.png")
        rows.append(f"{i:02}.png,{'cat' if i % 3 else 'dog'},p{i // 4}")
    root = tmp_path / "images"
    (root / "labels.csv").write_text("\n".join(rows))
    stated = {"classes": ["cat", "dog"]}
    dataset = load(config(group_by="group", **stated), root, quiet)
    assert dataset.classes == ("cat", "dog") and dataset.train.largest_group()[1] == 4
    assert not set(dataset.train.groups) & set(dataset.held_out.groups)
    assert set(dataset.train.groups) == {f"p{i}" for i in range(15) if not is_held_out("test", f"p{i}")}
    lines = []
    ungrouped = load(config(**stated), root, lines.append)
    assert ungrouped.train.groups is None and any('column "group", which is not used' in line for line in lines)
    by_path = load(config(group_by=r"(\d)\d\.png", **stated), root, quiet)
    assert set(by_path.train.groups) | set(by_path.held_out.groups) == set("012345")
    with pytest.raises(InputError, match="07.png has the label cat, which is not in data.classes"):
        (root / "labels.csv").write_text(
            "\n".join([rows[0], rows[8]] + [row.replace("cat", "dog") for row in rows[1:8] + rows[9:]])
        )
        load(config(classes=["dog", "bird"]), root, quiet)


def test_split_train_holds_out_a_validation_part_of_the_training_part(two_classes):
    tuning = load(config(split="train"), two_classes, quiet)
    final = load(config(), two_classes, quiet)
    assert tuning.held_out_name == "valid"
    assert len(tuning.train) + len(tuning.held_out) == len(final.train)
    assert facts(config(split="train"), two_classes, quiet) == tuning.facts


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


def test_the_cache_is_no_part_of_the_result(two_classes, cache_home, monkeypatch):
    first = load(config(), two_classes, quiet)
    assert any((cache_home / "sfumato").iterdir())
    second = load(config(), two_classes, quiet)
    assert torch.equal(first.train.integers().to(torch.int32), second.train.integers().to(torch.int32))
    assert not any(
        path.suffix not in (".png",) for path in two_classes.rglob("*") if path.is_file()
    )  # nothing is written beside the images


def write_table(root, rows):
    (root / "labels.csv").write_text("\n".join(["file,label,group", *rows]), encoding="utf-8")


def test_a_table_s_test_images_are_held_out_and_no_other(tmp_path, write_image):
    names = [f"{part}/{i:02}.png" for part in ("train", "test") for i in range(20)]
    for name in names:
        write_image(name)
    write_table(tmp_path / "images", [f"{name},{'cat' if i % 2 else 'dog'}" for i, name in enumerate(names)])
    dataset = load(config(classes=["cat", "dog"]), tmp_path / "images", quiet)
    assert (len(dataset.train), len(dataset.held_out), dataset.held_out_name) == (20, 20, "test")
    truth = torch.from_numpy(np.asarray(Image.open(tmp_path / "images/test/03.png")).astype(np.int32)) * 257
    assert torch.equal(pixels(dataset.held_out, 3)[0], truth)


def test_classes_are_never_read_from_a_table_of_private_labels(tmp_path, write_image):
    for i in range(60):
        write_image(f"{i:02}.png")
    rows = [f"{i:02}.png,{'cat' if i % 3 else 'dog'},p{i}" for i in range(60)]
    rows[7] = "07.png,hiv-positive,p7"
    root = tmp_path / "images"
    write_table(root, rows)
    for ask in (load, facts):
        with pytest.raises(
            InputError, match=r"data.classes does not state the classes.*'hiv-positive'.*--set 'data.classes"
        ):
            ask(config(), root, quiet)
        with pytest.raises(InputError, match="07.png has the label hiv-positive, which is not in data.classes"):
            ask(config(classes=["cat", "dog"]), root, quiet)
    assert load(config(classes=["cat", "dog", "hiv-positive"]), root, quiet).classes == ("cat", "dog", "hiv-positive")


def test_folders_are_named_by_their_owner_who_is_told_that_their_names_are_public(two_classes):
    lines = []
    facts(config(), two_classes, lines.append)
    assert any("public" in line and "cat, dog" in line for line in lines)
    lines = []
    facts(config(classes=["cat", "dog"]), two_classes, lines.append)
    assert not any("cat, dog" in line for line in lines)


def test_one_person_is_one_group_in_every_spelling(tmp_path, write_image):
    rows, spellings = [], ["Zo\u00eb K.", "Zoe\u0308 K.", " Zo\u00eb K. "]
    assert not is_held_out("test", spellings[0])
    for i in range(80):
        write_image(f"{i:02}.png")
        rows.append(f'{i:02}.png,{"cat" if i % 2 else "dog"},"{spellings[i] if i < 3 else f"p{i}"}"')
    root = tmp_path / "images"
    write_table(root, rows)
    settings = {"classes": ["cat", "dog"], "group_by": "group"}
    assert load(config(**settings), root, quiet).train.largest_group() == ("Zo\u00eb K.", 3)


def test_case_keeps_groups_apart_and_the_owner_is_told(tmp_path, write_image):
    for label in ("cat", "dog"):
        for i in range(30):
            write_image(f"{label}/{'Pp'[i % 2]}{i // 2}-{i}.png")
    lines = []
    dataset = load(config(group_by="/(P?p?[0-9]+)-"), tmp_path / "images", lines.append)
    assert {"P1", "p1"} <= set(dataset.train.groups) | set(dataset.held_out.groups)
    assert any("P0 / p0" in line and "different people" in line for line in lines)


def test_copies_of_an_image_are_counted_and_named_to_the_owner(two_classes):
    lines = []
    load(config(), two_classes, lines.append)
    assert not any("are copies" in line for line in lines)
    original = two_classes / "cat/00.png"
    (two_classes / "dog/again.png").write_bytes(original.read_bytes())
    Image.open(original).save(two_classes / "cat/other-bytes.bmp")  # the same pixels
    (two_classes / "cat/broken-1.png").write_bytes(b"broken")
    (two_classes / "cat/broken-2.png").write_bytes(b"broken")
    load(config(), two_classes, lines.append)
    (line,) = [line for line in lines if "are copies" in line]
    assert "after resizing: 2 (" in line and all(
        name in line for name in ("cat/00.png", "dog/again.png", "cat/other-bytes.bmp")
    )


def test_a_resize_ratio_is_kept_from_training_to_answers(two_classes):
    """What is seen is the centre of an image at 1.25 times the size, in training, scoring and answers alike."""
    wide = config(image_size=8, resize_ratio=1.25, channels=3)
    data = load(wide, two_classes, quiet)
    whole = load(config(image_size=10, channels=3), two_classes, quiet)
    rows = torch.arange(5)
    assert data.shape == (3, 8, 8) and facts(wide, two_classes, quiet) == data.facts
    assert torch.equal(data.train.batch(rows), whole.train.batch(rows)[:, :, 1:-1, 1:-1])
    views = Views("crop", 6, 4).of_bits(data.train, rows, torch.arange(30).view(5, 6) * 10**8, torch.device("cpu"))
    assert views.shape == (5, 6, 3, 8, 8) and not torch.equal(views[:, 0], views[:, 5])
    settings = {"image_size": 8, "channels": 3, "mean": data.mean, "std": data.std}
    files = [two_classes / f"cat/{i:02}.png" for i in range(30)]
    images, _ = decode_files(files, resize_ratio=1.25, **settings)
    scored, _ = labelled_images(two_classes, data.classes, resize_ratio=1.25, report=quiet, **settings)
    assert images.shape == scored.shape == (3, 8, 8)
    assert torch.equal(images.batch(rows), scored.batch(rows))


def test_several_labels_of_one_image_are_refused_by_name(tmp_path, write_image):
    for number in range(4):
        write_image(f"{number}.png")
    rows = ["0.png,Mass", "1.png,Effusion", "2.png,Effusion|Mass", "3.png,Mass"]
    (tmp_path / "images/labels.csv").write_text("\n".join(["file,label", *rows]))
    with pytest.raises(InputError, match=r"2\.png has several labels \(Effusion\|Mass\)"):
        load(config(classes=["Effusion", "Mass"]), tmp_path / "images", quiet)


def test_notes_are_passed_over_with_one_line_and_other_files_are_not(two_classes):
    for name in ("README.txt", "LICENSE", "cat/readme.md"):
        (two_classes / name).write_text("x")
    lines = []
    assert load(config(), two_classes, lines.append).classes == ("cat", "dog")
    assert "passed over: LICENSE, README.txt, cat/readme.md" in lines
    (two_classes / "notes.docx").write_text("x")
    with pytest.raises(InputError, match="no known kind of image"):
        load(config(), two_classes, quiet)


def test_classes_one_level_too_deep_are_pointed_at(two_classes, tmp_path):
    two_classes.rename(tmp_path / "chest_xray")
    (tmp_path / "above").mkdir()
    (tmp_path / "chest_xray").rename(tmp_path / "above" / "chest_xray")
    with pytest.raises(InputError, match="or name .*above/chest_xray if cat, dog in it are the classes"):
        load(config(), tmp_path / "above", quiet)
