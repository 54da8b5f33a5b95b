import os
import shutil
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data import cache, decoding, store
from sfumato.data.cache import cache_folder, decode_cached
from sfumato.data.decoding import decode_images
from sfumato.data.images import ImageSet
from sfumato.data.listing import find_images
from sfumato.errors import InputError
from tests.system import of_the_system


@pytest.fixture
def decoded_paths(monkeypatch):
    """The names of all files that are really decoded."""
    seen = []

    def recorded(paths, **settings):
        seen.extend(path.name for path in paths)
        return decoding.decode_images(paths, **settings)

    monkeypatch.setattr(cache, "decode_images", recorded)
    return seen


@pytest.fixture
def root(tmp_path, write_image):
    for index in range(5):
        write_image(f"{index}.png")
    (tmp_path / "images/3.png").write_bytes(b"damaged")
    return tmp_path / "images"


def load(root, image_size=8, channels=1, report=lambda line: None):
    return decode_cached(root, find_images(root), image_size=image_size, channels=channels, report=report)


def slots():
    return sorted(cache_folder().iterdir())


def same(first, second):
    return torch.equal(first.images.to(torch.int32), second.images.to(torch.int32)) and first.reasons == second.reasons


@pytest.mark.parametrize("channels", [1, 3])
def test_the_second_load_decodes_nothing_and_is_bit_equal(root, decoded_paths, channels):
    first = load(root, channels=channels)
    assert decoded_paths == [f"{i}.png" for i in range(5)]
    second = load(root, channels=channels)
    assert len(decoded_paths) == 5 and same(first, second) and second.images.dtype == first.images.dtype
    assert second.readable.tolist() == [True, True, True, False, True]


def test_it_is_readable_by_the_user_alone_and_lies_where_xdg_says(root, cache_home):
    old = os.umask(0)
    try:
        load(root)
    finally:
        os.umask(old)
    (slot,) = slots()
    assert slot.parent == cache_home / "sfumato"
    assert stat.S_IMODE(slot.parent.stat().st_mode) == 0o700 and stat.S_IMODE(slot.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in slot.rglob("*"))


def test_an_open_cache_folder_is_closed(root, cache_home):
    (cache_home / "sfumato").mkdir()
    (cache_home / "sfumato").chmod(0o777)
    load(root)
    assert stat.S_IMODE((cache_home / "sfumato").stat().st_mode) == 0o700


def test_without_xdg_it_lies_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == tmp_path / ".cache" / "sfumato"


def test_a_changed_file_is_decoded_anew_and_it_alone(root, decoded_paths, write_image):
    first = load(root)
    Image.fromarray(np.full((12, 12), 77, np.uint8)).save(root / "1.png")
    decoded_paths.clear()
    second = load(root)
    assert decoded_paths == ["1.png"]
    assert (second.images[1].to(torch.int32) == 77 * 257).all()
    for index in (0, 2, 3, 4):
        assert torch.equal(second.images[index].to(torch.int32), first.images[index].to(torch.int32))


def test_adding_and_removing_files_keeps_the_others(root, decoded_paths, write_image):
    first = load(root)
    decoded_paths.clear()
    write_image("25.png")
    (root / "0.png").unlink()
    second = load(root)
    assert decoded_paths == ["25.png"] and second.readable.tolist() == [True, True, True, False, True]
    for index, source in ((0, 1), (1, 2), (4, 4)):
        assert torch.equal(second.images[index].to(torch.int32), first.images[source].to(torch.int32))
    decoded_paths.clear()
    assert same(load(root), second) and decoded_paths == []
    assert len(slots()) == 1  # no copies of private images pile up


def test_other_settings_and_other_rules_are_decoded_anew(root, decoded_paths, monkeypatch):
    load(root)
    assert load(root, image_size=9).images.shape == (5, 1, 9, 9)
    assert load(root, channels=3).images.shape == (5, 3, 8, 8)
    assert len(decoded_paths) == 15
    load(root), load(root, image_size=9), load(root, channels=3)
    assert len(decoded_paths) == 15
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "0.0")
    load(root)
    assert len(decoded_paths) == 20


def test_two_folders_with_files_of_equal_names_do_not_meet(root, tmp_path, decoded_paths):
    load(root)
    root.rename(tmp_path / "moved")
    load(tmp_path / "moved")
    assert len(decoded_paths) == 10


def damaged_in_every_way(data):
    yield b""
    for position in (0, 20, 30, len(data) // 2, len(data) - 40, len(data) - 1):
        yield data[:position]
        yield data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def files_of(slot):
    return {path.name: path for path in slot.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.mark.parametrize(
    "name", ["digests.npy", "state.npy", "store.json", "reasons.jsonl", "files.json", "values.npy"]
)
def test_a_damaged_cache_is_rebuilt_or_refused_and_never_trusted(root, name):
    """Whatever of it is damaged, what is taken from it is what was decoded, or nothing is."""
    found = load(root)
    pixels, readable = found.images.clone(), found.readable
    path = files_of(slots()[0])[name]
    good = path.read_bytes()
    for damaged in damaged_in_every_way(good):
        path.write_bytes(damaged)
        found = load(root)
        images = ImageSet(
            found.images, torch.zeros(5).long(), found.readable, (0.5,), (0.5,), 65535, digests=found.digests
        )
        try:
            assert torch.equal(images.integers().to(torch.int32), pixels.to(torch.int32))
        except InputError as error:
            assert name == "values.npy" and "Delete that folder" in str(error)
        assert found.readable.tolist() == readable.tolist()
        if path.exists():
            path.write_bytes(good)
        path = files_of(slots()[0])[name]


def test_a_cache_that_cannot_be_written_is_reported_and_costs_only_time(root, monkeypatch):
    truth = load(root)
    shutil.rmtree(slots()[0])

    @of_the_system
    def no_space(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "posix_fallocate", no_space)
    lines = []
    assert same(load(root, report=lines.append), truth)
    assert any("cannot be written (No space left on device)" in line for line in lines)
    assert files_of(slots()[0]) == {}  # nothing half-written is left


_KILLED = """
import sys
from pathlib import Path
from sfumato.data import cache, decoding, store
from sfumato.data.listing import find_images
cache._PART = 2
parts = []
put = store.Store.put
def put_and_die(self, *given):
    put(self, *given)
    parts.append(1)
    if len(parts) == 2:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
store.Store.put = put_and_die
root = Path(sys.argv[1])
cache.decode_cached(root, find_images(root), image_size=8, channels=1, report=print)
"""


def test_a_process_that_is_killed_is_gone_on_from(root, decoded_paths):
    process = subprocess.run([sys.executable, "-c", _KILLED, str(root)], capture_output=True)
    assert process.returncode == -9
    found = load(root)
    assert decoded_paths == ["4.png"]
    assert found.readable.tolist() == [True, True, True, False, True]
    assert found.reasons[3] and same(
        found, decode_images([f.path for f in find_images(root)], image_size=8, channels=1)
    )


_WAITING = """
import sys
from pathlib import Path
from sfumato.data import cache
from sfumato.data.listing import find_images
root = Path(sys.argv[1])
cache.decode_cached(root, find_images(root), image_size=8, channels=1, report=print)
"""


def test_two_processes_at_once_decode_once(root, cache_home):
    """The second waits, and then reads what the first made."""
    load(root)
    slot = slots()[0]
    for path in files_of(slot).values():
        path.unlink()
    with store.alone(slot, lambda: None):
        second = subprocess.Popen([sys.executable, "-c", _WAITING, str(root)], stdout=subprocess.PIPE, text=True)
        assert "waiting" in second.stdout.readline()
        folder = next(path for path in slot.iterdir() if path.is_dir())
        entries = [[file.name, *file.stamp] for file in find_images(root)]
        settings = dict(root=str(root.resolve()), image_size=8, channels=1, rules=1, pillow=version("pillow"))
        cache._fill(folder, settings, find_images(root), entries, lambda line: None)
    assert "decoding" not in second.communicate()[0] and second.returncode == 0


def test_a_cache_folder_that_cannot_be_had_costs_only_time(root, monkeypatch, tmp_path):
    truth = load(root)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert same(load(root), truth)
    stranger = tmp_path / "stranger"
    (tmp_path / "real").mkdir()
    stranger.mkdir()
    (stranger / "sfumato").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(stranger))
    assert same(load(root), truth) and list(Path(tmp_path / "real").iterdir()) == []


def test_an_empty_folder_has_an_empty_cache(tmp_path):
    (tmp_path / "none").mkdir()
    for _ in range(2):
        assert load(tmp_path / "none").images.shape == (0, 1, 8, 8)
