"""Archives of images: what tar shards and Parquet files hold is the folder that they were made of."""

import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.config import DataConfig
from sfumato.data import cache
from sfumato.data.folders import folder_facts, labelled_images, load_folder
from sfumato.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache_home"))


def quiet(line):
    pass


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
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache.cache_folder().iterdir())  # private images


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
    assert folder_facts(CONFIG, root, quiet).num_examples == 8
    found = {data.train.integers(torch.tensor([i])).numpy().tobytes(): int(data.train.labels[i]) for i in range(8)}
    assert found == {pixels(n): ["cat", "dog"].index(LABELS[n]) for n in range(8)}


def test_bad_members_keep_their_place_and_a_cut_shard_says_what_is_lost(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    members = list(by_folder(range(12)))
    members[3] = (members[3][0], b"")
    members[4] = (members[4][0], members[4][1][:50])
    write_tar(root / "a.tar", members)
    lines = []
    whole = load_folder(CONFIG, root, lines.append)
    assert len(whole.train) + len(whole.held_out_files) == 12
    assert sum(not ok for ok in [*whole.train.readable.tolist(), *whole.held_out_files.readable.tolist()]) == 2
    assert sum("unreadable image" in line for line in lines) == 2
    path = root / "a.tar"
    content = path.read_bytes()
    for end in (9 * 1024 + 100, 9 * 1024 + 600, 9 * 1024 + 512, 9 * 1024):  # in a header, in an image, between
        path.write_bytes(content[:end])
        lines.clear()
        part = load_folder(CONFIG, root, lines.append)
        assert any("is cut short or damaged" in line for line in lines), end
        assert 0 < len(part.train) + len(part.held_out_files) < 12


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("0.png", image(0))], "has no label"),
        ([("0.png", image(0)), ("0.jpg", image(0, "JPEG")), ("0.cls", b"cat")], "has 2 images"),
        ([("a/0.png", image(0)), ("a/0.png", image(1))], "is a second .png"),
        ([("0.png", image(0)), ("0.json", b"{")], "is no JSON"),
        ([("0.gif", image(0)), ("0.cls", b"cat")], "has no image of a known kind"),
        ([("0.png", image(0)), ("0.cls", b"cat"), ("0.json", b'{"label": "dog"}')], "has two labels, 'dog' and 'cat'"),
        ([("cat/0.png", image(0)), ("cat/0.json", b'{"label": [1.0]}')], r"has the label '\[1.0\]', no name"),
        ([("0.png", image(0)), ("0.json", b'{"label": "\\ud800"}')], "no name or whole number"),
        ([("0.png", image(0)), ("1.cls", b"cat"), ("0.cls", b"cat")], "has no label"),
        ([("x/0.png", image(0))], "has the label x, which is not in data.classes"),
    ],
)
def test_what_no_one_can_have_meant_is_refused_by_name(tmp_path, members, says):
    root = tmp_path / "shards"
    root.mkdir()
    write_tar(root / "a.tar", members)
    for _ in range(2):  # what was unpacked before the refusal is no result
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


@pytest.mark.parametrize(("shard", "above"), [("pets.tar", ""), ("pets.tar", "pets/"), ("pets.tar", "a/b/")])
def test_parts_are_found_at_any_depth(tmp_path, shard, above):
    files = [(f"{above}{'Train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12)]
    train, held_out = names_of(in_memory(shard, sorted(files))(tmp_path / "shards"))
    assert train == {pixels(n) for n in range(8)} and held_out == {pixels(n) for n in range(8, 12)}


def test_a_shard_and_a_folder_of_two_parts_are_refused(tmp_path):
    files = [(f"{'train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12)]
    with pytest.raises(InputError, match="lies in test/, and the archive is named for train"):
        names_of(in_memory("training-data.tar", sorted(files))(tmp_path / "shards"))


def test_one_archive_under_two_names_is_refused(tmp_path):
    root = in_memory("a.tar", by_folder(range(12)))(tmp_path / "shards")
    os.link(root / "a.tar", root / "b.tar")
    with pytest.raises(InputError, match="are one archive under two names"):
        names_of(root)


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


def test_scoring_leaves_alone_what_training_unpacked(tmp_path):
    root = in_memory("a.tar", by_folder(range(12)))(tmp_path / "shards")
    load_folder(CONFIG, root, quiet)
    before = sorted(cache.cache_folder().rglob("*"))
    keys = {"image_size": 8, "channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3, "report": quiet}
    labelled_images(root, ["cat", "dog"], **keys)
    assert sorted(cache.cache_folder().rglob("*")) == before


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


@pytest.mark.parametrize(
    "shards",
    [
        {"xrays-train-0.tar": range(0, 8), "xrays-test-0.tar": range(8, 12)},
        {"chest_Training.tar": range(0, 8), "chest_Testing.tar": range(8, 12)},
    ],
)
def test_a_word_of_a_shard_s_name_says_its_part(tmp_path, shards):
    root = tmp_path / "shards"
    root.mkdir()
    for name, numbers in shards.items():
        write_tar(root / name, by_class_file(numbers))
    train, held_out = names_of(root)
    assert (len(train), len(held_out)) == (8, 4)
    write_tar(root / "other.tar", by_class_file([3]))
    with pytest.raises(InputError, match=r"names no part \(train, valid, test\), and others do"):
        names_of(root)


def test_so_does_the_first_folder_of_its_members(tmp_path):
    files = [(f"{'train' if n < 8 else 'test'}/{LABELS[n]}/{n}.png", image(n)) for n in range(12)]
    train, held_out = names_of(in_memory("data.tar", sorted(files))(tmp_path / "shards"))
    assert (len(train), len(held_out)) == (8, 4)


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
    assert len(labelled_images(root, ["cat", "dog"], **keys)) == 12
    assert not list(cache.cache_folder().rglob("*.png"))


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_damaged_compressed_archive_is_cut_short_or_none(tmp_path, mode):
    root = tmp_path / "shards"
    root.mkdir()
    with tarfile.open(root / "a.tar", mode) as tar:
        for name, content in by_class_file(range(12)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = (root / "a.tar").read_bytes()
    for damaged in (content[: len(content) // 2], content[:-20], b"", b"hello"):
        (root / "a.tar").write_bytes(damaged)
        lines = []
        try:
            data = load_folder(CONFIG, root, lines.append)
            lost = len(data.train) + len(data.held_out_files) < 12
            assert not lost or any("is cut short or damaged" in line for line in lines)
        except InputError as refusal:
            assert "\n" not in str(refusal)


def test_a_mac_s_own_files_are_passed_over(tmp_path):
    files = [
        file
        for n in range(12)
        for file in ((f"{LABELS[n]}/._{n}.png", b"\0\5\x16\7"), (f"{LABELS[n]}/{n}.png", image(n)))
    ]
    train, held_out = names_of(in_memory("a.tar", files)(tmp_path / "shards"))
    assert len(train) + len(held_out) == 12


def test_a_member_s_name_leads_nowhere(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    names = ["../../../cat/0.png", "/dog/1.png", *(f"{LABELS[n]}/{n}.png" for n in range(2, 12))]
    write_tar(root / "a.tar", [(name, image(n)) for n, name in enumerate(names)])
    before = sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts)
    data = load_folder(CONFIG, root, quiet)
    assert len(data.train) + len(data.held_out) == 12
    assert sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts) == before
