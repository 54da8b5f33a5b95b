"""Archives of images: what tar shards and Parquet files hold is the folder that they were made of."""

import hashlib
import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.config import DataConfig
from sfumato.data import store
from sfumato.data.folders import Listing, labelled_images
from tests.data.conftest import encoded as image
from tests.data.conftest import quiet, refused, tar_of


def pixels(number):
    return np.asarray(Image.open(io.BytesIO(image(number)))).transpose(2, 0, 1).tobytes()


CONFIG = DataConfig(name="folder", classes=["cat", "dog"], image_size=8)
LABELS = ["cat", "dog"] * 20


def by_class_file(numbers):
    for number in numbers:
        yield f"{number:04d}.png", image(number)
        yield f"{number:04d}.cls", LABELS[number].encode()


def by_json(numbers):
    for number in numbers:
        yield f"{number:04d}.json", json.dumps({"label": LABELS[number], "other": 1}).encode()
        yield f"{number:04d}.png", image(number)


def by_folder(numbers):
    for number in sorted(numbers, key=lambda number: LABELS[number]):
        yield f"images/{LABELS[number]}/{number:04d}.png", image(number)


@pytest.fixture
def shard(tmp_path):
    """Writes a tar of these members into a folder, which it gives."""

    def write(members, name="a.tar", mode="w"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / name).write_bytes(tar_of(members, mode))
        return tmp_path / "set"

    return write


@pytest.fixture
def parquet(tmp_path):
    """Writes a Parquet file of these rows into a folder, which it gives."""
    arrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(rows, name="a.parquet", classes=None):
        table = arrow.Table.from_pylist(rows)
        if classes:
            features = {"label": {"names": classes, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        (tmp_path / "set").mkdir(exist_ok=True)
        written.write_table(table, tmp_path / "set" / name)
        return tmp_path / "set"

    return write


def loaded(root, report=quiet, **keys):
    return Listing(CONFIG.model_copy(update=keys), root, report).load()


def labels_by_image(*parts):
    rows = [row for part in parts for row in zip(part.integers().numpy(), part.labels.tolist(), strict=True)]
    return {image.tobytes(): label for image, label in rows}


def sides(root, **keys):
    """What is trained on and what is held out, by their pixels."""
    data = loaded(root, **keys)
    return [set(labels_by_image(part)) for part in (data.train, data.held_out_files)]


@pytest.mark.parametrize("members", [by_class_file, by_json, by_folder])
def test_shards_hold_the_images_of_the_folder_that_they_were_made_of(shard, members):
    for name, numbers in (("train-000", range(5)), ("train-001", range(5, 8)), ("testing-000", range(8, 12))):
        root = shard(members(numbers), f"{name}.tar")
    data, lines = loaded(root), []
    assert (len(data.train), data.held_out_name, data.classes) == (8, "test", ("cat", "dog"))
    assert labels_by_image(data.train) == {pixels(n): n % 2 for n in range(8)}
    loaded(root, lines.append)
    assert not any("unpacking" in line for line in lines)


@pytest.mark.parametrize(("nested", "column"), [(True, "image"), (False, "image"), (True, "img")])
def test_parquet_files_of_hugging_face_are_read(parquet, nested, column):
    content = (lambda number: {"bytes": image(number), "path": None}) if nested else image
    rows = [{column: content(n), "label": n % 2, "group": f"p{n // 2}"} for n in range(12)]
    parquet(rows[:8], "train-00000-of-00001.parquet", ["cat", "dog"])
    data = loaded(parquet(rows[8:], "test-00000-of-00001.parquet", ["cat", "dog"]), group_by="group")
    assert (len(data.train), len(data.held_out), data.train.largest_group()[1]) == (8, 4, 2)
    assert labels_by_image(data.train) == {pixels(n): n % 2 for n in range(8)}


def test_bad_images_keep_their_place_and_are_named(shard, parquet):
    members, lines = list(by_folder(range(12))), []
    members[3], members[4] = (members[3][0], b""), (members[4][0], members[4][1][:50])
    root = shard(members)
    whole = loaded(root, lines.append)
    assert len(whole.train) + len(whole.held_out_files) == 12
    assert sum(not ok for ok in [*whole.train.readable.tolist(), *whole.held_out_files.readable.tolist()]) == 2
    assert sum(f"unreadable image {root}/a/images/cat/" in line for line in lines) == 2
    (root / "a.tar").unlink()
    rows = [{"image": image(n) if n != 3 else b"cut", "label": LABELS[n]} for n in range(40)]
    loaded(parquet(rows), lines.append)  # without a path it is told by its bytes
    assert any(hashlib.sha256(b"cut").hexdigest() in line for line in lines)


def test_an_archive_that_is_cut_short_or_damaged_is_refused(shard):
    root = shard(by_folder(range(12)))
    content = (root / "a.tar").read_bytes()
    with tarfile.open(root / "a.tar") as tar:
        header, image = tar.getmembers()[6].offset, tar.getmembers()[6].offset_data
    bad_header = content[:header] + b"x" * 512 + content[image:]
    for damaged in (content[: header + 100], content[: image + 50], content[:header], bad_header):
        (root / "a.tar").write_bytes(damaged)
        for _ in range(2):  # what was unpacked before the refusal is no result
            refused(r"a\.tar is cut short or damaged", loaded, root)
    (root / "a.tar").write_bytes(content)
    assert sum(map(len, sides(root))) == 12
    (root / "a.tar").write_bytes(b"no tar at all" * 100)
    refused(r"a\.tar is no tar archive", loaded, root)
    (root / "cat").mkdir()
    refused(r"holds archives \(a\.tar\) beside cat", loaded, root)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_compressed_archive_is_read_and_a_damaged_one_refused(shard, mode):
    root = shard(by_class_file(range(12)), mode=mode)
    assert sum(map(len, sides(root))) == 12
    content = (root / "a.tar").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"hello"):
        (root / "a.tar").write_bytes(damaged)
        refused("cut short or damaged|no tar archive", loaded, root)


def test_a_link_in_an_archive_is_refused_by_name_and_a_member_s_name_leads_nowhere(shard, tmp_path):
    names = ["../../../cat/0.png", "/dog/1.png", *(f"{LABELS[n]}/{n}.png" for n in range(2, 40))]
    root = shard((name, image(n)) for n, name in enumerate(names))
    before = sorted(tmp_path.rglob("*"))
    assert sum(map(len, sides(root))) == 40 and sorted(tmp_path.rglob("*")) == before
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
        shard(by_folder(range(12)))
        with tarfile.open(root / "a.tar", "a") as tar:
            link = tarfile.TarInfo("images/cat/link.png")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
        refused(r"link\.png is a link or no ordinary file", loaded, root)


def test_what_systems_leave_is_passed_over_and_members_beside_images_with_a_line(shard):
    lines, members = [], [*by_class_file(range(12)), ("0003.txt", b"a cat"), ("0003.seg.npy", b""), ("README.md", b"")]
    members += [("._0001.png", b"\0\5\x16\7"), ("__MACOSX/x.png", b""), (".thumbs/1.png", image(100))]
    data = loaded(shard(sorted(members)), lines.append)
    assert len(data.train) + len(data.held_out_files) == 12
    assert any("members that are no image: 1 of .md, 1 of .npy, 1 of .txt" in line for line in lines)


REFUSED = {
    "has no label": [("0.png", image(0))],
    "has 2 images": [("0.png", image(0)), ("0.jpg", image(0, "JPEG")), ("0.cls", b"cat")],
    "0.cls has 2 images": [("0.1.png", image(0)), ("0.2.png", image(1)), ("0.cls", b"cat")],
    "is there a second time": [("cat/Zo\u00eb.png", image(0)), ("cat/Zoe\u0308.png", image(1))],
    "is no JSON": [("0.png", image(0)), ("0.json", b"{")],
    "0.gif is of no known kind of image": [("0.gif", image(0)), ("0.cls", b"cat")],
    "more.tar is of no known kind of image": [("cat/0.png", image(0)), ("more.tar", b"")],
    "has no image of a known kind": [("0.txt", b"a cat"), ("0.cls", b"cat")],
    "two labels, 'cat' and 'dog'": [("0.png", image(0)), ("0.cls", b"cat"), ("0.json", b'{"label": "dog"}')],
    r"has the label '\[1.0\]', no name": [("cat/0.png", image(0)), ("cat/0.json", b'{"label": [1.0]}')],
    "has the label '', no name": [("0.png", image(0)), ("0.cls", b"")],
    "0.json has 16777217 bytes. Keep its label and group alone": [("0.json", bytes(2**24 + 1)), ("0.png", image(0))],
    "has the label x, which is not in data.classes": [("x/0.png", image(0))],
    "lies in test/, which is a part or a class": [("test/0.png", image(0))],
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_no_one_can_have_meant_is_refused_by_name(shard, says):
    refused(says, loaded, shard(REFUSED[says]))


def test_a_parquet_file_that_is_none_or_lacks_what_it_needs_is_refused(parquet):
    for rows, message in (
        ([{"picture": b"", "label": 1}], 'needs one column "image" and one "label"; it has picture, label'),
        ([{"image": "0.png", "label": 1}], 'row 0 has an "image" that is str, not bytes'),
    ):
        refused(message, loaded, parquet(rows))
    root = parquet([{"image": b"", "label": 1}])
    arrow, columns = pytest.importorskip("pyarrow"), {"image": [b""], "label": [1], "group": ["a"]}
    table = arrow.table(columns).append_column("group", [["b"]])
    arrow.parquet.write_table(table, root / "a.parquet")
    refused("it has image, label, group, group", loaded, root)
    for notes in ("{", "[]", '{"info": {"features": {"label": {"names": 5}}}}'):
        arrow.parquet.write_table(
            table.select([0, 1]).replace_schema_metadata({"huggingface": notes}), root / "a.parquet"
        )
        refused("cannot be read as Parquet", loaded, root)
    (root / "a.parquet").write_bytes(b"PAR1 nothing")
    refused("cannot be read as Parquet", loaded, root)


@pytest.mark.parametrize("members", [by_class_file, by_folder])
def test_one_image_less_or_damaged_moves_no_other(shard, members):
    """By position the images behind it were held out by other hashes: 4.9 sensitivities."""
    train, held_out = sides(shard(members(range(40))))
    gone = pixels(0)
    assert sides(shard(members(range(1, 40)))) == [train - {gone}, held_out - {gone}]
    damaged = [(name, b"x" if content == image(0) else content) for name, content in members(range(40))]
    data = loaded(shard(damaged))
    assert (len(data.train), len(data.held_out_files)) == (len(train), len(held_out))


NAMES = {
    "equal base names": [(n, f"{n % 20:04}.png", LABELS[n // 20]) for n in range(40)],
    "names that differ by case": [(n, f"{'IMG' if n % 2 else 'img'}_{n // 2}.png", LABELS[n]) for n in range(40)],
    "copies without a name": [(n // 2, None, LABELS[n]) for n in range(40)],
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_that_are_not_an_image_s_own_move_no_other(parquet, kind):
    """Numbered in their order, up to 19 others moved."""

    def train_of(rows):
        named = [{"image": {"bytes": image(n), "path": name}, "label": label} for n, name, label in rows]
        return sides(parquet(named))[0]

    rows = NAMES[kind]
    train = train_of(rows)
    for number in range(4):
        fewer = train_of(rows[:number] + rows[number + 1 :])
        assert fewer <= train and train - fewer <= {pixels(rows[number][0])}


@pytest.mark.parametrize(("kind", "above"), [("tar", ""), ("tar", "a/b/"), ("parquet", "pets/")])
def test_parts_are_found_at_any_depth_and_must_agree_with_the_archive_s(shard, parquet, kind, above):
    files = sorted((f"{above}{'Train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12))
    rows = [{"image": {"bytes": content, "path": path}, "label": path.split("/")[-2]} for path, content in files]
    root = shard(files, "pets.tar") if kind == "tar" else parquet(rows, "pets.parquet")
    assert sides(root) == [{pixels(n) for n in range(8)}, {pixels(n) for n in range(8, 12)}]
    os.rename(root / f"pets.{kind}", root / f"training-data.{kind}")
    refused(r"lies in test/, and the archive is named for train", loaded, root)


@pytest.mark.parametrize(
    "names", [("train2017", "val2017"), ("pets_trainset-0", "pets_testset-0"), ("petsTrain-1", "petsTEST")]
)
def test_a_word_of_a_shard_s_name_says_its_part(shard, names):
    for name, numbers in zip(names, (range(8), range(8, 12)), strict=True):
        root = shard(by_class_file(numbers), f"{name}.tar")
    train, held_out = sides(root, split="train" if "val" in names[1] else "train+valid")
    assert train and train <= {pixels(n) for n in range(8)}  # a fixed hash sets test images apart beside val
    assert held_out and held_out <= {pixels(n) for n in range(8, 12)}
    shard(by_class_file([3]), "other.tar")
    refused(r"names no part \(train, valid, test\), and others do", loaded, root)


@pytest.mark.parametrize("kind", ["tar", "tar with labels", "parquet"])
def test_persons_are_read_from_the_names_that_members_have(shard, parquet, kind):
    """By made-up names, or names cut at their first dot, each image was a person of its own: epsilon 3, true 301."""
    names = [f"{LABELS[n]}/{n:04d}.p{n % 4}" for n in range(40)]
    if kind == "parquet":
        images = [{"bytes": image(n), "path": f"{names[n]}.png"} for n in range(40)]
        root = parquet([{"image": each, "label": LABELS[n]} for n, each in enumerate(images)])
    else:
        labels = [(f"{name}.cls", name[:3].encode()) for name in names if "labels" in kind]
        root = shard(sorted([*((f"{name}.png", image(n)) for n, name in enumerate(names)), *labels]))
    data = loaded(root, group_by=r"([^/.]+)\.png$")
    assert set(data.train.groups) | set(data.held_out_files.groups) == {"p0", "p1", "p2", "p3"}
    assert data.train.largest_group()[1] == 10
    refused("reads no group", loaded, root, group_by="/(x[0-9]+)")


def test_names_of_every_kind_are_taken(shard):
    root = shard((f"{LABELS[n]}/{'影' * 90 if n < 10 else '1.2.840.'}{n}.png", image(n)) for n in range(40))
    assert sum(map(len, sides(root))) == 40
    members = ((f"{LABELS[n]}/\u00e9{n}.png", image(n)) for n in range(40))
    (root / "a.tar").write_bytes(tar_of(members, encoding="latin-1", format=tarfile.GNU_FORMAT))
    assert sum(map(len, sides(root))) == 40


def test_a_label_has_one_spelling(shard):
    """As the folders of a Mac, and files of Windows' editors, spell it."""
    spellings = ["cafe\u0301", "\ufeffcaf\u00e9", " caf\u00e9\n", "dog"]
    labels = [(f"{number}.cls", spellings[number % 4].encode()) for number in range(40)]
    beside = [(f"{number}.png", image(number)) for number in range(40)]
    above = [(f"{spellings[number % 2 * 3]}/{number}.png", image(number)) for number in range(40)]
    for members in (sorted(beside + labels), above):
        assert sum(map(len, sides(shard(members), classes=["caf\u00e9", "dog"]))) == 40


def test_corrected_labels_are_read_though_size_and_time_are_the_same(shard):
    root = shard(by_class_file(range(12)))
    first, status = loaded(root).train.labels, (root / "a.tar").stat()
    shard((n, {b"cat": b"dog", b"dog": b"cat"}.get(c, c)) for n, c in by_class_file(range(12)))
    os.utime(root / "a.tar", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (root / "a.tar").stat().st_size == status.st_size
    assert torch.equal(loaded(root).train.labels, 1 - first)


def test_a_folder_that_was_scored_is_not_left_in_the_cache(shard):
    root = shard(by_folder(range(12)))
    keys = {"image_size": 8, "channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3, "report": quiet}
    assert len(labelled_images(root, ["cat", "dog"], data=CONFIG, **keys)[0]) == 12
    assert not store.cache_folder().exists()


def test_a_label_beside_an_image_is_found_wherever_it_lies_and_hides_no_other(shard):
    """A file of the image's own name took the place of its key's `.cls`: labelled by the folder."""
    files = []
    for number in range(40):
        files += [(f"cat/{number}.x.png", image(number)), (f"cat/{number}.x.json", b'{"caption": "a pet"}')]
        files += [(f"cat/{number}.cls", LABELS[number].encode())]
    for members in (files, sorted(files, key=lambda file: file[0].rpartition(".")[2])):
        data = loaded(shard(members))
        assert labels_by_image(data.train, data.held_out_files) == {pixels(n): n % 2 for n in range(40)}
    told = json.dumps({"label": "cat", "group": "P7"}).encode()
    for name, own, says in (("0.x.cls", b"dog", "two labels"), ("0.x.json", b'{"group": "P8"}', "two groups")):
        refused(says, loaded, shard([("0.x.png", image(0)), (name, own), ("0.json", told)]))
