"""Folders as people have them: read right, or refused with words to paste that read them right. Names alone are looked
at, so all files are empty.
"""

import itertools
import json
import re
import shlex
import shutil

import pytest
from PIL import Image

from sfumato.config import DataConfig
from sfumato.data.catalogue import NAMED, missing
from sfumato.data.layouts import list_images
from sfumato.data.loading import facts
from sfumato.errors import InputError
from tests.data.conftest import quiet, refused


def written(root, lines):
    """Files named as a shell's braces do: a/{b,c}/{0..2}.png."""
    for line in lines.split():
        parts = [part.split(",") for part in re.split(r"[{}]", line.replace("+", " "))]
        parts = [[str(i) for i in range(int(p[0][3:]) + 1)] if p[0].startswith("0..") else p for p in parts]
        for name in itertools.product(*parts):
            path = root / "".join(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


def listed(root, **keys):
    return list_images(DataConfig(name="folder", **keys), root, quiet)


def pasted(remedy, root):
    """The folder and the keys that the first proposal of a refusal names."""
    words = shlex.split(remedy[remedy.index("--") :].split("; or ")[0])
    keys = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--data-root":
            root = type(root)(value)
        else:
            key, _, text = value.removeprefix("data.").partition("=")
            keys[key] = text if key == "group_by" or not text else json.loads(text)
    return root, keys


AT_ONCE = {
    "classes": ("{cat,dog}/{0..3}.png", {"cat", "dog"}, {None}),
    "parts": ("{Train,val,TEST}/{cat,dog}/{0..3}.png", {"cat", "dog"}, {"train", "valid", "test"}),
    "numbers": ("{0,1,2}/{0..3}.png", {"0", "1", "2"}, {None}),
    "synsets": ("{n01443537,n01629819}/n_{0..3}.JPEG", {"n01443537", "n01629819"}, {None}),
    "a NAS": ("{cat,dog}/{0..3}.jpg {cat,dog}/@eaDir/{0..3}.jpg/SYNOPHOTO_THUMB_M.jpg", {"cat", "dog"}, {None}),
    "a bin": ("{cat,dog}/{0..3}.jpg $RECYCLE.BIN/S-1/$R1.jpg System+Volume+Information/x", {"cat", "dog"}, {None}),
    "kinds by letter": ("{c0,c1,c2}/img_{0..3}.jpg", {"c0", "c1", "c2"}, {None}),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_names_tell_without_doubt_is_read_at_once(tmp_path, name):
    lines, classes, parts = AT_ONCE[name]
    found = listed(written(tmp_path, lines))
    assert {file.label for file in found} == classes and {file.part for file in found} == parts


# What lies there; the classes that the first proposal leads to, and how many images.
AFTER_ONE = {
    "editions": ("{color,grayscale}/{apple,pear}/{0..3}.jpg", {"apple", "pear"}, 8),
    "a copy inside": ("set/set/{sick,well}/{0..3}.png set/{sick,well}/{0..3}.png", {"sick", "well"}, 8),
    "one folder deeper": ("archive/data/{cat,dog}/{0..3}.png archive/read.txt", {"cat", "dog"}, 8),
    "parts beside others": (
        "seg_{train/seg_train,test/seg_test}/{sea,wood}/{0..3}.jpg seg_pred/seg_pred/{0..9}.jpg",
        {"sea", "wood"},
        16,
    ),
    "training_set": ("{training_set,test_set}/{cat,dog}/{0..3}.jpg", {"cat", "dog"}, 16),
    "a test without classes": ("train/{cat,dog}/{0..3}.jpg test/{0..9}.jpg Train.csv", {"cat", "dog"}, 8),
    "parts of two editions": (
        "a/a/{train,test}/{def,ok}/{0..3}.jpg b/b/{def,ok}/p{0..3}.jpg",
        {"def", "ok"},
        16,
    ),
    "people above classes": ("{101,102,103,104}/{0,1}/{0..3}.png", {"0", "1"}, 32),
    "organs above classes": ("lung/{lung_aca,lung_n}/{0..3}.png colon/{colon_aca,colon_n}/{0..3}.png", None, 16),
    "classes that hold folders": ("{cat,dog}/images/{0..3}.png", {"cat", "dog"}, 8),
    "masks in folders": ("{cat,dog}/{images,masks}/{0..3}.png cat.xlsx", {"cat", "dog"}, 8),
    "masks beside": ("{cat,dog}/{0..3}.png {cat,dog}/{0..3}_mask.png {cat,dog}/{0..3}_mask_1.png", {"cat", "dog"}, 8),
    "two kinds of one": ("{cat,dog}/{0..3}.png {cat,dog}/{0..1}.jpg", {"cat", "dog"}, 8),
    "edited on a phone": ("{cat,dog}/IMG_{0..3}.jpg {cat,dog}/IMG_E{0..3}.jpg", {"cat", "dog"}, 8),
    "a copy": ("{cat,dog}/{0..30}.jpg cat/3+-+Copy.jpg cat/3+-+Copy+(2).jpg dog/1+Kopie.jpg", {"cat", "dog"}, 62),
    "an edited one": ("{cat,dog}/IMG_{0..30}.jpg cat/IMG_3-edited.jpg dog/IMG_1_EDITED.jpg", {"cat", "dog"}, 62),
    "copies in a class": ("{cat,dog}/{0..3}.png dog/greg/vision/{0..3}.png dog/RENAME", {"cat", "dog"}, 8),
    "other files": ("{cat,dog}/{0..3}.jpg {cat,dog}/{0..3}.xmp {cat,dog}/1.NEF README.dataset.docx", {"cat", "dog"}, 8),
    "folders of other files": ("{train,valid}/{cat,dog}/{0..3}.png models/a.pth notes/{x,y}.pdf", {"cat", "dog"}, 16),
    "names with brackets": ("a+[1]/{cat,dog}/{0..3}.png a+[1]/dog/old+[2]/x.png a+[1]/read+[me]", {"cat", "dog"}, 8),
    "parts beside brackets": ("{train,test}/{cat,dog}/{0..3}.png more+[a]/{0..3}.png", {"cat", "dog"}, 16),
    "captions": ("{cat,dog}/{0..3}.png metadata.csv", {"cat", "dog"}, 8),
    "folds above parts": ("fold1/{train,test}/{cat,dog}/{0..3}.png fold2/{train,test}/{cat,dog}/{0..3}.png", None, 16),
}


@pytest.mark.parametrize("name", AFTER_ONE)
def test_anything_else_is_refused_with_words_that_read_it(tmp_path, name):
    lines, classes, count = AFTER_ONE[name]
    root = written(tmp_path / "my pictures", lines)
    root, keys = pasted(refused("--", listed, root), root)
    found = listed(root, **keys)
    assert len(found) == count and (classes is None or {file.label for file in found} == classes)
    assert all(file.group for file in found) == ("group_by" in keys)


REFUSED = {
    "train/cat.{0..3}.jpg test1/{0..3}.jpg ids.csv": "Names tell no classes: write labels.csv.*ids.csv has",
    "set_part_{1,2}/{0..3}.jpg metadata_of_all.csv": "Names tell no classes: write labels.csv",
    "patient{1,2,3}/{0..3}.png": "differ by a number alone",
    "train/patient00{1,2,3}/study1/{0..3}.png train.csv": "Names tell no classes.*train.csv has",
    "Train/{big.cell.left,normal}/{0..3}.png Test/{big.cell,normal}/{0..3}.png": "Give each class one name",
    "data/{train,test}-00000-of-00001.parquet README.md": "--data-root .*data",
    "shards/{train,val}/000{0..1}.tar": "flat in one folder",
    "raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte": "A named set reads such files: --set data.name=mnist",
    "{train,test}_x.h5": "Arrays and tables of pixels are not read",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_what_no_name_tells_is_refused_for_its_real_reason(tmp_path, lines):
    refused(REFUSED[lines], listed, written(tmp_path, lines))


def test_a_stated_layout_is_kept_to_and_what_it_does_not_tell_is_refused(tmp_path):
    root = written(tmp_path, "{Training,val}/ward_{1,2}/study_{cat,dog}/{0..1}.png")
    found = listed(root, layout="{part}/{group}/study_{class}")
    assert {(file.part, file.group, file.label) for file in found} == set(
        itertools.product(("train", "valid"), ("ward_1", "ward_2"), ("cat", "dog"))
    )
    refused("is none of train, valid, test", listed, root, layout="*/{part}/{class}")
    refused("does not lie as data.layout", listed, root, layout="{class}")
    with pytest.raises(ValueError, match="must name {class} once"):
        listed(root, layout="{part}/*")
    refused("nothing in .* is called", listed, root, layout="{part}/*/{class}", exclude=["mask*"])
    assert {file.group for file in listed(root, layout="{part}/{group}/{class}", exclude=["ward_1"])} == {"ward_2"}


def test_a_number_behind_the_name_of_another_picture_is_told_and_read(tmp_path):
    said = []
    root = written(tmp_path, "{cat,dog}/IMG_{1,2,3}.jpg dog/IMG_2+(1).jpg cat/IMG_1+2.jpg cat/x+(1).jpg a/x-edited.jpg")
    assert len(list_images(DataConfig(name="folder"), root, said.append)) == 10
    (line,) = said
    assert "dog/IMG_2.jpg and dog/IMG_2 (1).jpg may be one picture twice" in line
    place, keys = pasted(line, root)
    assert len(listed(place, **keys)) == 7 and sorted(keys["exclude"]) == ["* (1).*", "* 2.*"]


def test_two_classes_that_hold_the_same_names_are_told_loudly(tmp_path):
    said = []
    root = written(tmp_path, "{crop_part1,UTKFace}/20_0_0_2017011600000{0..3}.jpg {a,b}/{0..9}.jpg")
    list_images(DataConfig(name="folder"), root, said.append)
    assert ["4 files of UTKFace are named as in crop_part1" in line for line in said] == [True]
    said.clear()  # where many classes count alike, names tell nothing, and are not compared two by two
    counted = written(tmp_path / "counted", "class_{a,b,c,d,e}/image_00000000{0..9}.jpg")
    list_images(DataConfig(name="folder"), counted, said.append)
    assert said == []


def test_a_table_of_labels_is_left_out_by_its_own_name_alone(tmp_path):
    root = written(tmp_path, "{cat,dog}/{0..1}.png notes.csv")
    (root / "metadata.csv").write_text("file_name,text\n")
    refused("label", listed, root, exclude=["*.csv"])
    assert len(listed(root, exclude=["metadata.csv", "notes.csv"])) == 4


def test_a_file_that_is_left_out_takes_none_along_whose_name_goes_on(tmp_path):
    root = written(tmp_path, "a.jpg a.jpg.png b.jpg old/c.jpg")
    (root / "labels.csv").write_text("file,label\na.jpg,cat\na.jpg.png,cat\nb.jpg,dog\nold/c.jpg,dog\n")
    found = listed(root, classes=["cat", "dog"], exclude=["a.jpg", "old/*"])
    assert [file.name for file in found] == ["a.jpg.png", "b.jpg"]


def test_a_table_that_is_none_is_left_out_by_the_words_of_its_refusal(tmp_path):
    root = written(tmp_path, "{train,test}/{cat,dog}/{0..3}.png")
    (root / "train/metadata.csv").write_text("picture,class\n")
    place, keys = pasted(refused("one column 'file_name'", listed, root), root)
    assert {file.part for file in listed(place, **keys)} == {"train", "test"}


def until_read(root, **keys):
    """Pastes what each refusal proposes beside what was given, whose keys it replaces."""
    for _ in range(6):
        try:
            return listed(root, **keys)
        except InputError as refusal:
            root, more = pasted(str(refusal), root)
            keys = {key: value for key, value in {**keys, **more}.items() if value}
    raise AssertionError(f"no end: {keys}")


@pytest.mark.parametrize("layout", [None, "{class}"])
def test_each_proposal_repeats_what_was_left_out_before(tmp_path, layout):
    root = written(tmp_path, "{cat,dog}/{0..3}.png {cat,dog}/{0..1}.HEIC {cat,dog}/0.jpg {cat,dog}/{0..3}_mask.png")
    (root / "labels.csv").write_text("picture\n")
    assert len(until_read(root, layout=layout)) == 8


def test_a_proposal_of_a_folder_inside_repeats_what_names_something_in_it(tmp_path):
    root = written(tmp_path, "set/{cat,dog}/{0..3}.png set/{cat,dog}/a.txt set/dog/old/{0..3}.png notes.pdf")
    found = until_read(root, exclude=["set/dog/old/*", "*.txt", "notes.pdf"])
    assert {file.name for file in found} == {f"{label}/{i}.png" for label in ("cat", "dog") for i in range(4)}


def test_a_layout_that_a_file_does_not_fit_is_replaced_by_the_proposal(tmp_path):
    root = written(tmp_path, "{cat,dog,bird}/{0..3}.png dog/edited/{0..3}.png")
    assert len(until_read(root, layout="{class}/edited")) == 12
    root = written(tmp_path / "other", "{cat,dog}/{a,b}/{0..3}.png dog/b/notes.txt")
    assert {file.group for file in until_read(root, layout="{class}/{group}")} == {"a", "b"}


def test_where_a_named_set_would_be_read_from_is_said(tmp_path):
    written(tmp_path, " ".join(NAMED["mnist"].files))
    for root in (tmp_path, tmp_path / "MNIST/raw"):
        said = refused("data.name=mnist or fashion_mnist", listed, root)
        assert f"--data-root the folder of {NAMED['mnist'].files[0]} or " in said
    assert missing("mnist", tmp_path) is None


def test_no_held_out_image_is_mended_by_parts(tmp_path):
    for name in ("cat/2.png", "dog/1.png"):  # whose hashes hold neither out
        (tmp_path / name).parent.mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name)
    recipe = DataConfig(name="folder")
    refused(r"put the classes into train/ and test/\.$", facts, recipe, tmp_path, quiet)
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            shutil.copytree(tmp_path / label, tmp_path / part / label)
    for label in ("cat", "dog"):
        shutil.rmtree(tmp_path / label)
    assert facts(recipe, tmp_path, quiet).num_examples == 2
