"""Folders of small images, and a cache of the test's own."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sfumato.errors import InputError


def quiet(line):
    pass


def refused(says: str, call: Callable, *given, **keys) -> str:
    """A call ends by a refusal that says this; all that it says."""
    with pytest.raises(InputError, match=says) as refusal:
        call(*given, **keys)
    return str(refusal.value)


def encoded(number: int | list[int], kind: str = "PNG", shape: tuple[int, ...] = (8, 8, 3)) -> bytes:
    """The file of a random image, different for each number."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)).save(file, format=kind)
    return file.getvalue()


def tar_of(members, mode: str = "w", **options) -> bytes:
    """A tar archive of names and contents."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, **options) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch) -> Path:
    """Keeps the tests away from the user's cache."""
    home = tmp_path_factory.mktemp("cache_home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def write_image(tmp_path) -> Callable[..., Path]:
    """Writes images of 12 x 12 random grey levels, different for each name, below tmp_path / "images"."""

    def write(*names: str) -> Path:
        for name in names:
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.open(io.BytesIO(encoded(list(name.encode()), shape=(12, 12)))).save(path)
        return path

    return write


@pytest.fixture
def two_classes(tmp_path, write_image) -> Path:
    """A folder with 30 images of each of the classes "cat" and "dog"."""
    write_image(*(f"{label}/{index:02}.png" for label in ("cat", "dog") for index in range(30)))
    return tmp_path / "images"
