"""From an image file to a square of integers, by that file and public settings alone.

The rules, which never look at a second image:

- The container decides, not the extension: PNG, JPEG, BMP, WebP, TIFF; of several frames the first. A TIFF of several
  pages, of signed samples or of planes of 16 bits is unreadable. DICOM is read under its own names (`dicom`).
- EXIF orientation is applied. Colour profiles are not.
- Transparency is composited on white. CMYK, palette and the like become RGB.
- 16-bit grey keeps its range: 65535 is white (4095 in a 12-bit TIFF, or in a PNG that says so by sBIT and holds no
  larger value), and 8-bit v equals 16-bit 257 v.
- Of an oblong picture the centred square is taken (`data.resize = "crop"`), or it is made a square by black beside it
  ("pad") or by other proportions ("stretch"); that is resized to `image_size` (bicubic with anti-aliasing).
- One channel: luma (ITU-R 601), stored in 16 bits. Three channels: RGB, stored in 8 bits; grey is
  repeated.
"""

import contextlib
import io
import os
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from sfumato.config import Resize
from sfumato.data import dicom
from sfumato.data.listing import DICOM, ImageFile
from sfumato.errors import InputError, refusing

RULES_VERSION = 3
"""Goes up when a rule above changes, so that no cache of the old rule is read, and no model that was trained by the
old rule answers by the new.
"""
MAX_PIXELS = 64_000_000
"""A larger image is not decoded (decompression bombs)."""
_MOST_BYTES = 2**29
"""Of a PNG file: what so many pixels take, not compressed."""
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")
_GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
_DRAFT_MARGIN = 2
_TIFF_SUBFILE, _TIFF_BITS_PER_SAMPLE, _TIFF_PHOTOMETRIC = 254, 258, 262
_TIFF_SAMPLES, _TIFF_PLANES, _TIFF_SAMPLE_FORMAT = 277, 284, 339
_SIGNIFICANT_BITS = "significant bits"
_ANEW = "or save it anew as PNG of 8 or 16 bits"
_HEAD, _DEPTH = 132, 24
"""Bytes at a file's beginning, and which of them says how many bits a sample of a PNG has."""
_PNG = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_TEXTS_READ = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0\0")
"""How texts of a PNG begin that may say how it is turned; the second is not compressed."""
_ORIENTATION = 0x0112


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
        modes = {"PA": "RGBA", "RGBa": "RGBA"} | dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB")
        with refusing(f"{name} cannot be decoded", "Give an image whose file is whole.", OSError, SyntaxError):
            image.load()
        with refusing(f"{name} cannot be written as PNG", "Give it in mode L, I;16, RGB or RGBA.", OSError):
            image = image.convert(modes[image.mode]) if image.mode in modes else image
            image.save(file, "PNG", exif=exif)
        self.content = file.getvalue()

    def __str__(self) -> str:
        return self.name

    def open(self) -> IO[bytes]:
        """The PNG file's bytes."""
        return io.BytesIO(self.content)


def decode(path: Path | ImageFile | Picture, into: np.ndarray, kept: np.ndarray, resize: Resize) -> str | None:
    """Fills (C, S, S) integers and (1,), the share of its area, from one file; or says why it cannot be read."""
    from PIL import Image

    with refusing(f"image {path} cannot be opened", "Make it readable, or take it out of the folder.", OSError):
        file = path.open("rb") if isinstance(path, Path) else path.open()
    with file:
        head = file.read(_HEAD)
        file.seek(0)
        try:
            content, bits = _of_png(file) if head.startswith(_PNG) else (file, None)
            if dicom.is_dicom(head) and path.name.lower().endswith(DICOM):
                image = dicom.picture(file, MAX_PIXELS)
            else:
                image = Image.open(content, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            _refuse_layout(image)
            if bits and image.mode in ("1", "L") and "transparency" in image.info and (depth := head[_DEPTH]) < 8:
                image.info["transparency"] *= 255 // (2**depth - 1)  # as the pixels are, which Pillow leaves out
            image.info[_SIGNIFICANT_BITS], part = bits or 16, min(image.size) / max(image.size)
            into[:] = _to_square(image, into.shape[-1], len(into), resize)
            kept[:] = part
        except Image.DecompressionBombError:
            return f"it has more than {MAX_PIXELS // 10**6} million pixels, the limit: make it smaller"
        except Image.UnidentifiedImageError:
            named = [name for name in FORMATS if (accepts := Image.OPEN[name][1]) and accepts(head)]
            if named:
                return f"it is a damaged {named[0]}, or of a kind that is not read: put the original there, {_ANEW}"
            known = ", ".join((*FORMATS, "DICOM"))
            what = f"holds none of {known}: convert it to PNG" if head else "is empty: put the image there"
            return f"it {what}, or take it out"
        except InputError as error:
            return str(error)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise nearly every type on damaged files
            said = " ".join(str(error).split()) or type(error).__name__
            return f"it cannot be decoded ({said}): put the original there, {_ANEW}"
    return None


def _refuse_layout(image: Any) -> None:
    """Raises InputError for a TIFF that Pillow would read otherwise than it is meant."""
    if image.format != "TIFF":
        return
    tags, pages = image.tag_v2, 0
    bits = tags.get(_TIFF_BITS_PER_SAMPLE, (1,))[0]
    if bits <= 16 and set(tags.get(_TIFF_SAMPLE_FORMAT, (1,))) == {2}:
        raise InputError("it is a TIFF of signed samples: save them unsigned")
    if bits > 8 and tags.get(_TIFF_PLANES, 1) == 2 and tags.get(_TIFF_SAMPLES, 1) > 1:
        raise InputError("it is a TIFF of 16 bits with a plane for each colour: save the colours of a pixel together")
    for page in range(image.n_frames):
        image.seek(page)
        pages += not image.tag_v2.get(_TIFF_SUBFILE, 0) & 1  # a smaller copy is no page
    image.seek(0)
    if pages > 1:
        raise InputError(f"it is a TIFF of {pages} pages: save each in a file of its own")


def _of_png(file: IO[bytes]) -> tuple[IO[bytes], int]:
    """A PNG without profile and texts, which Pillow refuses where they are large, and how many bits of a grey sample
    count, by its sBIT; else 16.
    """
    if file.seek(0, os.SEEK_END) > _MOST_BYTES:
        raise InputError(f"it has more than {_MOST_BYTES} bytes, the limit of a PNG: save it anew")
    file.seek(0)
    content = file.read()
    pieces, bits, place = [content[:8]], 16, 8
    while len(content) - place >= 8:
        size, kind = struct.unpack_from(">I4s", content, place)
        chunk = content[place : place + size + 12]
        if kind == b"sBIT" and 0 < chunk[8] <= 16:
            bits = chunk[8]
        if kind != b"iCCP" and (kind not in _TEXTS or chunk[8:].startswith(_TEXTS_READ)):
            pieces.append(chunk)
        place += len(chunk)
    return io.BytesIO(b"".join(pieces)), bits


def _to_square(image: Any, image_size: int, channels: int, resize: Resize) -> np.ndarray:
    # A JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, several times faster; twice the size
    # that is needed is left to the resize below, so that the filter stays good (one or two grey
    # levels of difference).
    image.draft(None, (_DRAFT_MARGIN * image_size, _DRAFT_MARGIN * image_size))
    image.load()
    if image.mode in ("I", "F"):
        raise InputError("it has pixels of 32 bits, whose range is unknown: convert it to 8 or 16 bits")
    is_grey = channels == 1 or image.mode in _GREY_16
    upright = _upright(_grey(image) if is_grey else _opaque(image).convert("RGB"), image)
    pixels = np.asarray(_resize(upright, image_size, resize))
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
    is_transparent = pixels == image.info.get("transparency", -1)
    largest = 2 ** image.info.get(_SIGNIFICANT_BITS, 16) - 1
    if pixels.max() <= largest:  # else its bits were moved to the top, as the standard asks
        pixels *= 65535 / largest
    if image.format == "TIFF":
        tags = image.tag_v2
        pixels *= 65535 / (2 ** tags.get(_TIFF_BITS_PER_SAMPLE, (16,))[0] - 1)
        if tags.get(_TIFF_PHOTOMETRIC) == 0:  # 0 is white, as in some X-rays; Pillow inverts 8 bits only
            pixels = 65535 - pixels
    pixels[is_transparent] = 65535
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


def _resize(image: Any, image_size: int, how: Resize) -> Any:
    """A square of that size; untouched where it has it already."""
    from PIL import Image

    if how == "crop":  # first: what `resize` makes of a box differs between versions of Pillow
        image = _centre(image, min(image.size))
    size: tuple[int, ...] = (image_size, image_size)
    if how == "pad":
        size = tuple(max(1, round(image_size * side / max(image.size))) for side in image.size)
    return _centre(image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0), image_size)


def _centre(image: Any, side: int) -> Any:
    """The square in the middle; black where it is larger than the image."""
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))
