import json
import os
import shutil
import unicodedata

import pytest

from sfumato.data.listing import find_images, find_labelled, group_name, with_groups
from sfumato.data.tables import column, has_groups, read_labels
from sfumato.errors import InputError


def names(files):
    return [item.file.name for item in files]


def write_table(root, text, encoding="utf-8"):
    (root / "labels.csv").write_text(text, encoding=encoding)


def test_every_kind_and_case_of_extension_is_found_in_the_order_of_names(tmp_path, write_image):
    kinds = ["a.PNG", "b.jpg", "c.JPEG", "d.bmp", "e.WebP", "f.tif", "g.TIFF", "sub/h.png"]
    for name in reversed(kinds):
        write_image(f"cat/{name}")
    write_image("dog/0.png")
    found = find_labelled(tmp_path / "images", None)
    assert names(found) == [f"cat/{name}" for name in kinds] + ["dog/0.png"]
    assert {item.label for item in found} == {"cat", "dog"} and {item.part for item in found} == {None}


def test_unicode_names_are_one_name_in_every_spelling(tmp_path, write_image):
    decomposed = unicodedata.normalize("NFD", "Übung/Größe é.png")
    write_image(decomposed)
    write_image("猫/写真 1.png")
    found = find_labelled(tmp_path / "images", ["Übung", "猫"])
    assert names(found) == ["Übung/Größe é.png", "猫/写真 1.png"] and found[0].file.path.exists()


def test_what_systems_leave_behind_is_left_out(two_classes, write_image):
    before = names(find_labelled(two_classes, None))
    for name in (
        ".DS_Store",
        "cat/.DS_Store",
        "cat/._00.png",
        "cat/Thumbs.db",
        "dog/desktop.ini",
        ".git/config",
        "__MACOSX/cat/x.png",
    ):
        path = two_classes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert names(find_labelled(two_classes, None)) == before


@pytest.mark.parametrize("name", ["cat/notes.txt", "cat/sub/notes.txt", "cat/anim.gif", "cat/noextension"])
def test_a_file_of_an_unknown_kind_is_refused_by_name(two_classes, name):
    path = two_classes / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with pytest.raises(InputError, match=f"{path} is of no known kind"):
        find_labelled(two_classes, None)


@pytest.mark.parametrize(
    "name, content", [("cat/x.dcm", b"x"), ("cat/x.DICOM", b"x"), ("cat/IM0001", b"\0" * 128 + b"DICM" + b"x")]
)
def test_dicom_is_refused_naming_the_conversion(two_classes, name, content):
    (two_classes / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} is DICOM.*dcmj2pnm"):
        find_labelled(two_classes, None)


def test_an_image_outside_a_listed_class_is_refused_by_name(two_classes, write_image):
    with pytest.raises(InputError, match=r"dog/00.png lies outside the classes cat, bird"):
        find_labelled(two_classes, ["cat", "bird"])
    write_image("stray.png")
    with pytest.raises(InputError, match=r"stray.png lies outside a class's folder"):
        find_labelled(two_classes, None)


def test_an_empty_class_folder_is_refused_by_name(two_classes):
    (two_classes / "bird").mkdir()
    with pytest.raises(InputError, match="bird holds no image"):
        find_labelled(two_classes, None)


def test_parts_are_read_from_their_folders(tmp_path, write_image):
    for name in ("train/cat/0.png", "train/dog/1.png", "valid/cat/2.png", "test/dog/3.png"):
        write_image(name)
    found = find_labelled(tmp_path / "images", None)
    assert [(item.part, item.label) for item in found] == [
        ("test", "dog"),
        ("train", "cat"),
        ("train", "dog"),
        ("valid", "cat"),
    ]
    write_image("train/loose.png")
    with pytest.raises(InputError, match="loose.png lies outside"):
        find_labelled(tmp_path / "images", None)


@pytest.mark.parametrize("other", ["vali", "unlabelled"])
def test_a_folder_beside_train_and_test_is_refused_rather_than_taken_as_a_class(tmp_path, write_image, other):
    for name in ("train/cat/0.png", "test/cat/1.png", f"{other}/cat/2.png"):
        write_image(name)
    with pytest.raises(InputError, match=f"beside {other}/"):
        find_labelled(tmp_path / "images", ["cat", "dog"])


SPELLINGS = [
    ("Training", "train"),
    ("TRAIN", "train"),
    ("Test", "test"),
    ("testing", "test"),
    ("Val", "valid"),
    ("Validation", "valid"),
    ("DEV", "valid"),
]


@pytest.mark.parametrize("name, part", SPELLINGS)
@pytest.mark.parametrize("classes", [None, ["cat", "dog"]])
def test_a_part_is_a_part_in_whatever_spelling(tmp_path, write_image, name, part, classes):
    """Training/ against Testing/ was a classifier once."""
    beside = "Test" if part == "train" else "Train"
    for folder in (name, beside):
        write_image(f"{folder}/cat/0.png")
        write_image(f"{folder}/dog/0.png")
    found = find_labelled(tmp_path / "images", classes)
    assert {(item.file.name.split("/")[0], item.part) for item in found} == {
        (name, part),
        (beside, "test" if part == "train" else "train"),
    }
    write_image("extra/cat/0.png")
    with pytest.raises(InputError, match="/ beside extra/"):
        find_labelled(tmp_path / "images", classes)
    shutil.rmtree(tmp_path / "images" / "extra")
    write_image(f"{name.upper()}ING/cat/0.png" if name == "Test" else f"{name.swapcase()}/cat/0.png")
    with pytest.raises(InputError, match=f"which both mean {part}/"):
        find_labelled(tmp_path / "images", classes)


def test_to_be_scored_a_folder_needs_no_training_part(tmp_path, write_image):
    write_image("Testing/cat/0.png")
    with pytest.raises(InputError, match="holds Testing/ but no train/"):
        find_labelled(tmp_path / "images", None)
    assert [item.part for item in find_labelled(tmp_path / "images", ["cat"], needs_train=False)] == ["test"]


def test_a_class_may_be_called_like_a_part_if_images_lie_in_it_beside_other_classes_or_if_it_is_listed(
    tmp_path, write_image
):
    for name in ("dev/0.png", "Test/0.png", "ops/0.png", "dev/deeper/1.png"):
        write_image(name)
    assert {item.label for item in find_labelled(tmp_path / "images", None)} == {"dev", "Test", "ops"}
    (tmp_path / "images" / "ops/0.png").rename(tmp_path / "images" / "dev/2.png")
    (tmp_path / "images" / "ops").rmdir()
    with pytest.raises(InputError, match="holds Test/ but no train/.*data.classes"):
        find_labelled(tmp_path / "images", None)
    assert {item.label for item in find_labelled(tmp_path / "images", ["dev", "Test"])} == {"dev", "Test"}


def test_a_class_whose_name_is_no_utf8_is_refused_and_a_file_is_not(tmp_path, write_image):
    write_image("cat/0.png")
    path = write_image("dog/0.png")
    path.rename(path.with_name("na\udcefve.png"))
    assert len(find_labelled(tmp_path / "images", None)) == 2
    path.parent.rename(tmp_path / "images" / "M\udcfcller")
    with pytest.raises(InputError, match=r"M\\udcfcller.*not UTF-8. Rename the folder"):
        find_labelled(tmp_path / "images", None)


def test_a_class_may_be_called_train_when_it_is_listed(tmp_path, write_image):
    write_image("train/0.png")
    write_image("tram/0.png")
    assert {item.label for item in find_labelled(tmp_path / "images", ["train", "tram"])} == {"train", "tram"}


def test_parts_without_train_are_refused(tmp_path, write_image):
    write_image("test/cat/0.png")
    with pytest.raises(InputError, match="no train/"):
        find_labelled(tmp_path / "images", None)


def test_links_to_files_are_followed_and_links_to_folders_are_refused(two_classes, tmp_path, write_image):
    elsewhere = tmp_path / "elsewhere.png"
    shutil.copy(two_classes / "cat/00.png", elsewhere)
    (two_classes / "cat/link.png").symlink_to(elsewhere)
    assert "cat/link.png" in names(find_labelled(two_classes, None))
    (two_classes / "bird").symlink_to(two_classes / "cat")
    with pytest.raises(InputError, match="bird is a symbolic link to a folder"):
        find_labelled(two_classes, None)


def test_a_broken_link_is_refused_by_name(two_classes):
    (two_classes / "cat/broken.png").symlink_to(two_classes / "nowhere.png")
    with pytest.raises(InputError, match="broken.png is a broken link"):
        find_labelled(two_classes, None)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_under_two_names_is_refused_since_it_would_count_twice(two_classes, link):
    link(two_classes / "cat/00.png", two_classes / "dog/again.png")
    with pytest.raises(InputError, match="one file under two names"):
        find_labelled(two_classes, None)


def test_a_pipe_is_refused_rather_than_waited_for(two_classes):
    os.mkfifo(two_classes / "cat/pipe.png")
    with pytest.raises(InputError, match="pipe.png is a broken link or no ordinary file"):
        find_images(two_classes)


def test_a_missing_folder_and_a_file_are_refused(tmp_path, write_image):
    with pytest.raises(InputError, match="nowhere does not exist"):
        find_images(tmp_path / "nowhere")
    with pytest.raises(InputError, match="x.png is not a folder"):
        find_images(write_image("x.png"))


def test_the_stamp_changes_with_the_file(two_classes):
    before = find_images(two_classes)
    path = two_classes / "cat/00.png"
    data, status = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + b"x")
    os.utime(
        path, ns=(status.st_atime_ns, status.st_mtime_ns)
    )  # the same size and modification time: the change time differs
    after = find_images(two_classes)
    assert after[0].stamp != before[0].stamp and after[1:] == before[1:]


def test_groups_are_read_from_paths(two_classes):
    found = with_groups(find_labelled(two_classes, None), r"/(\d)\d\.png")
    assert [item.group for item in found[:12]] == ["0"] * 10 + ["1"] * 2


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("(", "no regular expression"),
        ("cat", r"has no \(group\)"),
        ("group", r"has no \(group\)"),
        ("(cat)", "dog/00.png"),
    ],
)
def test_a_pattern_that_reads_no_group_is_refused(two_classes, pattern, message):
    with pytest.raises(InputError, match=message):
        with_groups(find_labelled(two_classes, None), pattern)


@pytest.fixture
def table(tmp_path, write_image):
    """A folder of three images, without its labels.csv yet."""
    for name in ("a.png", "sub/b.png", "ü.png"):
        write_image(name)
    return tmp_path / "images"


def test_a_table_gives_labels_and_groups(table):
    text = (
        'age,file,label,group\n7,sub/b.png,dog,"p,1"\n8,./a.png, cat ,p2\n\n9,'
        + unicodedata.normalize("NFD", "ü.png")
        + ",cat,p2\n"
    )
    write_table(table, text, "utf-8-sig")  # as a spreadsheet saves it
    found = read_labels(table, with_groups=True)
    assert [(item.file.name, item.label, item.group) for item in found] == [
        ("a.png", "cat", "p2"),
        ("sub/b.png", "dog", "p,1"),
        ("ü.png", "cat", "p2"),
    ]
    assert {item.group for item in read_labels(table, with_groups=False)} == {None}
    assert has_groups(table)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_may_be_written_as_other_countries_spreadsheets_do(table, delimiter):
    rows = [
        ["file", "label", ""],
        ["a.png", "cat", ""],
        ["sub/b.png", "a dog", "x"],
        ["", " ", ""],
        ["ü.png", "cat"],
        ["", "", ""],
    ]
    write_table(table, "\r\n".join(delimiter.join(row) for row in rows), "utf-8-sig")
    assert [item.label for item in read_labels(table, with_groups=False)] == ["cat", "a dog", "cat"]


GOOD = "file,label\na.png,cat\nsub/b.png,dog\nü.png,cat\n"


@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD + "sub/../a.png,cat\n", "line 5: sub/../a.png leads out"),
        (GOOD + "../a.png,cat\n", "line 5: ../a.png leads out"),
        (GOOD + "/etc/x.png,cat\n", "line 5: /etc/x.png leads out"),
        (GOOD + "./a.png,cat\n", "line 5: ./a.png stands in line 2 already"),
        (GOOD + "c.png,cat\n", "line 5: there is no image c.png"),
        (GOOD.replace("sub/b.png,dog\n", ""), "b.png is not in .*labels.csv"),
        (GOOD.replace(",dog", ","), "line 3 has no label"),
        (GOOD.replace(",dog", ""), "line 3 has no label"),
        (GOOD.replace("file", "path"), "needs one column 'file'"),
        (GOOD.replace("file,label", "file,label,label"), "and one column 'label'"),
        ("", "needs one column 'file'"),
        (
            "Image;Finding\na.png;cat\n",
            "and one column 'label' in its first line, parted by commas, semicolons or tabs",
        ),
        ('file,label\n"a.png,cat\n', "no CSV"),
    ],
)
def test_a_faulty_table_is_refused_by_line(table, text, message):
    write_table(table, text)
    with pytest.raises(InputError, match=message):
        read_labels(table, with_groups=False)


def test_a_table_in_another_encoding_or_without_groups_is_refused(table):
    write_table(table, GOOD, "latin-1")
    with pytest.raises(InputError, match="no CSV in UTF-8"):
        read_labels(table, with_groups=False)
    write_table(table, GOOD)
    assert not has_groups(table)
    with pytest.raises(InputError, match="and one column 'group'"):
        read_labels(table, with_groups=True)


def test_dicom_in_a_table_is_refused_as_well(table):
    (table / "x.dcm").write_bytes(b"x")
    write_table(table, GOOD + "x.dcm,cat\n")
    with pytest.raises(InputError, match="is DICOM"):
        read_labels(table, with_groups=False)


@pytest.mark.parametrize(
    "sign",
    "\u034f \ufe0f \U000e0100 \u180b \u180f \u115f \u3164 \uffa0 \u17b4 \u2800 \u2065 \ufff0 \U000e0fff \u200b".split(),
    ids=ascii,
)
def test_a_person_with_an_invisible_sign_in_the_name_is_the_same_person(sign):
    assert {group_name(text) for text in (f"An{sign}na", f"{sign}Anna", f"Anna{sign}")} == {"Anna"}
    assert group_name(f"An{sign} na") == "An na"


def test_all_that_unicode_calls_ignorable_is_dropped_whatever_its_category():
    """Categories Cf and Cc alone would leave 13 kinds of signs: marks, letters and code points kept for later."""
    signs = [*range(0xFE00, 0xFE10), *range(0xFFF0, 0xFFF9), *range(0xE0000, 0xE1000)]
    kept = [number for number in signs if group_name(chr(number))]
    assert kept == []
    assert [group_name(sign) for sign in ("\ufffd", "\ufe10", "\u10ff", "e\u0301")] == [
        "\ufffd",
        "\ufe10",
        "\u10ff",
        "\u00e9",
    ]


def test_a_table_s_images_keep_the_parts_that_they_lie_in(tmp_path, write_image):
    names = ["test/a.png", "train/b.png", "train/more/c.png", "valid/d.png"]
    for name in names:
        write_image(name)
    root = tmp_path / "images"
    write_table(root, "file,label\n" + "".join(f"{name},cat\n" for name in names))
    assert [item.part for item in read_labels(root, with_groups=False)] == ["test", "train", "train", "valid"]
    (root / "valid").rename(root / "batch")
    write_table(root, (root / "labels.csv").read_text().replace("valid", "batch"))
    with pytest.raises(InputError, match="beside batch/"):
        read_labels(root, with_groups=False)
    assert {item.part for item in read_labels(root, with_groups=False, classes=["train", "test", "batch"])} == {None}
    (root / "batch/d.png").rename(root / "d.png")
    write_table(root, (root / "labels.csv").read_text().replace("batch/", ""))
    with pytest.raises(InputError, match=r"d.png lies outside train/, valid/ and test/"):
        read_labels(root, with_groups=False)
    for part, other in (("train", "Training"), ("test", "Testing")):
        (root / part).rename(root / other)
        write_table(root, (root / "labels.csv").read_text().replace(f"{part}/", f"{other}/"))
    (root / "d.png").rename(root / "Testing/d.png")
    write_table(root, (root / "labels.csv").read_text().replace("\nd.png", "\nTesting/d.png"))
    assert [item.part for item in read_labels(root, with_groups=False)] == ["test", "test", "train", "train"]


HUGGING_FACE = {
    "metadata.csv": "file_name,label,text\na.png,cat,x\nsub/b.png,dog,y\nü.png,cat,z\n",
    "metadata.jsonl": '{"file_name": "a.png", "label": "cat"}\n\n'
    '{"label": "dog", "file_name": "sub/b.png", "box": [1]}\n'
    '{"file_name": "ü.png", "label": "cat"}\n',
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_s_image_folders_are_read(table, name):
    (table / name).write_text(HUGGING_FACE[name], encoding="utf-8")
    found = read_labels(table, with_groups=False)
    assert [(item.file.name, item.label) for item in found] == [
        ("a.png", "cat"),
        ("sub/b.png", "dog"),
        ("ü.png", "cat"),
    ]
    assert not has_groups(table)


def test_a_label_may_be_a_number_and_a_table_may_lie_in_each_part(tmp_path, write_image):
    rows = {"train": ["1.png", "2.png"], "test": ["deep/1.png"]}
    for part, names in rows.items():
        for name in names:
            write_image(f"{part}/{name}")
        lines = [
            f'{{"file_name": "{name}", "label": {number}, "group": "p{number}"}}' for number, name in enumerate(names)
        ]
        (tmp_path / "images" / part / "metadata.jsonl").write_text("\n".join(lines))
    found = read_labels(tmp_path / "images", with_groups=True)
    assert [(item.file.name, item.label, item.part, item.group) for item in found] == [
        ("test/deep/1.png", "0", "test", "p0"),
        ("train/1.png", "0", "train", "p0"),
        ("train/2.png", "1", "train", "p1"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file_name": "a.png"}\n', "line 1 has no label|and one column 'label'"),
        ('{"file_name": "a.png", "label": true}\n', "line 1 has no label"),
        ('["a.png", "cat"]\n', "line 1 is no JSON object"),
        ('{"file_name": "a.png", "label": "cat"\n', "line 1 is no JSON object"),
        ('{"file_name": "../a.png", "label": "cat"}\n', "leads out of the folder"),
        ('{"file_name": "a.png", "label": "cat"}\n', "is not in .*metadata.jsonl"),
    ],
)
def test_a_faulty_json_table_is_refused_by_line(table, text, message):
    (table / "metadata.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read_labels(table, with_groups=False)


def test_a_column_has_what_json_has(table):
    rows = [("a.png", True, 1.5), ("sub/b.png", False, None), ("ü.png", True, "x")]
    lines = [json.dumps({"file_name": name, "label": "cat", "ill": ill, "grade": grade}) for name, ill, grade in rows]
    (table / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert column(table, "ill") == {"a.png": "true", "sub/b.png": "false", "ü.png": "true"}
    assert column(table, "grade") == {"a.png": "1.5", "sub/b.png": "", "ü.png": "x"}


def test_two_tables_for_the_same_images_are_refused(table):
    write_table(table, GOOD)
    (table / "metadata.csv").write_text(HUGGING_FACE["metadata.csv"])
    with pytest.raises(InputError, match="both give labels"):
        read_labels(table, with_groups=False)


def test_a_table_above_and_one_in_a_part_are_refused(tmp_path, write_image):
    """They may give other labels, and nobody would see which are taken."""
    write_image("train/1.png")
    table = tmp_path / "images"
    (table / "metadata.csv").write_text("file_name,label\ntrain/1.png,cat\n")
    (table / "train" / "metadata.csv").write_text("file_name,label\n1.png,dog\n")
    with pytest.raises(InputError, match="both give labels"):
        read_labels(table, with_groups=False)


def test_an_empty_class_is_told_wherever_its_folder_is(tmp_path, write_image):
    for part in ("train", "test"):
        for label in ("a", "b"):
            write_image(f"{part}/{label}/0.png")
        (tmp_path / "images" / part / "c").mkdir()
    with pytest.raises(InputError, match="c holds no image"):
        find_labelled(tmp_path / "images", None)


def test_a_table_s_columns_are_told_apart_by_their_names(tmp_path, write_image):
    write_image("0.png")
    write_table(tmp_path / "images", 'file,label,"notes (a; b; c; d)"\n0.png,x,"1; 2"\n')
    assert [item.label for item in read_labels(tmp_path / "images", with_groups=False)] == ["x"]


def test_each_part_may_have_its_own_labels_csv(tmp_path, write_image):
    for part in ("train", "test"):
        write_image(f"{part}/0.png")
        write_table(tmp_path / "images" / part, "file,label\n0.png,x\n")
    found = read_labels(tmp_path / "images", with_groups=False)
    assert [(item.file.name, item.part) for item in found] == [("test/0.png", "test"), ("train/0.png", "train")]


def test_a_line_of_brackets_is_no_fault_of_ours(tmp_path, write_image):
    write_image("0.png")
    (tmp_path / "images/metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(InputError, match="line 1 is no JSON object"):
        read_labels(tmp_path / "images", with_groups=False)


def test_a_column_says_which_part_an_image_belongs_to(tmp_path, write_image):
    """Test images were trained on once."""
    for name in ("a", "b", "c"):
        write_image(f"{name}.png")
    root = tmp_path / "images"
    write_table(root, "file,label,split\na.png,x,Train\nb.png,y,val\nc.png,x,TEST\n")
    assert [item.part for item in read_labels(root, with_groups=False)] == ["train", "valid", "test"]
    write_table(root, "file,label,split\na.png,x,Train\nb.png,y,fold 3\nc.png,x,TEST\n")
    with pytest.raises(InputError, match="line 3: split 'fold 3' is none of train, valid, test"):
        read_labels(root, with_groups=False)
    (root / "train").mkdir()
    (root / "a.png").rename(root / "train/a.png")
    (root / "b.png").rename(root / "train/b.png")
    (root / "c.png").rename(root / "train/c.png")
    write_table(root, "file,label,split\ntrain/a.png,x,train\ntrain/b.png,y,test\ntrain/c.png,x,train\n")
    with pytest.raises(InputError, match="line 3: train/b.png has split test and lies in train/"):
        read_labels(root, with_groups=False)


@pytest.mark.parametrize(
    "folders", [("training_set", "test_set"), ("seg_train", "seg_test"), ("Train set", "Test set")]
)
def test_folders_that_may_mean_parts_are_not_taken_for_classes(tmp_path, write_image, folders):
    for folder in folders:
        write_image(f"{folder}/cat/0.png")
        write_image(f"{folder}/dog/0.png")
    with pytest.raises(InputError, match="parts or classes"):
        find_labelled(tmp_path / "images", None)
    assert {item.label for item in find_labelled(tmp_path / "images", list(folders))} == set(folders)


def test_a_column_split_is_read_in_whatever_case(tmp_path, write_image):
    for name in ("a", "b"):
        write_image(f"{name}.png")
    write_table(tmp_path / "images", "file,label,Split\na.png,x,train\nb.png,y,test\n")
    assert [item.part for item in read_labels(tmp_path / "images", with_groups=False)] == ["train", "test"]
