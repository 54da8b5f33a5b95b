"""Decoded images of a folder, kept in a store so that a folder is decoded and resized once.

One folder per folder of images and settings in the user's cache directory, readable by the user
alone: it holds private images in plain numbers. In it lies a store for the folder's files as they
are, by their names, sizes and times. When a file changes a new store is made, into which the
images of all other files are copied, and the old one is removed.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.data import decoding, store
from sfumato.data.decoding import Decoded, decode_images, stored_type
from sfumato.data.images import Digests
from sfumato.data.listing import FoundFile

_PART = 1024
"""Images that are decoded before they are put on disk."""
_PROGRESS_SECONDS = 5.0
_FILES = "files.json"
KINDS = (".images", ".features", ".unpacked")
_is_off: ContextVar[bool] = ContextVar("cache_is_off", default=False)


def decode_cached(
    root: Path, files: Sequence[FoundFile], *, image_size: int, channels: int, report: Callable[[str], None]
) -> Decoded:
    """Like `decode_images`, from the cache where it has the image, and leaves the result there.

    A cache that cannot be written is reported and costs time and memory, not the run.

    Args:
        root: The folder; with the settings it names the cache's folder.
        files: The images, in the order in which they are returned.
        image_size: S, in pixels.
        channels: 1 or 3.
        report: Takes lines about progress.
    """
    settings = {
        "root": str(root.resolve()),
        "image_size": image_size,
        "channels": channels,
        "rules": decoding.RULES_VERSION,
        "pillow": importlib.metadata.version("pillow"),
    }
    slot = own_folder(settings, "images")
    if slot is not None:
        try:
            return _from_store(slot, settings, files, report)
        except OSError as error:
            report(f"the cache {slot} cannot be written ({error.strerror}); the images will be decoded again next time")
    report(f"decoding {len(files)} of {len(files)} images to {image_size} x {image_size} pixels")
    return decode_images(files, image_size=image_size, channels=channels)


def cache_folder() -> Path:
    """`sfumato` in the user's cache directory: XDG_CACHE_HOME, else ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "sfumato"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept of one folder of images, or of one set's features.

    Attributes:
        kind: "images" (decoded), "features" or "unpacked" (from archives).
        root: The folder that they are of; None for features.
        num_bytes: On disk.
    """

    folder: Path
    kind: str
    root: str | None
    num_bytes: int


def entries() -> list[Entry]:
    """All that the cache holds, largest first."""
    home = cache_folder()
    slots = sorted(home.iterdir()) if home.is_dir() else []
    found = [_entry(slot) for slot in slots if slot.suffix in KINDS and slot.is_dir() and not slot.is_symlink()]
    return sorted(found, key=lambda entry: -entry.num_bytes)


def clear(report: Callable[[str], None]) -> list[Entry]:
    """Removes all that the cache holds, and says what it was. A process that is filling a part of it
    is waited for.
    """
    removed = entries()
    for entry in removed:
        waiting = functools.partial(report, f"waiting for a process that fills {entry.folder}")
        with store.alone(entry.folder, waiting):
            shutil.rmtree(entry.folder)
    return removed


def _entry(slot: Path) -> Entry:
    root = None
    for path in (*slot.glob("*/store.json"), *slot.glob("*/done.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            held = json.loads(path.read_text(encoding="utf-8"))
            root = str(held.get("settings", held)["root"])
    sizes = [path.stat().st_size for path in slot.rglob("*") if path.is_file()]
    return Entry(slot, slot.suffix.removeprefix("."), root, sum(sizes))


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Within, nothing is read from the cache or kept in it."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def own_folder(settings: dict[str, Any], kind: str) -> Path | None:
    """The cache's folder for these settings, or None where it is switched off or no folder of the
    user's own can be had.
    """
    if _is_off.get():
        return None
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or (hasattr(os, "geteuid") and folder.stat().st_uid != os.geteuid()):
            return None
        folder.chmod(0o700)
        slot = folder / f"{_digest(settings)[:32]}.{kind}"
        # Nothing is made, or removed, where a link leads.
        return None if slot.is_symlink() or (slot.exists() and not slot.is_dir()) else slot
    except (OSError, RuntimeError):
        return None


def _from_store(
    slot: Path, settings: dict[str, Any], files: Sequence[FoundFile], report: Callable[[str], None]
) -> Decoded:
    """The images of a store for exactly these files, which is made first where there is none."""
    entries = [[file.name, file.path.name, *file.stamp, *(file.span or ())] for file in files]
    folder = slot / _digest(entries)[:32]
    found = store.read(folder, settings)
    if found is None:
        with store.alone(slot, lambda: report(f"another process is decoding into {slot}: waiting for it")):
            try:
                found = store.read(folder, settings) or _fill(folder, settings, files, entries, report)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            for other in slot.iterdir():  # of the files as they were: no copies of private images pile up
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)
    else:
        report(f"read {len(files)} images from the cache {slot}")
    reasons: list[str | None] = [None] * len(files)
    for index, reason in found.reasons.items():
        reasons[index] = reason
    return Decoded(torch.from_numpy(found.values), reasons, Digests(found.digests, folder))


def _fill(
    folder: Path,
    settings: dict[str, Any],
    files: Sequence[FoundFile],
    entries: list[list[Any]],
    report: Callable[[str], None],
) -> store.Store:
    """A finished store: images of an older one where it has them, the others decoded."""
    size, channels = settings["image_size"], settings["channels"]
    folder.mkdir(mode=0o700, exist_ok=True)
    new = store.begin(folder, settings, len(files), (channels, size, size), stored_type(channels))
    store.write_private(folder / _FILES, json.dumps(entries))
    _copy_known(new, settings, entries)
    missing = new.missing()
    report(f"decoding {len(missing)} of {len(files)} images to {size} x {size} pixels")
    last = started = time.monotonic()
    for start in range(0, len(missing), _PART):
        part = missing[start : start + _PART]
        fresh = decode_images([files[index] for index in part], image_size=size, channels=channels)
        reasons = {int(index): reason for index, reason in zip(part, fresh.reasons, strict=True) if reason is not None}
        new.put(part, fresh.images.numpy(), reasons)
        if time.monotonic() - last > _PROGRESS_SECONDS:
            last = time.monotonic()
            done = start + len(part)
            report(f"decoded {done} of {len(missing)} images, {done / (last - started):.0f} a second")
    new.finish()
    found = store.read(folder, settings)
    if found is None:
        raise OSError(errno.EIO, "it does not hold what was written")
    return found


def _copy_known(new: store.Store, settings: dict[str, Any], entries: list[list[Any]]) -> None:
    """Takes over the images of files that are as they were when an older store was made."""
    for folder in new.folder.parent.iterdir():
        old = store.read(folder, settings) if folder != new.folder and folder.is_dir() else None
        if old is None:
            continue
        try:
            known = json.loads((folder / _FILES).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        rows = {tuple(entry): row for row, entry in enumerate(known)}
        wanted = [index for index in new.missing() if tuple(entries[index]) in rows]
        for start in range(0, len(wanted), _PART):
            part = np.array(wanted[start : start + _PART])
            sources = np.array([rows[tuple(entries[index])] for index in part])
            values = old.values[sources]
            Digests(old.digests, folder).compare(torch.from_numpy(values), torch.from_numpy(sources))
            reasons = {
                int(index): old.reasons[source]
                for index, source in zip(part, sources, strict=True)
                if source in old.reasons
            }
            new.put(part, values, reasons)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
