"""From image files to squares of integers, each from its own file and public settings alone.

The rules, which never look at a second image:

- The container decides, not the extension: PNG, JPEG, BMP, WebP, TIFF; of several frames the first. A TIFF of several
  pages, of signed samples or of planes of 16 bits is unreadable.
- EXIF orientation is applied. Colour profiles are not.
- Transparency is composited on white. CMYK, palette and the like become RGB.
- 16-bit grey keeps its range: 65535 is white (4095 in a 12-bit TIFF, or in a PNG that says so by sBIT and holds no
  larger value), and 8-bit v equals 16-bit 257 v.
- The centred square of the shorter side's length is resized (bicubic with anti-aliasing) to
  `image_size`.
- One channel: luma (ITU-R 601), stored in 16 bits. Three channels: RGB, stored in 8 bits; grey is
  repeated.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import struct
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from sfumato.accounting import formats
from sfumato.data import store
from sfumato.data.images import ImageSet, Scale
from sfumato.data.listing import ImageFile
from sfumato.data.store import Report, Rows
from sfumato.errors import InputError, refusing

RULES_VERSION = 2
"""Goes up when a rule above changes, so that no cache of the old rule is read."""
MAX_PIXELS = 64_000_000
"""A larger image is not decoded (decompression bombs)."""
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_DRAFT_MARGIN = 2
_TIFF_SUBFILE, _TIFF_BITS_PER_SAMPLE, _TIFF_PHOTOMETRIC = 254, 258, 262
_TIFF_SAMPLES, _TIFF_PLANES, _TIFF_SAMPLE_FORMAT = 277, 284, 339
_SIGNIFICANT_BITS = "significant bits"
_ORIENTATION = 0x0112
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
        store: Where the images lie on disk.
    """

    images: torch.Tensor
    reasons: list[str | None]
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


class Picture:
    """An image in memory, as the PNG file that it would be: what it is taken for is then the same.

    Args:
        image: A PIL image; an array (H, W) or (H, W, 3) of uint8, or (H, W) of uint16; or a tensor (C, H, W) or (H, W)
            of uint8, or of numbers in [0, 1].
        name: What it is called in answers.

    Raises:
        InputError: If it is something else.
    """

    def __init__(self, image: Any, name: str) -> None:
        from PIL import Image

        self.name = name
        if isinstance(image, torch.Tensor):
            values = image.detach().cpu()
            values = values.movedim(0, -1).squeeze(-1) if values.ndim == 3 else values
            if values.is_floating_point() and values.numel() and 0 <= values.min() and values.max() <= 1:
                values = (values * 255).round().to(torch.uint8)
            image = values.numpy() if values.dtype in (torch.uint8, torch.uint16) else None
        kinds = {np.dtype(np.uint8): (2, 3), np.dtype(np.uint16): (2,)}
        if isinstance(image, np.ndarray) and image.ndim in kinds.get(image.dtype, ()) and image.shape[2:] in ((), (3,)):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise InputError(
                f"{name} is no image: give a file, a PIL image, an array (H, W, 3) of uint8, or a tensor (C, H, W) of "
                "uint8 or of numbers in [0, 1]."
            )
        file = io.BytesIO()
        exif = image.getexif()  # how it is turned
        image = image.convert("RGB") if image.mode in ("CMYK", "YCbCr", "LAB", "HSV") else image
        image.save(file, "PNG", exif=exif)
        self.content = file.getvalue()

    def __str__(self) -> str:
        return self.name

    def open(self) -> IO[bytes]:
        """The PNG file's bytes."""
        return io.BytesIO(self.content)


def report_unreadable(names: Iterable[str], reasons: Sequence[str | None], report: Report) -> None:
    """Names to the owner what cannot be read."""
    for name, reason in zip(names, reasons, strict=True):
        if reason is not None:
            report(f"unreadable image {name}: {reason}; it contributes nothing")


def stored_type(channels: int) -> np.dtype:
    """The integers that images of so many channels are stored in."""
    return np.dtype(np.uint16 if channels == 1 else np.uint8)


def decode_cached(root: Path, files: Sequence[ImageFile], *, image_size: int, channels: int, report: Report) -> Decoded:
    """Like `decode_images`, from the cache where it has the image, and leaves the result there.

    A cache that cannot be written is reported and costs time and memory, not the run.

    Args:
        root: The folder; with the settings it names the cache's folder.
        files: The images, in the order in which they are returned.
        image_size: S, in pixels.
        channels: 1 or 3.
        report: Takes lines about progress.
    """
    settings = {"root": str(root.resolve()), "image_size": image_size, "channels": channels, "rules": RULES_VERSION}
    settings["pillow"] = importlib.metadata.version("pillow")
    slot = store.slot_of(settings, "images")
    if slot is not None:
        try:
            return _from_store(slot, settings, files, report)
        except OSError as error:
            report(f"the cache {slot} cannot be written ({error.strerror}); the images will be decoded again next time")
    report(f"decoding {len(files)} of {len(files)} images to {image_size} x {image_size} pixels")
    return decode_images(files, image_size=image_size, channels=channels)


def _from_store(slot: Path, settings: dict[str, Any], files: Sequence[ImageFile], report: Report) -> Decoded:
    """The images of a store for exactly these files, which is filled first where there is none: with images of the
    store that was made of the files as they were, where it has them; the others are decoded.
    """
    entries = [(file.name, file.path.name, *file.stamp, *(file.span or ())) for file in files]
    size, channels = settings["image_size"], settings["channels"]

    def fill(part: Path) -> None:
        store.write(part / _FILES, json.dumps(entries))
        shape, dtype = (channels, size, size), stored_type(channels)
        new = store.Filling(part, len(files), {"values": (shape, dtype), "digests": ((32,), np.dtype(np.uint8))})
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
            fresh = decode_images([files[start + at] for at in decoded], image_size=size, channels=channels)
            reasons = dict(zip(decoded, fresh.reasons, strict=True))
            values = np.zeros((len(source), *shape), dtype)
            values[decoded] = fresh.images.numpy()
            if older is not None:
                values[copied] = older.columns["values"][source[copied]]
                reasons |= {at: older.reasons.get(int(source[at])) for at in copied}
            bad = {start + at: reason for at, reason in reasons.items() if reason is not None}
            new.put(bad, values=values, digests=store.sha256_of_each(values))
            done += len(decoded)
            if time.monotonic() - last > _PROGRESS_SECONDS:
                last = time.monotonic()
                report(formats.progress("decoding images", done, missing, last - started))

    folder, was_there = store.made(slot, {**settings, "files": store.digest(entries)}, fill, report)
    if was_there:
        report(f"read {len(files)} images from the cache {slot}")
    found = store.read(folder)
    reasons = [found.reasons.get(index) for index in range(len(files))]
    return Decoded(torch.from_numpy(found.columns["values"]), reasons, found)


def decode_images(files: Sequence[Path | ImageFile | Picture], *, image_size: int, channels: int) -> Decoded:
    """Decodes files by several threads (Pillow decodes and resizes without Python's lock).

    Args:
        files: Each a file, a part of one, or an image in memory.
        image_size: S, in pixels.
        channels: 1 or 3.

    Returns:
        The images. A file that is damaged, has more than `MAX_PIXELS` pixels, or pixels of 32 bits, whose range
        nothing states, is no error but an unreadable image.

    Raises:
        InputError: If a file cannot be opened.
    """
    rows = np.zeros((len(files), channels, image_size, image_size), stored_type(channels))
    threads = min(16, os.cpu_count() or 1)
    with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor(threads) as executor:
        warnings.simplefilter("ignore")  # of metadata that nothing here reads, and of large images, which are refused
        reasons = list(executor.map(_decode, files, rows))
    return Decoded(torch.from_numpy(rows), reasons)


def _decode(path: Path | ImageFile | Picture, into: np.ndarray) -> str | None:
    """Fills (C, S, S) integers from one file; or says why it cannot be read."""
    from PIL import Image

    with refusing(f"image {path} cannot be opened", "Make it readable, or take it out of the folder.", OSError):
        file = path.open("rb") if isinstance(path, Path) else path.open()
    with file:
        try:
            image = Image.open(file, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            _refuse_layout(image)
            if image.format == "PNG" and image.mode in _GREY_16:
                image.info[_SIGNIFICANT_BITS] = _significant_bits(file)
            into[:] = _to_square(image, into.shape[-1], len(into))
        except Image.DecompressionBombError:
            return f"it has more than {MAX_PIXELS // 10**6} million pixels, the limit: make it smaller"
        except Image.UnidentifiedImageError:
            return f"it holds none of {', '.join(FORMATS)}"
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise nearly every type on damaged files
            return " ".join(str(error).split()) or type(error).__name__
    return None


def _refuse_layout(image: Any) -> None:
    """Raises ValueError for a TIFF that Pillow would read otherwise than it is meant."""
    if image.format != "TIFF":
        return
    tags, pages = image.tag_v2, 0
    bits = tags.get(_TIFF_BITS_PER_SAMPLE, (1,))[0]
    if bits <= 16 and set(tags.get(_TIFF_SAMPLE_FORMAT, (1,))) == {2}:
        raise ValueError("it is a TIFF of signed samples: save them unsigned")
    is_planar = tags.get(_TIFF_PLANES, 1) == 2 and tags.get(_TIFF_SAMPLES, 1) > 1
    if is_planar and bits > 8:
        raise ValueError("it is a TIFF of 16 bits with a plane for each colour: save the colours of a pixel together")
    for page in range(image.n_frames):
        image.seek(page)
        pages += not image.tag_v2.get(_TIFF_SUBFILE, 0) & 1  # a smaller copy is no page
    image.seek(0)
    if pages > 1:
        raise ValueError(f"it is a TIFF of {pages} pages: save each in a file of its own")


def _significant_bits(file: IO[bytes]) -> int:
    """How many bits of a grey PNG's samples count, by its sBIT; else 16."""
    place, bits, kind = file.tell(), 16, b""
    file.seek(8)
    while kind not in (b"sBIT", b"IDAT", b"IEND") and len(head := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", head)
        if kind == b"sBIT":
            bits = int.from_bytes(file.read(1), "big")
        file.seek(size + 4, os.SEEK_CUR)
    file.seek(place)
    return bits if 0 < bits <= 16 else 16


def _to_square(image: Any, image_size: int, channels: int) -> np.ndarray:
    # A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, several times faster; twice the size
    # that is needed is left to the resize below, so that the filter stays good (one or two grey
    # levels of difference).
    image.draft(None, (_DRAFT_MARGIN * image_size, _DRAFT_MARGIN * image_size))
    image.load()
    if image.mode in ("I", "F"):
        raise ValueError("it has pixels of 32 bits, whose range is unknown: convert it to 8 or 16 bits")
    is_grey = channels == 1 or image.mode in _GREY_16
    square = _resize(_upright(_grey(image) if is_grey else _opaque(image).convert("RGB"), image), image_size)
    pixels = np.asarray(square)
    if not is_grey:
        return pixels.transpose(2, 0, 1)
    pixels = np.clip(np.rint(pixels), 0, 65535)  # bicubic overshoots: unclipped, white would wrap to black
    return pixels[None] if channels == 1 else np.broadcast_to(np.rint(pixels / 257), (3, *pixels.shape))


def _grey(image: Any) -> Any:
    """Luma as 32-bit float in [0, 65535]; Pillow's own conversion of 16-bit grey cuts all above 255
    to white.
    """
    from PIL import Image

    if image.mode not in _GREY_16:
        return Image.fromarray(np.asarray(_opaque(image).convert("L")).astype(np.float32) * 257)
    pixels = np.asarray(image).astype(np.float32)
    largest = 2 ** image.info.get(_SIGNIFICANT_BITS, 16) - 1
    if pixels.max() <= largest:  # else its bits were moved to the top, as the standard asks
        pixels *= 65535 / largest
    if image.format == "TIFF":
        tags = image.tag_v2
        pixels *= 65535 / (2 ** tags.get(_TIFF_BITS_PER_SAMPLE, (16,))[0] - 1)
        if tags.get(_TIFF_PHOTOMETRIC) == 0:  # 0 is white, as in some X-rays; Pillow inverts 8 bits only
            pixels = 65535 - pixels
    return Image.fromarray(pixels)


def _opaque(image: Any) -> Any:
    """Any 8-bit mode as one that converts to grey and to RGB without surprise."""
    from PIL import Image

    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else image


def _upright(image: Any, original: Any) -> Any:
    """Applies the EXIF orientation of the original; unreadable EXIF is none."""
    from PIL import Image

    turn = Image.Transpose
    turns = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    turns |= {6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90}
    orientation = 1
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error):
        orientation = original.getexif().get(_ORIENTATION, 1)
    return image.transpose(turns[orientation]) if orientation in turns else image


def _resize(image: Any, image_size: int) -> Any:
    """The centred square, resized; untouched where it has that size already."""
    from PIL import Image

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    # Cut first: what `resize` makes of a box differs between versions of Pillow.
    square = image.crop((left, top, left + side, top + side))
    return square.resize((image_size, image_size), Image.Resampling.BICUBIC, reducing_gap=3.0)
