"""Decoded images on disk, so that a folder is decoded and resized once.

One file per folder and settings in the user's cache directory, readable by the user alone:
it holds private images. It ends in a checksum; what is damaged, or was made by other rules,
is not used. Each image is looked up by its name, size and times, so that only new and
changed files are decoded when a folder changes.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sfumato.data import decoding
from sfumato.data.decoding import Decoded, blank, decode_images
from sfumato.data.listing import FoundFile

_MAGIC = b"sfumato images 1\n"
_CHECKSUM_BYTES = 32

Entry = tuple[str, tuple[int, int, int]]
"""What an image is looked up by: its name, and its stamp (size and times)."""


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What all images of one cache file have in common; stands in its header."""

    root: str
    image_size: int
    channels: int
    rules: int = decoding.RULES_VERSION
    pillow: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("pillow"))


def decode_cached(
    root: Path, files: Sequence[FoundFile], *, image_size: int, channels: int, report: Callable[[str], None]
) -> Decoded:
    """Like `decode_images`, from the cache where it has the image, and leaves the result there.

    A cache that cannot be written is reported and costs time, not the run.

    Args:
        root: The folder; with the settings it names the cache file.
        files: The images, in the order in which they are returned.
        image_size: S, in pixels.
        channels: 1 or 3.
        report: Takes lines about progress.
    """
    settings = _Settings(str(root.resolve()), image_size, channels)
    slot = _slot(settings)
    known = _read(slot, settings) if slot is not None else None
    entries: list[Entry] = [(file.name, file.stamp) for file in files]
    if known is not None and known[0] == entries:
        report(f"read {len(files)} images from the cache {slot}")
        return known[1]

    rows = {entry: row for row, entry in enumerate(known[0])} if known is not None else {}
    missing = [index for index, entry in enumerate(entries) if entry not in rows]
    report(f"decoding {len(missing)} of {len(files)} images to {image_size} x {image_size} pixels")
    fresh = decode_images(
        [files[index].path for index in missing], image_size=image_size, channels=channels, report=report
    )
    images = blank(len(files), image_size, channels)
    reasons: list[str | None] = [None] * len(files)
    for source, index in enumerate(missing):
        images.numpy()[index], reasons[index] = fresh.images.numpy()[source], fresh.reasons[source]
    if known is not None:
        for index, entry in enumerate(entries):
            if entry in rows:
                images.numpy()[index], reasons[index] = (
                    known[1].images.numpy()[rows[entry]],
                    known[1].reasons[rows[entry]],
                )
    decoded = Decoded(images, reasons)
    if slot is not None:
        try:
            _write(slot, settings, entries, decoded)
        except OSError as error:
            report(f"the cache {slot} cannot be written ({error.strerror}); the images will be decoded again next time")
    return decoded


def cache_folder() -> Path:
    """`sfumato` in the user's cache directory: XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "sfumato"


def _slot(settings: _Settings) -> Path | None:
    """The cache file of a folder, or None where no folder of the user's own can be had."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or (hasattr(os, "geteuid") and folder.stat().st_uid != os.geteuid()):
            return None
        folder.chmod(0o700)
    except (OSError, RuntimeError):
        return None
    name = hashlib.sha256(json.dumps([settings.root, settings.image_size, settings.channels]).encode()).hexdigest()[:32]
    return folder / f"{name}.images"


def _read(slot: Path, settings: _Settings) -> tuple[list[Entry], Decoded] | None:
    """The entries and images of a cache file; None where it is missing, damaged or of other
    settings.
    """
    try:
        with open(slot, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.read(len(_MAGIC)) != _MAGIC:
                return None
            length = int.from_bytes(file.read(8), "little")
            if length > os.fstat(file.fileno()).st_size:
                return None
            text = file.read(length)
            header = json.loads(text)
            if header["settings"] != dataclasses.asdict(settings):
                return None
            images = blank(len(header["entries"]), settings.image_size, settings.channels)
            pixels = images.numpy().reshape(-1).view(np.uint8).data
            if file.readinto(pixels) != len(pixels) or file.read() != _checksum(text, pixels):
                return None
    except (OSError, ValueError, KeyError, TypeError, MemoryError):
        return None
    entries: list[Entry] = [(name, (stamp[0], stamp[1], stamp[2])) for name, stamp in header["entries"]]
    return entries, Decoded(images, header["reasons"])


def _write(slot: Path, settings: _Settings, entries: list[Entry], decoded: Decoded) -> None:
    """All or nothing: a file of another name, on disk, that then takes the slot's."""
    text = json.dumps(
        {"settings": dataclasses.asdict(settings), "entries": entries, "reasons": decoded.reasons}
    ).encode()
    pixels = decoded.images.numpy().reshape(-1).view(np.uint8).data
    handle, temporary = tempfile.mkstemp(dir=slot.parent, prefix=slot.stem, suffix=".part")  # mode 0600
    try:
        with open(handle, "wb") as file:
            for part in (_MAGIC, len(text).to_bytes(8, "little"), text, pixels, _checksum(text, pixels)):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, slot)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _checksum(text: bytes, pixels: memoryview) -> bytes:
    checksum = hashlib.sha256(text)
    checksum.update(pixels)
    return checksum.digest()
