"""Archives of images: what tar shards and Parquet files hold is the folder that they were made of."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from sfumato.config import DataConfig
from sfumato.data import cache
from sfumato.data.folders import folder_facts, load_folder
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


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


CONFIG = DataConfig(name="folder", classes=["cat", "dog"], image_size=8)
LABELS = ["cat", "dog"] * 6


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
    assert [data.classes[label] for label in data.train.labels] == LABELS[:8]


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
        assert any("is cut short" in line for line in lines), end
        assert 0 < len(part.train) + len(part.held_out_files) < 12


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("0.png", image(0))], "has no label"),
        ([("0.png", image(0)), ("0.jpg", image(0, "JPEG")), ("0.cls", b"cat")], "has 2 images"),
        ([("a/0.png", image(0)), ("a/0.png", image(1))], "is a second .png"),
        ([("0.png", image(0)), ("0.json", b"{")], "is no JSON"),
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


def test_a_member_s_name_leads_nowhere(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    names = ["../../../cat/0.png", "/dog/1.png", *(f"{LABELS[n]}/{n}.png" for n in range(2, 12))]
    write_tar(root / "a.tar", [(name, image(n)) for n, name in enumerate(names)])
    before = sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts)
    data = load_folder(CONFIG, root, quiet)
    assert len(data.train) + len(data.held_out) == 12
    assert sorted(path for path in tmp_path.rglob("*") if "cache_home" not in path.parts) == before
