"""What is kept on disk: made once, by one process at a time, and never read before it is whole."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data import archives, decoding, pixels, store
from sfumato.data.decoding import decode_cached, decode_images
from sfumato.data.images import ImageSet
from sfumato.data.listing import find_images
from tests.data.conftest import encoded, quiet, tar_of


@pytest.fixture
def decoded_names(monkeypatch):
    """The names of all files that are really decoded."""
    seen = []

    def recorded(paths, **settings):
        seen.extend(path.name for path in paths)
        return decode_images(paths, **settings)

    monkeypatch.setattr(decoding, "decode_images", recorded)
    return seen


@pytest.fixture
def root(tmp_path, write_image):
    write_image(*(f"{index}.png" for index in range(5)))
    (tmp_path / "images/3.png").write_bytes(b"damaged")
    return tmp_path / "images"


def load(root, image_size=8, channels=1, report=quiet, **how):
    return decode_cached(root, find_images(root), image_size=image_size, channels=channels, report=report, **how)


def slots():
    return sorted(store.cache_folder().iterdir())


def same(first, second):
    alike = first.reasons == second.reasons and np.array_equal(first.kept, second.kept)
    return alike and torch.equal(first.images.to(torch.int32), second.images.to(torch.int32))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_second_load_decodes_nothing_and_is_bit_equal(root, decoded_names, channels):
    first = load(root, channels=channels)
    assert decoded_names == [f"{i}.png" for i in range(5)]
    second = load(root, channels=channels)
    assert len(decoded_names) == 5 and same(first, second) and second.images.dtype == first.images.dtype
    assert second.readable.tolist() == [True, True, True, False, True]
    truth = decode_images(find_images(root), image_size=8, channels=channels)
    assert same(second, truth) and np.array_equal(second.digests, truth.digests)


def test_it_is_for_the_user_alone_and_lies_where_xdg_says(root, cache_home, monkeypatch, tmp_path):
    (cache_home / "sfumato").mkdir()
    (cache_home / "sfumato").chmod(0o777)
    load(root)
    (slot,) = slots()
    assert slot.parent == cache_home / "sfumato" and {path.name for path in slot.iterdir()} == {"lock", "made"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (slot.parent, slot))
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert store.cache_folder() == tmp_path / ".cache" / "sfumato"


def test_only_what_changed_is_decoded_anew(root, decoded_names, write_image):
    first = load(root)
    decoded_names.clear()
    Image.fromarray(np.full((12, 20), 77, np.uint8)).save(root / "1.png")
    write_image("25.png")
    (root / "0.png").unlink()
    second = load(root)  # 1, 2, 25, 3, 4
    assert decoded_names == ["1.png", "25.png"] and second.readable.tolist() == [True, True, True, False, True]
    assert second.reasons[3] == first.reasons[3] and (second.images[0].to(torch.int32) == 77 * 257).all()
    for index, source in ((1, 2), (4, 4)):
        assert torch.equal(second.images[index].to(torch.int32), first.images[source].to(torch.int32))
    decoded_names.clear()
    assert same(load(root), second) and decoded_names == []
    assert same(second, decode_images(find_images(root), image_size=8, channels=1))
    assert {path.name for path in slots()[0].iterdir()} == {"lock", "made"}  # no copies of private images pile up


def test_other_settings_rules_and_folders_are_decoded_anew(root, decoded_names, monkeypatch, tmp_path):
    for _ in range(2):
        for size, channels, resize in ((8, 1, "crop"), (9, 1, "crop"), (8, 3, "crop"), (8, 1, "pad")):
            assert load(root, size, channels, resize=resize).images.shape == (5, channels, size, size)
        assert len(decoded_names) == 20
    monkeypatch.setattr(pixels, "RULES_VERSION", 0)
    load(root)
    load(root.rename(tmp_path / "moved"))
    assert len(decoded_names) == 30


def test_a_cache_that_cannot_be_had_is_reported_and_costs_only_time(root, monkeypatch, tmp_path):
    truth, lines = load(root), []
    shutil.rmtree(slots()[0])
    monkeypatch.setattr(store.os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert same(load(root, report=lines.append), truth)
    assert any("cannot be written (No space left on device)" in line for line in lines)
    monkeypatch.undo()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert same(load(root, report=lines.append), truth) and "cannot be written (Not a directory)" in lines[-2]
    with store.switched_off():
        assert same(load(root), truth)


_FILLS = """
import os, signal, sys
from pathlib import Path
from sfumato.data import decoding, store
from sfumato.data.listing import find_images
decoding._PART = 2
moment, calls = int(sys.argv[2]), 0
def dying(call):
    def called(*given, **more):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **more)
    return called
for name in ("fsync", "replace", "rename"):
    setattr(os, name, dying(getattr(os, name)))
root = Path(sys.argv[1])
decoding.decode_cached(root, find_images(root), image_size=8, channels=1, report=print)
"""


@pytest.mark.parametrize(
    "moment", [pytest.param(3, marks=pytest.mark.slow), 13, pytest.param(99, marks=pytest.mark.slow)]
)
def test_a_process_that_is_killed_at_any_moment_is_gone_on_from(root, decoded_names, moment):
    process = subprocess.run([sys.executable, "-c", _FILLS, str(root), str(moment)], capture_output=True)
    assert process.returncode in (-signal.SIGKILL, 0), process.stderr
    before = len(list(slots()[0].glob("part/filled.json")))
    done = json.loads((slots()[0] / "part/filled.json").read_text())[0] if before else 0
    assert (process.returncode == 0) == (slots()[0] / "made").is_dir()
    found = load(root)
    assert decoded_names == ([] if process.returncode == 0 else [f"{index}.png" for index in range(done, 5)])
    assert same(found, decode_images(find_images(root), image_size=8, channels=1))


def test_two_processes_at_once_decode_once(root, tmp_path):
    """The second waits, and then reads what the first made."""
    load(root)
    kept = (slots()[0] / "made").rename(tmp_path / "kept")
    with store._alone(slots()[0], print):
        words = [sys.executable, "-u", "-c", _FILLS, str(root), "-1"]
        second = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert "waiting" in second.stdout.readline()
        shutil.copytree(kept, slots()[0] / "made")
    assert "decoding" not in second.communicate()[0] and second.returncode == 0


def test_what_is_kept_is_listed_and_cleared_and_an_empty_folder_has_an_empty_cache(root):
    (root.parent / "none").mkdir()
    load(root)
    load(root, image_size=9)
    found = store.entries()
    assert [(entry.kind, entry.root) for entry in found] == [("images", str(root))] * 2
    assert found[0].num_bytes > found[1].num_bytes > 5 * 64 * 2
    assert store.clear(print) == found and slots() == [] == store.entries()
    for _ in range(2):
        assert load(root.parent / "none").images.shape == (0, 1, 8, 8)


def test_on_a_disk_without_locks_nothing_is_kept_and_all_that_was_is_cleared(root, monkeypatch):
    truth, lines = load(root), []
    archive = root.parent / "packed"
    archive.mkdir()
    (archive / "a.tar").write_bytes(tar_of([(f"{name}/1.png", encoded(1)) for name in "ab"]))
    monkeypatch.setattr(store.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert same(load(root, report=lines.append), truth) and same(load(root, image_size=9), load(root, image_size=9))
    assert "its disk has no locks (No locks available): name a folder on another by XDG_CACHE_HOME" in lines[0]
    with pytest.raises(OSError, match="has no locks"):
        archives.unpacked(archive, archives.archives_of(archive), quiet)
    assert len(slots()) == 3 and {entry.kind for entry in store.clear(print)} == {"images", "unpacked"} and not slots()


def test_a_batch_of_rows_on_disk_is_that_of_the_rows_in_memory(tmp_path):
    """Each row spans pages, and is asked for before it is read."""
    values = np.random.default_rng(0).integers(0, 256, (50, 3, 64, 64), dtype=np.uint8)
    columns = {"values": ((3, 64, 64), values.dtype)}
    store.Filling(tmp_path, 50, columns).put(values=values[:20])
    again = store.Filling(tmp_path, 50, columns)
    assert again.num_filled == 20
    again.put({30: "bad"}, values=values[20:])
    found = store.read(tmp_path)
    assert found.reasons == {30: "bad"} and np.array_equal(found.columns["values"], values)
    facts = (torch.zeros(50).long(), torch.ones(50, dtype=torch.bool), (0.5,) * 3, (0.5,) * 3)
    on_disk = ImageSet(torch.from_numpy(found.columns["values"]), *facts, store=found)
    in_memory = ImageSet(torch.from_numpy(values), *facts)
    chosen = torch.tensor([49, 7, 7, 0])
    assert torch.equal(on_disk.subset([9, *range(1, 50)]).batch(chosen)[:3], in_memory.batch(chosen)[:3])
    assert on_disk.batch(torch.arange(0)).shape == (0, 3, 64, 64)
    assert os.path.getsize(tmp_path / "values.npy") == 128 + values.nbytes
