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
from sfumato.data.folders import labelled_images, list_folder
from sfumato.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache_home"))


def quiet(line):
    pass


def load_folder(config, root, report):
    return list_folder(config, root, report).load()


def image(number, kind="PNG"):
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def pixels(number):
    return np.asarray(Image.open(io.BytesIO(image(number)))).transpose(2, 0, 1).tobytes()


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


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


@pytest.mark.parametrize("members", [by_class_file, by_json, by_folder])
def test_shards_hold_the_images_of_the_folder_that_they_were_made_of(tmp_path, members):
    root = tmp_path / "shards"
    root.mkdir()
    for shard, numbers in (("train-000", range(0, 5)), ("train-001", range(5, 8)), ("testing-000", range(8, 12))):
        write_tar(root / f"{shard}.tar", members(numbers))
    data = load_folder(CONFIG, root, quiet)
    assert (len(data.train), data.held_out_name, data.classes) == (8, "test", ("cat", "dog"))
    pixels = [np.asarray(Image.open(io.BytesIO(image(number)))) for number in range(8)]
    expected = {int(values.sum()): LABELS[number] for number, values in enumerate(pixels)}
    sums = data.train.integers().long().sum((1, 2, 3)).tolist()
    assert {
        total: data.classes[label] for total, label in zip(sums, data.train.labels.tolist(), strict=True)
    } == expected
    lines = []
    load_folder(CONFIG, root, lines.append)
    assert not any("unpacking" in line for line in lines)
    assert all(path.stat().st_mode & 0o077 == 0 for path in store.cache_folder().iterdir())  # private images


@pytest.fixture
def parquet(tmp_path):
    arrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(name, rows, classes=None):
        table = arrow.Table.from_pylist(rows)
        if classes:
            features = {"label": {"names": classes, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        (tmp_path / "set").mkdir(exist_ok=True)
        written.write_table(table, tmp_path / "set" / name)
        return tmp_path / "set"

    return write


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_files_of_hugging_face_are_read(parquet, nested):
    content = (lambda number: {"bytes": image(number), "path": None}) if nested else image
    rows = [{"image": content(n), "label": ["cat", "dog"].index(LABELS[n]), "group": f"p{n // 2}"} for n in range(12)]
    parquet("train-00000-of-00001.parquet", rows[:8], ["cat", "dog"])
    root = parquet("test-00000-of-00001.parquet", rows[8:], ["cat", "dog"])
    data = load_folder(CONFIG.model_copy(update={"group_by": "group"}), root, quiet)
    assert (len(data.train), len(data.held_out), data.train.largest_group()[1]) == (8, 4, 2)
    assert list_folder(CONFIG, root, quiet).facts.num_examples == 8
    found = {data.train.integers(torch.tensor([i])).numpy().tobytes(): int(data.train.labels[i]) for i in range(8)}
    assert found == {pixels(n): ["cat", "dog"].index(LABELS[n]) for n in range(8)}


def test_bad_images_keep_their_place_and_are_named(tmp_path):
    root, lines = tmp_path / "shards", []
    root.mkdir()
    members = list(by_folder(range(12)))
    members[3] = (members[3][0], b"")
    members[4] = (members[4][0], members[4][1][:50])
    write_tar(root / "a.tar", members)
    whole = load_folder(CONFIG, root, lines.append)
    assert len(whole.train) + len(whole.held_out_files) == 12
    assert sum(not ok for ok in [*whole.train.readable.tolist(), *whole.held_out_files.readable.tolist()]) == 2
    assert sum(f"unreadable image {root}/a/images/cat/" in line for line in lines) == 2


@pytest.mark.parametrize("place", ["within a header", "within an image", "between members", "a damaged header"])
def test_an_archive_that_is_cut_short_or_damaged_is_refused(tmp_path, place):
    root = in_memory("a.tar", by_folder(range(12)))(tmp_path / "shards")
    content = (root / "a.tar").read_bytes()
    with tarfile.open(root / "a.tar") as tar:
        sixth = tar.getmembers()[6]
    damaged = {
        "within a header": content[: sixth.offset + 100],
        "within an image": content[: sixth.offset_data + 50],
        "between members": content[: sixth.offset],
        "a damaged header": content[: sixth.offset] + b"x" * 512 + content[sixth.offset_data :],
    }[place]
    (root / "a.tar").write_bytes(damaged)
    for _ in range(2):  # what was unpacked before the refusal is no result
        with pytest.raises(InputError, match=r"a\.tar is cut short or damaged"):
            load_folder(CONFIG, root, quiet)
    (root / "a.tar").write_bytes(content)
    assert sum(map(len, names_of(root))) == 12


def shard_of(root, numbers, name="a"):
    root.mkdir(exist_ok=True)
    write_tar(root / f"{name}.tar", by_class_file(numbers))
    return root / f"{name}.tar"


def test_a_link_in_an_archive_is_refused_by_name(tmp_path):
    path = shard_of(tmp_path / "shards", range(12))
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("images/cat/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0000.png"
        tar.addfile(link)
    with pytest.raises(InputError, match=r"link\.png is a link"):
        load_folder(CONFIG, tmp_path / "shards", quiet)


def test_members_beside_images_are_passed_over_with_a_line(tmp_path):
    root, lines = tmp_path / "shards", []
    members = [*by_class_file(range(12)), ("0003.txt", b"a cat"), ("0003.seg.npy", b""), ("README.md", b"")]
    root.mkdir()
    write_tar(root / "a.tar", sorted(members))
    assert len(load_folder(CONFIG, root, lines.append).train) >= 6
    assert any("members that are no image: 1 of .md, 1 of .npy, 1 of .txt" in line for line in lines)


def test_an_image_of_a_parquet_file_without_a_path_is_told_by_its_bytes(parquet):
    rows = [{"image": image(number), "label": number % 2} for number in range(40)]
    config, lines = CONFIG.model_copy(update={"classes": ["0", "1"]}), []
    rows[3]["image"] = b"cut"
    load_folder(config, parquet("a.parquet", rows), lines.append)
    (named,) = [line for line in lines if "unreadable image" in line]
    assert hashlib.sha256(b"cut").hexdigest() in named
    with pytest.raises(InputError, match='row 0 has an "image" that is str, not bytes'):
        load_folder(config, parquet("b.parquet", [{"image": "0.png", "label": 1}]), quiet)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("0.png", image(0))], "has no label"),
        ([("0.png", image(0)), ("0.jpg", image(0, "JPEG")), ("0.cls", b"cat")], "has 2 images"),
        ([("a/0.png", image(0)), ("a/0.png", image(1))], "is there a second time"),
        ([("0.png", image(0)), ("0.json", b"{")], "is no JSON"),
        ([("0.gif", image(0)), ("0.cls", b"cat")], "0.gif is of no known kind of image"),
        ([("cat/0.png", image(0)), ("more.tar", b"")], "more.tar is of no known kind of image"),
        ([("cat/0.png", image(0)), ("labels.csv", b"file,label")], "labels.csv is a table of labels"),
        ([("0.txt", b"a cat"), ("0.cls", b"cat")], "has no image of a known kind"),
        ([("cat/Zo\u00eb.png", image(0)), ("cat/Zoe\u0308.png", image(1))], "is there a second time"),
        ([("0.png", image(0)), ("0.cls", b"cat"), ("0.json", b'{"label": "dog"}')], "has two labels, 'cat' and 'dog'"),
        ([("cat/0.png", image(0)), ("cat/0.json", b'{"label": [1.0]}')], r"has the label '\[1.0\]', no name"),
        ([("0.png", image(0)), ("0.cls", b"")], "has the label '', no name"),
        ([("0.png", image(0)), ("0.json", b'{"label": "cat", "group": "P", "group": "7"}')], 'gives "group" twice'),
        ([("0.png", image(0)), ("0.json", b'{"label": "cat", "label": "dog"}')], 'gives "label" twice'),
        ([("0.1.png", image(0)), ("0.2.png", image(1)), ("0.cls", b"cat")], "0.cls has 2 images"),
        ([("x/0.png", image(0))], "has the label x, which is not in data.classes"),
    ],
)
def test_what_no_one_can_have_meant_is_refused_by_name(tmp_path, members, says):
    root = tmp_path / "shards"
    root.mkdir()
    write_tar(root / "a.tar", members)
    with pytest.raises(InputError, match=says):
        load_folder(CONFIG, root, quiet)


def test_an_archive_that_is_none_and_files_beside_archives_are_refused(tmp_path, parquet):
    root = tmp_path / "shards"
    root.mkdir()
    (root / "a.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(InputError, match=r"a\.tar is no tar archive"):
        load_folder(CONFIG, root, quiet)
    (root / "cat").mkdir()
    with pytest.raises(InputError, match=r"holds archives \(a\.tar\) beside cat"):
        load_folder(CONFIG, root, quiet)
    other = parquet("a.parquet", [{"picture": b"", "label": 1}])
    with pytest.raises(InputError, match='needs the columns "image" and "label"; it has picture, label'):
        load_folder(CONFIG, other, quiet)
    (other / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load_folder(CONFIG, other, quiet)


def in_memory(name, members):
    def write(root):
        root.mkdir(exist_ok=True)
        write_tar(root / name, members)
        return root

    return write


def names_of(root, **keys):
    """What is trained on and what is held out, by their pixels."""
    data = load_folder(CONFIG.model_copy(update=keys), root, quiet)
    return [
        {part.integers(torch.tensor([i])).numpy().tobytes() for i in range(len(part))}
        for part in (data.train, data.held_out_files)
    ]


@pytest.mark.parametrize("members", [by_class_file, by_json, by_folder])
def test_one_image_less_moves_no_other(tmp_path, members):
    """By position the images behind it were held out by other hashes: 4.9 sensitivities."""
    root = tmp_path / "shards"
    root.mkdir()
    write_tar(root / "a.tar", members(range(40)))
    train, held_out = names_of(root)
    gone = pixels(0)
    write_tar(root / "a.tar", members(range(1, 40)))
    fewer_train, fewer_held_out = names_of(root)
    assert fewer_train == train - {gone} and fewer_held_out == held_out - {gone}


def test_nor_does_a_row_less(parquet):
    rows = [{"image": image(n), "label": LABELS[n]} for n in range(40)]
    train, held_out = names_of(parquet("a.parquet", rows))
    gone = pixels(0)
    fewer_train, fewer_held_out = names_of(parquet("a.parquet", rows[1:]))
    assert fewer_train == train - {gone} and fewer_held_out == held_out - {gone}


def moved(root, write, rows):
    """Training images that come or go when one of the first is taken out, besides itself."""
    write(root, rows)
    train, _ = names_of(root)
    worst = 0
    for number in range(8):
        write(root, rows[:number] + rows[number + 1 :])
        fewer, _ = names_of(root)
        worst = max(worst, len(fewer - train), len(train - fewer - {pixels(rows[number][0])}))
    return worst


ROWS = {
    "equal base names": [(n, f"{n % 20:04}.png", LABELS[n // 20]) for n in range(40)],
    "one name for all but a few": [(n, "image.png" if n % 3 else f"{n}.png", LABELS[n]) for n in range(40)],
    "names that differ by case": [(n, f"{'IMG' if n % 2 else 'img'}_{n // 2}.png", LABELS[n]) for n in range(40)],
    "copies without a name": [(n // 2, None, LABELS[n]) for n in range(40)],
}


@pytest.mark.parametrize("kind", ROWS)
def test_names_that_are_not_an_image_s_own_move_no_other(parquet, kind):
    """Numbered in their order, up to 19 others moved."""

    def write(_, rows):
        parquet("a.parquet", [{"image": {"bytes": image(n), "path": name}, "label": label} for n, name, label in rows])

    root = parquet("a.parquet", [{"image": image(0), "label": "cat"}])
    assert moved(root, write, ROWS[kind]) == 0


def test_a_person_s_images_of_one_name_are_of_one_person(parquet):
    """Numbered, each was a person: epsilon 3 for three images, true 10.6."""
    rows = [
        {"image": {"bytes": image(n), "path": f"patient{n // 4}.png"}, "label": LABELS[n]}
        for n in range(40)  # visit after visit
    ]
    root = parquet("a.parquet", rows)
    data = load_folder(CONFIG.model_copy(update={"group_by": r"([^/]+)\.png$"}), root, quiet)
    assert data.train.largest_group()[1] == 4


@pytest.mark.parametrize(("kind", "above"), [("tar", ""), ("tar", "a/b/"), ("parquet", "pets/")])
def test_parts_are_found_at_any_depth(tmp_path, parquet, kind, above):
    files = sorted((f"{above}{'Train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12))
    if kind == "tar":
        root = in_memory("pets.tar", files)(tmp_path / "shards")
    else:
        rows = [{"image": {"bytes": content, "path": path}, "label": path.split("/")[-2]} for path, content in files]
        root = parquet("pets.parquet", rows)
    train, held_out = names_of(root)
    assert train == {pixels(n) for n in range(8)} and held_out == {pixels(n) for n in range(8, 12)}


def test_a_shard_and_a_folder_of_two_parts_are_refused(tmp_path):
    files = [(f"{'train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12)]
    with pytest.raises(InputError, match="lies in test/, and the archive is named for train"):
        names_of(in_memory("training-data.tar", sorted(files))(tmp_path / "shards"))


def test_names_of_every_kind_are_taken(tmp_path):
    long, dotted = "\u5f71" * 90, "1.2.840"
    names = [f"{LABELS[n]}/{long}{n}.png" for n in range(10)] + [f"{LABELS[n]}/{dotted}.{n}.png" for n in range(10, 40)]
    root = in_memory("a.tar", [(name, image(n)) for n, name in enumerate(names)])(tmp_path / "shards")
    assert sum(map(len, names_of(root))) == 40
    with tarfile.open(root / "a.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for n in range(40):
            info = tarfile.TarInfo(f"{LABELS[n]}/\u00e9{n}.png")
            info.size = len(image(n))
            tar.addfile(info, io.BytesIO(image(n)))
    assert sum(map(len, names_of(root))) == 40


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_persons_are_read_from_the_names_that_members_have(tmp_path, parquet, kind):
    """By made-up names each image was a person of its own: epsilon 3 for 25 images each."""
    names = [f"scans/{n // 4:04d}_{n % 4:02d}" for n in range(40)]
    if kind == "tar":
        root = tmp_path / "shards"
        root.mkdir()
        files = [(f"{name}{end}", content) for n, name in enumerate(names) for end, content in (
            (".png", image(n)), (".cls", LABELS[n].encode()))]  # fmt: skip
        write_tar(root / "xrays.tar", files)
    else:
        rows = [{"image": {"bytes": image(n), "path": f"{names[n]}.png"}, "label": LABELS[n]} for n in range(40)]
        root = parquet("xrays.parquet", rows)
    data = load_folder(CONFIG.model_copy(update={"group_by": "/([0-9]+)_"}), root, quiet)
    assert data.train.largest_group()[1] == 4
    with pytest.raises(InputError, match="reads no group"):
        load_folder(CONFIG.model_copy(update={"group_by": "/(p[0-9]+)"}), root, quiet)


def test_corrected_labels_are_read_though_size_and_time_are_the_same(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    path = root / "a.tar"
    write_tar(path, by_class_file(range(12)))
    first, status = load_folder(CONFIG, root, quiet).train.labels, path.stat()
    swapped = [(n, {b"cat": b"dog", b"dog": b"cat"}.get(c, c)) for n, c in by_class_file(range(12))]
    write_tar(path, swapped)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert torch.equal(load_folder(CONFIG, root, quiet).train.labels, 1 - first)


def test_a_folder_that_was_scored_is_not_left_in_the_cache(tmp_path):
    root = in_memory("a.tar", by_folder(range(12)))(tmp_path / "shards")
    keys = {"image_size": 8, "channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3, "report": quiet}
    assert len(labelled_images(root, ["cat", "dog"], **keys)[0]) == 12
    assert not store.cache_folder().exists()


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_compressed_archive_is_read_and_a_damaged_one_refused(tmp_path, mode):
    root = tmp_path / "shards"
    root.mkdir()
    with tarfile.open(root / "a.tar", mode) as tar:
        for name, content in by_class_file(range(12)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert sum(map(len, names_of(root))) == 12
    content = (root / "a.tar").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"hello"):
        (root / "a.tar").write_bytes(damaged)
        with pytest.raises(InputError, match="cut short or damaged|no tar archive"):
            load_folder(CONFIG, root, quiet)


def test_a_mac_s_own_files_are_passed_over(tmp_path):
    files = [
        file
        for n in range(40)
        for file in ((f"{LABELS[n]}/._{n}.png", b"\0\5\x16\7"), (f"{LABELS[n]}/{n}.png", image(n)))
    ]
    train, held_out = names_of(in_memory("a.tar", files)(tmp_path / "shards"))
    assert len(train) + len(held_out) == 40


def test_a_member_s_name_leads_nowhere(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    names = ["../../../cat/0.png", "/dog/1.png", *(f"{LABELS[n]}/{n}.png" for n in range(2, 40))]
    write_tar(root / "a.tar", [(name, image(n)) for n, name in enumerate(names)])
    before = sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts)
    data = load_folder(CONFIG, root, quiet)
    assert len(data.train) + len(data.held_out) == 40
    assert sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts) == before


def dotted(numbers, with_labels):
    """Members whose names have dots, as `<visit>.<person>.png`."""
    for number in numbers:
        name = f"{LABELS[number]}/{number:04d}.p{number % 4}"
        yield f"{name}.png", image(number)
        if with_labels:
            yield f"{name}.cls", LABELS[number].encode()


@pytest.mark.parametrize("with_labels", [False, True])
def test_a_person_named_behind_a_dot_is_one_person_with_and_without_labels_beside_the_image(tmp_path, with_labels):
    """Names cut at their first dot gave each image a person of its own: epsilon 3, true 301."""
    root = in_memory("a.tar", dotted(range(40), with_labels))(tmp_path / "shards")
    data = load_folder(CONFIG.model_copy(update={"group_by": r"([^/.]+)\.png$"}), root, quiet)
    assert set(data.train.groups) | set(data.held_out_files.groups) == {"p0", "p1", "p2", "p3"}
    assert data.train.largest_group()[1] == 10


STRAY = {
    "an example with its label": [("cat/x.png", image(100)), ("cat/x.cls", b"cat")],
    "a note": [("info.json", b'{"made": "by us"}')],
    "an image": [("dog/0000.png", image(100))],
}


@pytest.mark.parametrize("with_labels", [False, True])
def test_one_example_more_renames_no_other(tmp_path, with_labels):
    members = list(dotted(range(40), with_labels))
    train, held_out = names_of(in_memory("a.tar", members)(tmp_path / "shards"))
    for stray in STRAY.values():
        more_train, more_held_out = names_of(in_memory("a.tar", [*members, *stray])(tmp_path / "shards"))
        assert (more_train | more_held_out) - (train | held_out) <= {pixels(100)}
        assert train <= more_train and held_out <= more_held_out


def test_pixels_and_damage_do_not_decide_what_is_held_out(tmp_path):
    members = list(by_folder(range(40)))
    counts = set()
    for content in (b"", b"x", *(image(number) for number in range(100, 106))):
        members[3] = (members[3][0], content)
        data = load_folder(CONFIG, in_memory("a.tar", members)(tmp_path / "shards"), quiet)
        counts.add((len(data.train), len(data.held_out_files)))
    assert len(counts) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("train2017", "val2017"),
        ("pets_trainset-0", "pets_testset-0"),
        ("petsTrain-1", "petsTEST"),
        ("Training", "TEST-1"),
    ],
)
def test_a_word_of_a_shard_s_name_says_its_part(tmp_path, names):
    root = tmp_path / "shards"
    for name, numbers in zip(names, (range(8), range(8, 12)), strict=True):
        in_memory(f"{name}.tar", by_class_file(numbers))(root)
    train, held_out = names_of(root, split="train" if "val" in names[1] else "train+valid")
    assert train and train <= {pixels(n) for n in range(8)}  # a fixed hash sets test images apart beside val
    assert held_out and held_out <= {pixels(n) for n in range(8, 12)}
    write_tar(root / "other.tar", by_class_file([3]))
    with pytest.raises(InputError, match=r"names no part \(train, valid, test\), and others do"):
        names_of(root)


def test_an_example_need_not_lie_together(tmp_path):
    members = sorted(by_class_file(range(40)), key=lambda member: member[0].rpartition(".")[2])
    data = load_folder(CONFIG, in_memory("a.tar", members)(tmp_path / "shards"), quiet)
    labels = [*data.train.labels.tolist(), *data.held_out_files.labels.tolist()]
    assert sorted(labels) == [0] * 20 + [1] * 20


def test_a_label_has_one_spelling(tmp_path):
    """As the folders of a Mac, and files of Windows' editors, spell it."""
    spellings = ["cafe\u0301".encode(), "\ufeffcaf\u00e9".encode(), " caf\u00e9\n".encode(), b"dog"]
    members = []
    for number in range(40):
        members += [(f"{number}.png", image(number)), (f"{number}.cls", spellings[number % 4])]
    config = CONFIG.model_copy(update={"classes": ["caf\u00e9", "dog"]})
    data = load_folder(config, in_memory("a.tar", members)(tmp_path / "shards"), quiet)
    assert len(data.train) + len(data.held_out_files) == 40
    mac = ["cafe\u0301", "dog"]
    folders = [(f"{mac[number % 2]}/{number}.png", image(number)) for number in range(40)]
    folders += [(".thumbs/1.png", image(100))]
    data = load_folder(config, in_memory("a.tar", folders)(tmp_path / "shards"), quiet)
    assert len(data.train) + len(data.held_out_files) == 40


def test_a_column_that_is_there_twice_is_refused(parquet):
    pa = pytest.importorskip("pyarrow")
    root = parquet("a.parquet", [{"image": image(0), "label": "cat"}])
    columns = [[image(n) for n in range(4)], LABELS[:4], ["a"] * 4, list("abcd")]
    pa.parquet.write_table(
        pa.table([pa.array(column) for column in columns], names=["image", "label", "group", "group"]),
        root / "a.parquet",
    )
    with pytest.raises(InputError, match='the column "group" twice'):
        names_of(root, group_by="group")


def test_a_caption_beside_an_image_hides_no_label(tmp_path):
    """A file of the image's own name took the place of its key's `.cls`: labelled by the folder."""
    files = []
    for number in range(40):
        files += [(f"cat/{number}.x.png", image(number)), (f"cat/{number}.x.json", b'{"caption": "a pet"}')]
        files += [(f"cat/{number}.cls", LABELS[number].encode())]
    data = load_folder(CONFIG, in_memory("a.tar", files)(tmp_path / "shards"), quiet)
    labels = [*data.train.labels.tolist(), *data.held_out_files.labels.tolist()]
    assert sorted(labels) == [0] * 20 + [1] * 20
    told = json.dumps({"label": "cat", "group": "P7"}).encode()
    for own, says in ((b"dog", "two labels"), (b'{"label": "cat", "group": "P8"}', "two groups")):
        name = "0.x.cls" if own == b"dog" else "0.x.json"
        with pytest.raises(InputError, match=says):
            names_of(in_memory("a.tar", [("0.x.png", image(0)), (name, own), ("0.json", told)])(tmp_path / "shards"))
