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


def refused(says: str, call: Callable, *given, **keys) -> None:
    """A call ends by a refusal that says this."""
    with pytest.raises(InputError, match=says):
        call(*given, **keys)


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
    """Writes an image of 12 x 12 random grey levels, different for each name, below tmp_path / "images"."""

    def write(name: str, size: int = 12) -> Path:
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(list(name.encode()))
        Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(path)
        return path

    return write


@pytest.fixture
def two_classes(tmp_path, write_image) -> Path:
    """A folder with 30 images of each of the classes "cat" and "dog"."""
    for label in ("cat", "dog"):
        for index in range(30):
            write_image(f"{label}/{index:02}.png")
    return tmp_path / "images"
