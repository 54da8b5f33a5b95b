"""Many image files decoded by threads (`sfumato.data.pixels`), and kept in the cache."""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.accounting import formats
from sfumato.config import Resize
from sfumato.data import pixels, store
from sfumato.data.images import ImageSet, Scale
from sfumato.data.listing import DICOM, ImageFile
from sfumato.data.pixels import Picture
from sfumato.data.store import Report, Rows

_PART = 1024
"""Images that are decoded before they are put on disk."""
_FILES = "files.json"
_PROGRESS_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """Images in the order of their files.

    Attributes:
        images: (N, C, S, S), torch.uint16 for one channel, else torch.uint8; 0 where unreadable.
        reasons: (N,), why an image is unreadable, or None.
        kept: (N,), what the centred square has of each image's area; 1 where unreadable. Private.
        store: Where the images lie on disk.
    """

    images: torch.Tensor
    reasons: list[str | None]
    kept: np.ndarray
    store: Rows | None = None

    @property
    def readable(self) -> torch.Tensor:
        """(N,), torch.bool."""
        return torch.tensor([reason is None for reason in self.reasons], dtype=torch.bool)

    @property
    def digests(self) -> np.ndarray:
        """(N, 32), uint8: SHA-256 of each image."""
        return store.sha256_of_each(self.images.numpy()) if self.store is None else self.store.columns["digests"]

    def seen(
        self, image_size: int, scale: Scale, labels: torch.Tensor | None = None, groups: list[str] | None = None
    ) -> ImageSet:
        """What a network of that size sees of them, normalised by these constants; without labels all have 0."""
        return ImageSet(
            self.images,
            torch.zeros(len(self.images), dtype=torch.int64) if labels is None else labels,
            self.readable,
            *scale,
            65535 if self.images.dtype == torch.uint16 else 255,
            groups=groups,
            crop=image_size if self.images.shape[-1] > image_size else None,
            store=self.store,
        )


def report_unreadable(names: Iterable[str], reasons: Sequence[str | None], report: Report) -> None:
    """Names to the owner what cannot be read."""
    for name, reason in zip(names, reasons, strict=True):
        if reason is not None:
            report(f"unreadable image {name}: {reason}; it contributes nothing")


def stored_type(channels: int) -> np.dtype:
    """The integers that images of so many channels are stored in."""
    return np.dtype(np.uint16 if channels == 1 else np.uint8)


def decode_cached(
    root: Path, files: Sequence[ImageFile], *, image_size: int, channels: int, resize: Resize = "crop", report: Report
) -> Decoded:
    """Like `decode_images`, from the cache where it has the image, and leaves the result there.

    A cache that cannot be written is reported and costs time and memory, not the run.

    Args:
        root: The folder; with the settings it names the cache's folder.
        files: The images, in the order in which they are returned.
        image_size: S, in pixels.
        channels: 1 or 3.
        resize: How an oblong picture becomes a square.
        report: Takes lines about progress.
    """
    how: dict[str, Any] = {"image_size": image_size, "channels": channels, "resize": resize}
    settings = {"root": str(root.resolve()), "rules": pixels.RULES_VERSION}
    settings["pillow"] = importlib.metadata.version("pillow")
    if any(file.name.lower().endswith(DICOM) for file in files):
        settings["pydicom"] = importlib.metadata.version("pydicom")
    slot = store.slot_of(settings | how, "images")
    if slot is not None:
        try:
            return _from_store(slot, settings, how, files, report)
        except OSError as error:
            report(f"the cache {slot} cannot be written ({error.strerror}); the images will be decoded again next time")
    report(f"decoding {len(files)} of {len(files)} images to {image_size} x {image_size} pixels")
    return decode_images(files, **how)


def _from_store(
    slot: Path, settings: dict[str, Any], how: dict[str, Any], files: Sequence[ImageFile], report: Report
) -> Decoded:
    """The images of a store for exactly these files, which is filled first where there is none: with images of the
    store that was made of the files as they were, where it has them; the others are decoded.
    """
    entries = [(file.name, file.path.name, *file.stamp, *(file.span or ())) for file in files]
    size, channels = how["image_size"], how["channels"]

    def fill(part: Path) -> None:
        store.write(part / _FILES, json.dumps(entries))
        shape, dtype = (channels, size, size), stored_type(channels)
        columns = {"values": (shape, dtype), "digests": ((32,), np.dtype(np.uint8)), "kept": ((), np.dtype(np.float32))}
        new = store.Filling(part, len(files), columns)
        before, known = slot / store.MADE, {}
        older = store.read(before) if store.settings_of(before) else None
        if older is not None:
            known = {tuple(entry): row for row, entry in enumerate(store.read_json(before / _FILES))}
        sources = np.array([known.get(entry, -1) for entry in entries], dtype=np.int64)
        missing = int((sources[new.num_filled :] < 0).sum())
        report(f"decoding {missing} of {len(files)} images to {size} x {size} pixels")
        last, done = time.monotonic(), 0
        started = last
        for start in range(new.num_filled, len(files), _PART):
            source = sources[start : start + _PART]
            decoded, copied = np.flatnonzero(source < 0).tolist(), np.flatnonzero(source >= 0).tolist()
            fresh = decode_images([files[start + at] for at in decoded], **how)
            reasons = dict(zip(decoded, fresh.reasons, strict=True))
            values, parts = np.zeros((len(source), *shape), dtype), np.ones(len(source), np.float32)
            values[decoded], parts[decoded] = fresh.images.numpy(), fresh.kept
            if older is not None:
                values[copied], parts[copied] = (older.columns[name][source[copied]] for name in ("values", "kept"))
                reasons |= {at: older.reasons.get(int(source[at])) for at in copied}
            bad = {start + at: reason for at, reason in reasons.items() if reason is not None}
            new.put(bad, values=values, digests=store.sha256_of_each(values), kept=parts)
            done += len(decoded)
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                report(formats.progress("decoding images", done, missing, last - started))

    folder, was_there = store.made(slot, {**settings, **how, "files": store.digest(entries)}, fill, report)
    if was_there:
        report(f"read {len(files)} images from the cache {slot}")
    found = store.read(folder)
    reasons = [found.reasons.get(index) for index in range(len(files))]
    return Decoded(torch.from_numpy(found.columns["values"]), reasons, found.columns["kept"], found)


def decode_images(
    files: Sequence[Path | ImageFile | Picture], *, image_size: int, channels: int, resize: Resize = "crop"
) -> Decoded:
    """Decodes files by several threads (Pillow decodes and resizes without Python's lock).

    Args:
        files: Each a file, a part of one, or an image in memory.
        image_size: S, in pixels.
        channels: 1 or 3.
        resize: How an oblong picture becomes a square.

    Returns:
        The images. A file that is damaged, has more than `pixels.MAX_PIXELS` pixels, or pixels of 32 bits, whose range
        nothing states, is no error but an unreadable image.

    Raises:
        InputError: If a file cannot be opened.
    """
    rows = np.zeros((len(files), channels, image_size, image_size), stored_type(channels))
    kept = np.ones((len(files), 1), np.float32)
    threads = min(16, os.cpu_count() or 1)
    with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor(threads) as executor:
        warnings.simplefilter("ignore")  # of metadata that nothing here reads, and of large images, which are refused
        reasons = list(executor.map(functools.partial(pixels.decode, resize=resize), files, rows, kept))
    return Decoded(torch.from_numpy(rows), reasons, kept[:, 0])
