"""What a folder's names say: every layout is read as its owner means it, or refused by name."""

import json
import os
import shlex
import shutil
import unicodedata

import pytest

from sfumato.config import DataConfig
from sfumato.data.folders import Listing
from sfumato.data.layouts import list_images, with_groups
from sfumato.data.tables import column
from tests.data.conftest import quiet, refused


def listed(root, classes=None, **keys):
    return list_images(DataConfig(name="folder", classes=classes), root, quiet, **keys)


def grouped_by(pattern):
    return DataConfig(name="folder", group_by=pattern)


def names(files):
    return [item.name for item in files]


def test_every_kind_and_case_of_extension_is_found_in_the_order_of_names(tmp_path, write_image):
    kinds = ["a.PNG", "b.jpg", "c.JPEG", "d.bmp", "e.WebP", "f.tif", "g.TIFF", "h.jfif", "i.jpe"]
    write_image("dog/0.png", *(f"cat/{name}" for name in reversed(kinds)))
    found = listed(tmp_path / "images")
    assert names(found) == [f"cat/{name}" for name in kinds] + ["dog/0.png"]
    assert {item.label for item in found} == {"cat", "dog"} and {item.part for item in found} == {None}
    assert listed(tmp_path / "images") == found


def test_unicode_names_are_one_name_in_every_spelling(tmp_path, write_image):
    write_image(unicodedata.normalize("NFD", "Übung/Größe é.png"))
    write_image("猫/写真 1.png")
    found = listed(tmp_path / "images", ["Übung", "猫"])
    assert names(found) == ["Übung/Größe é.png", "猫/写真 1.png"] and found[0].path.exists()


def test_what_systems_leave_behind_is_left_out(two_classes):
    before = names(listed(two_classes))
    left = [".DS_Store", "cat/._00.png", "cat/Thumbs.db", "dog/desktop.ini", ".git/config", "__MACOSX/cat/x.png"]
    for name in left:
        path = two_classes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert names(listed(two_classes)) == before


@pytest.mark.parametrize("name", ["sub/anim.gif", "noextension"])
def test_a_file_of_an_unknown_kind_is_refused_by_name(two_classes, name):
    path = two_classes / "cat" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    refused(f"{path} is of no known kind", listed, two_classes)


def test_an_image_outside_a_listed_class_is_refused_by_name(two_classes, write_image):
    refused(r"dog/00.png does not lie in a folder of the classes cat, bird", listed, two_classes, ["cat", "bird"])
    write_image("stray.png")
    refused(r"stray.png does not lie directly in a class folder", listed, two_classes)


@pytest.mark.parametrize("part", ["", "train/"])
def test_an_empty_class_is_told_wherever_its_folder_is(tmp_path, write_image, part):
    write_image(f"{part}a/0.png", f"{part}b/0.png")
    (tmp_path / "images" / part / "bird").mkdir()
    refused("bird holds no image", listed, tmp_path / "images")


def test_parts_are_read_from_their_folders(tmp_path, write_image):
    write_image("train/cat/0.png", "train/dog/1.png", "valid/cat/2.png", "test/dog/3.png")
    expected = [("test", "dog"), ("train", "cat"), ("train", "dog"), ("valid", "cat")]
    assert [(item.part, item.label) for item in listed(tmp_path / "images")] == expected
    write_image("train/loose.png")
    refused("loose.png does not lie directly in a class folder", listed, tmp_path / "images")


SPELLINGS = ["Training train", "TRAIN train", "testing test", "Val valid", "Validation valid", "DEV valid"]


@pytest.mark.parametrize(
    ("spelling", "classes"), [*((spelling, None) for spelling in SPELLINGS), (SPELLINGS[0], ["cat", "dog"])]
)
def test_a_part_is_a_part_in_whatever_spelling(tmp_path, write_image, spelling, classes):
    """Training/ against Testing/ was a classifier once."""
    name, part = spelling.split()
    beside = "Test" if part == "train" else "Train"
    write_image(*(f"{folder}/{label}/0.png" for folder in (name, beside) for label in ("cat", "dog")))
    found = {(item.name.split("/")[0], item.part) for item in listed(tmp_path / "images", classes)}
    assert found == {(name, part), (beside, "test" if part == "train" else "train")}
    write_image("extra/cat/0.png")
    refused("/ beside extra/", listed, tmp_path / "images", classes)
    shutil.rmtree(tmp_path / "images" / "extra")
    write_image(f"{name.swapcase()}/cat/0.png")
    refused(f"which both mean {part}/", listed, tmp_path / "images", classes)


def test_only_to_be_scored_a_folder_needs_no_training_part(tmp_path, write_image):
    write_image("Testing/cat/0.png")
    refused("holds Testing/ but no train/", listed, tmp_path / "images")
    assert [item.part for item in listed(tmp_path / "images", ["cat"], needs_train=False)] == ["test"]


def test_a_class_may_be_called_like_a_part_if_images_lie_in_it_beside_other_classes_or_if_it_is_listed(
    tmp_path, write_image
):
    root = tmp_path / "images"
    write_image("dev/0.png", "Test/0.png", "ops/0.png")
    assert {item.label for item in listed(root)} == {"dev", "Test", "ops"}
    (root / "ops/0.png").rename(root / "dev/2.png")
    (root / "ops").rmdir()
    refused("holds Test/ but no train/.*data.classes", listed, root)
    assert {item.label for item in listed(root, ["dev", "Test"])} == {"dev", "Test"}


@pytest.mark.parametrize("folders", [("training_set", "test_set"), ("Train set", "petsTest")])
def test_folders_that_may_mean_parts_are_not_taken_for_classes(tmp_path, write_image, folders):
    write_image(*(f"{folder}/cat/0.png" for folder in folders))
    refused("parts or classes", listed, tmp_path / "images")
    for folder in folders:
        (tmp_path / "images" / folder / "cat" / "0.png").rename(tmp_path / "images" / folder / "0.png")
        (tmp_path / "images" / folder / "cat").rmdir()
    assert {item.label for item in listed(tmp_path / "images", list(folders))} == set(folders)


def test_links_to_files_are_followed_and_other_links_and_pipes_are_refused(two_classes, tmp_path):
    elsewhere = tmp_path / "elsewhere.png"
    shutil.copy(two_classes / "cat/00.png", elsewhere)
    (two_classes / "cat/link.png").symlink_to(elsewhere)
    assert "cat/link.png" in names(listed(two_classes))
    for make, path, message in (
        (lambda path: path.symlink_to(two_classes / "nowhere.png"), "cat/broken.png", "is a broken link"),
        (os.mkfifo, "cat/pipe.png", "is a broken link or no ordinary file"),
        (lambda path: path.symlink_to(two_classes / "cat"), "bird", "is a symbolic link to a folder"),
    ):
        make(two_classes / path)
        refused(f"{path} {message}", listed, two_classes)
        (two_classes / path).unlink()


def test_a_missing_folder_and_a_file_are_refused(tmp_path, write_image):
    for path, says in ((tmp_path / "nowhere", "nowhere does not exist"), (write_image("x.png"), "is not a folder")):
        refused(says, listed, path)


def test_groups_are_read_from_paths_or_refused(two_classes):
    files = listed(two_classes)
    found = with_groups(grouped_by(r"/(\d)\d\.png"), files, two_classes, quiet)
    assert [item.group for item in found[:12]] == ["0"] * 10 + ["1"] * 2
    for pattern, message in (
        ("(", "no regular expression"),
        ("cat", r"has no \(group\)"),
        ("group", r"has no \(group\)"),
        ("(cat)", "reads no group from dog/00.png"),
    ):
        refused(message, with_groups, grouped_by(pattern), files, two_classes, quiet)


@pytest.mark.parametrize("name", ["Patient (ID)", "PatientID", "group"])
def test_a_column_says_who_is_who_as_the_column_group_does(tmp_path, name):
    """Whole numbers are one person however programs write them, and what says nobody is refused."""
    config = DataConfig(name="folder", classes=["cat", "dog"], group_by=name)

    def people(cells):
        rows = []
        for place, cell in enumerate(cells):
            (tmp_path / f"{place}.png").touch()
            rows.append({"file_name": f"{place}.png", "label": ("cat", "dog")[place % 2], name: cell})
        (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return [file.group for file in with_groups(config, list_images(config, tmp_path, quiet), tmp_path, said.append)]

    said = []
    assert people([7, 7.0, "7", "x ", "x"]) == ["7", "7", "7", "x", "x"] and said == []
    assert people(["12", "12.0", "012", "13", "13"])[0] == "12"
    assert len(said) == 1 and ("12 / 12.0" in said[0]) is (name != "PatientID")  # which is named to nobody
    for cell in ("", None, "NaN", "none"):
        refused("reads no group from 2.png", people, ["7", "7", cell, "x", "x"])
    refused("Write a text or a whole number", people, ["7", "7", float("nan"), "x", "x"])


def test_files_without_a_group_are_counted_and_left_out_by_the_words_of_the_refusal(tmp_path, write_image):
    plain = [f"{label}/u{i}_{i}.png" for label in ("cat", "dog") for i in range(9)]
    lost = ["cat/IMG_0001 (1).png", "cat/IMG_2 (12).png", "dog/IMG_3 (4).png", "dog/[x]7.png"]
    root = write_image(*plain, *lost, "cat/old.bmp").parents[1]
    read = {"group_by": "(u[0-9]+)", "exclude": ["*.bmp"]}
    said = refused(r"\(4 of 22 files\)", Listing, DataConfig(name="folder", **read), root, quiet)
    assert "reads no group from cat/IMG_0001 (1).png, cat/IMG_2 (12).png, dog/IMG_3 (4).png and 1 more" in said
    words = shlex.split(said[said.index("--set") :])
    read["exclude"] = json.loads(words[1].removeprefix("data.exclude="))
    assert len(read["exclude"]) == 3
    lines = ["file,label", *(f"{name},{name[:3]}" for name in (*plain, *lost))]
    for table in (None, "\n".join(lines)):  # a table may still tell of them
        if table:
            (root / "labels.csv").write_text(table)
        found = Listing(DataConfig(name="folder", classes=["cat", "dog"], **read), root, quiet)
        assert names(found.files) == sorted(plain)
    whole = DataConfig(name="folder", group_by="(x)none", exclude=["*.bmp", "labels.csv"])
    refused(r"22 files\). Correct the expression, or rename the files", Listing, whole, root, quiet)


NAMES = ["a.png", "sub/b.png", "ü.png"]


@pytest.fixture
def table(tmp_path, write_image):
    """A folder of three images, without its labels.csv yet."""
    write_image(*NAMES)
    return tmp_path / "images"


def write_table(root, text, encoding="utf-8", name="labels.csv"):
    (root / name).write_text(text, encoding=encoding)


CLASSES = ["cat", "dog"]
GOOD = "file,label\na.png,cat\nsub/b.png,dog\nü.png,cat\n"


def test_a_table_gives_labels_and_groups(table):
    name = unicodedata.normalize("NFD", "ü.png")
    text = f'age,file,label,group\n7,sub/b.png,dog,"p,1"\n8,./a.png, cat ,p2\n\n9,{name},cat,p2\n'
    write_table(table, text, "utf-8-sig")  # as a spreadsheet saves it
    found = listed(table, CLASSES)
    assert names(found) == NAMES and {item.part for item in found} == {None}
    assert [(item.label, item.group) for item in found] == [("cat", "p2"), ("dog", "p,1"), ("cat", "p2")]
    assert with_groups(grouped_by("group"), found, table, quiet) == found
    lines = []
    assert {item.group for item in with_groups(grouped_by(None), found, table, lines.append)} == {None}
    assert any("groups are stated, and not used" in line for line in lines)
    write_table(table, text.replace(",p2\n\n", ",\n\n"))
    says = "reads no group from a.png .1 of 3 files.. Fill the group in"
    refused(says, with_groups, grouped_by("group"), listed(table, CLASSES), table, quiet)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_may_be_written_as_other_countries_spreadsheets_do(table, delimiter):
    rows = [["file", "label", ""], ["a.png", "cat", ""], ["sub/b.png", "a dog", "x"], ["", " ", ""], ["ü.png", "cat"]]
    write_table(table, "\r\n".join(delimiter.join(row) for row in rows), "utf-8-sig")
    assert [item.label for item in listed(table, CLASSES)] == ["cat", "a dog", "cat"]
    write_table(table, GOOD.replace("label", 'label,"notes (a; b; c; d)"').replace("cat\n", 'cat,"1; 2"\n'))
    assert [item.label for item in listed(table, CLASSES)] == ["cat", "dog", "cat"]


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"file_name": "a.png"}\n', "and one column 'label'"),
        ('{"file_name": "a.png", "label": {"a": 1}}\n', "line 1: label is .*Write a text"),
        ('["a.png", "cat"]\n', "line 1 is no JSON object"),
        ('{"file_name": "a.png", "label": "cat"\n', "line 1 is no JSON object"),
        ("[" * 100_000, "line 1 is no JSON object"),
        ('{"file_name": "../a.png", "label": "cat"}\n', "there is no image ../a.png"),
        (GOOD + "sub/../a.png,cat\n", "line 5: there is no image sub/../a.png"),
        (GOOD + "/etc/x.png,cat\n", "line 5: there is no image /etc/x.png"),
        (GOOD + "./a.png,cat\n", "line 5: ./a.png stands in line 2 already"),
        (GOOD + "c.png,cat\n", "line 5: there is no image c.png"),
        (GOOD.replace("sub/b.png,dog\n", ""), "b.png is not in .*labels.csv"),
        (GOOD.replace(",dog", ""), "line 3 has no label"),
        (GOOD.replace(",dog", ",1,5"), "line 3 has 3 cells, and the first line names 2 columns"),
        (GOOD.replace("file", "path"), "needs one column 'file'"),
        (GOOD.replace("file,label", "file,label,label"), "and one column 'label'"),
        (GOOD.replace("file,label", "file,label,group,group"), "and one column 'group'"),
        ("", "needs one column 'file'"),
        ("Image;Finding\na.png;cat\n", "in its first line, parted by commas, semicolons or tabs"),
        ('file,label\n"a.png,cat\n', "no CSV"),
    ],
)
def test_a_faulty_table_is_refused_by_line(table, text, message):
    (table / ("metadata.jsonl" if text[:1] in ("{", "[") else "labels.csv")).write_text(text, encoding="utf-8")
    refused(message, listed, table, CLASSES)


def test_a_table_in_another_encoding_and_two_tables_for_the_same_images_are_refused(table, write_image):
    write_table(table, GOOD, "latin-1")
    refused("no CSV in UTF-8", listed, table, CLASSES)
    write_table(table, GOOD)
    (table / "metadata.csv").write_text(HUGGING_FACE["metadata.csv"])
    refused("both give labels", listed, table, CLASSES)
    (table / "metadata.csv").unlink()
    write_image("train/1.png")  # they may give other labels, and nobody would see which are taken
    (table / "train" / "metadata.csv").write_text("file_name,label\n1.png,dog\n")
    refused("both give labels", listed, table, CLASSES)


def test_a_table_s_images_keep_the_parts_that_they_lie_in(tmp_path, write_image):
    lie_in = ["test/a.png", "train/b.png", "train/more/c.png", "valid/d.png"]
    write_image(*lie_in)
    root = tmp_path / "images"
    write_table(root, "file,label\n" + "".join(f"{name},cat\n" for name in lie_in))
    assert [item.part for item in listed(root, CLASSES)] == ["test", "train", "train", "valid"]
    (root / "valid").rename(root / "batch")
    write_table(root, (root / "labels.csv").read_text().replace("valid", "batch"))
    refused("beside batch/", listed, root, CLASSES)
    assert {item.part for item in listed(root, ["train", "test", "batch"])} == {None}
    (root / "batch/d.png").rename(root / "d.png")
    write_table(root, (root / "labels.csv").read_text().replace("batch/", ""))
    refused(r"d.png lies outside train/, valid/ and test/", listed, root, CLASSES)


HUGGING_FACE = {
    "metadata.csv": "file_name,label,text\na.png,cat,x\nsub/b.png,dog,y\nü.png,cat,z\n",
    "metadata.jsonl": '{"file_name": "a.png", "label": "cat"}\n\n'
    '{"label": "dog", "file_name": "sub/b.png", "box": [1]}\n'
    '{"file_name": "ü.png", "label": "cat"}\n',
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_s_image_folders_are_read(table, name):
    write_table(table, HUGGING_FACE[name], name=name)
    found = listed(table, CLASSES)
    assert names(found) == NAMES and [item.label for item in found] == ["cat", "dog", "cat"]


@pytest.mark.parametrize("kind", ["metadata.jsonl", "labels.csv"])
def test_a_label_may_be_a_number_and_a_table_may_lie_in_each_part(tmp_path, write_image, kind):
    for part, images in {"train": ["1.png", "2.png"], "test": ["deep/1.png"]}.items():
        lines = [] if kind == "metadata.jsonl" else ["file,label,group"]
        for number, name in enumerate(images):
            write_image(f"{part}/{name}")
            row = {"file_name": name, "label": number, "group": f"p{number}"}
            lines.append(json.dumps(row) if kind == "metadata.jsonl" else ",".join(map(str, row.values())))
        (tmp_path / "images" / part / kind).write_text("\n".join(lines))
    found = listed(tmp_path / "images", ["0", "1"])
    assert names(found) == ["test/deep/1.png", "train/1.png", "train/2.png"]
    assert [item.part for item in found] == ["test", "train", "train"]
    assert [item.label for item in found] == ["0", "0", "1"] and [item.group for item in found] == ["p0", "p0", "p1"]


def test_a_column_has_what_json_has(table):
    rows = [("a.png", True, 1.5), ("sub/b.png", False, None), ("ü.png", True, "x")]
    lines = [json.dumps({"file_name": name, "label": "cat", "ill": ill, "grade": grade}) for name, ill, grade in rows]
    (table / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert column(table, "ill", DataConfig(name="folder")) == {"a.png": "true", "sub/b.png": "false", "ü.png": "true"}
    assert column(table, "grade", DataConfig(name="folder")) == {"a.png": "1.5", "sub/b.png": "", "ü.png": "x"}


def test_a_column_says_which_part_an_image_belongs_to(tmp_path, write_image):
    """Test images were trained on once."""
    root = tmp_path / "images"
    write_image("a.png", "b.png", "c.png")
    write_table(root, "file,label,Split\na.png,x,Train\nb.png,y,val\nc.png,x,TEST\n")
    assert [item.part for item in listed(root, CLASSES)] == ["train", "valid", "test"]
    write_table(root, "file,label,split\na.png,x,Train\nb.png,y,fold 3\nc.png,x,TEST\n")
    refused("line 3: split 'fold 3' is none of train, valid, test", listed, root, CLASSES)
    (root / "train").mkdir()
    for name in ("a", "b", "c"):
        (root / f"{name}.png").rename(root / f"train/{name}.png")
    write_table(root, "file,label,split\ntrain/a.png,x,train\ntrain/b.png,y,test\ntrain/c.png,x,train\n")
    refused("line 3: train/b.png has split test and lies in train/", listed, root, CLASSES)
