"""DICOM: a file's picture, and whose it is. Of its header nothing else is used, and nothing is kept.

Grey: stored values, modality LUT or rescale, then VOI LUT or the first window, by pydicom. The darkest value that these
steps can give is black, the brightest white, in 16 bits: without VOI LUT and window all that the stored bits can hold.
MONOCHROME1 is turned round. Colour: RGB, YBR and PALETTE COLOR, in 8 bits. Several frames, more than 16 bits or a
compression that nothing here decodes are unreadable.
"""

import io
import warnings
import zlib
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from sfumato.data.listing import ImageFile
from sfumato.errors import InputError, naming, refusing

_START = 132
"""Where the header starts, behind 128 bytes and a mark."""
_JP2 = b"\0\0\0\x0cjP  "  # a file of JPEG 2000 in its boxes, in which pydicom 3 looks for the picture without end
_MOST_BYTES, _MOST_BYTES_OF_RLE = 2**29, 2**24  # each of the latter becomes 64 at most
_PATIENT_ID, _HEADER = 0x00100020, 2**20
"""The tag, and how many bytes it is looked for in."""
_ANEW = "save it anew, uncompressed, or as PNG of 8 or 16 bits"


def is_dicom(content: bytes) -> bool:
    """Whether a file that begins so is DICOM."""
    return content[_START - 4 : _START] == b"DICM"


def picture(file: IO[bytes], most_pixels: int) -> Any:
    """The picture for Pillow: grey of 16 bits, or colour of 8.

    Raises:
        InputError: If there is none, or it is of a kind that is not read.
        Image.DecompressionBombError: If it has more pixels.
    """
    from PIL import Image
    from pydicom import pixels

    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise InputError(f"it has more than {_MOST_BYTES} bytes, the limit of a DICOM file: save it anew as PNG")
    dataset = _dataset(content)
    if "PixelData" not in dataset:
        raise InputError("it is DICOM without a picture (a report, a plan or the like): take it out")
    frames, syntax = dataset.get("NumberOfFrames") or 1, dataset.file_meta.TransferSyntaxUID
    if frames > 1:
        raise InputError(f"it is DICOM of {frames} frames: save each in a file of its own")
    if dataset.BitsStored > 16:
        raise InputError(f"it is DICOM of {dataset.BitsStored} bits: convert it to 8 or 16 bits")
    if "SegmentedRedPaletteColorLookupTableData" in dataset:
        raise InputError(f"it is DICOM with a segmented palette, which is not read: {_ANEW}")
    if dataset.Rows * dataset.Columns > most_pixels:
        raise Image.DecompressionBombError
    try:
        decoder = pixels.get_decoder(syntax)
    except NotImplementedError:
        decoder = None
    is_large = syntax.name == "RLE Lossless" and len(dataset.PixelData) > _MOST_BYTES_OF_RLE
    is_odd = is_large or _JP2 in dataset.PixelData
    if decoder is None or not decoder.is_available or is_odd:
        raise InputError(f"it is DICOM as {syntax.name}{' of this form or size' * is_odd}, which is not read: {_ANEW}")
    stored, facts = decoder.as_array(dataset, index=0)
    kind, bits = facts["photometric_interpretation"], dataset.BitsStored
    if kind in ("MONOCHROME1", "MONOCHROME2"):
        return Image.fromarray(_grey(stored, dataset, kind))
    if kind == "PALETTE COLOR":
        stored = pixels.apply_color_lut(stored, dataset)
        bits = min(8 * stored.itemsize, dataset.RedPaletteColorLookupTableDescriptor[2])
    elif kind != "RGB":
        raise InputError(f"it is DICOM whose colours are {kind}, which is not read: {_ANEW}")
    return Image.fromarray(np.rint(stored * (255 / (2**bits - 1))).clip(0, 255).astype(np.uint8))


def _grey(stored: np.ndarray, dataset: Any, kind: Any) -> np.ndarray:
    """(H, W), uint16."""
    from pydicom import pixels

    shown = pixels.apply_voi_lut(pixels.apply_modality_lut(stored, dataset), dataset)
    luts = dataset.get("VOILUTSequence") or dataset.get("ModalityLUTSequence")
    if luts:
        black, white = 0, 2 ** luts[0].LUTDescriptor[2] - 1
    else:
        lowest = -(2 ** (dataset.BitsStored - 1)) if dataset.PixelRepresentation else 0
        black, white = pixels.apply_rescale(np.array([lowest, lowest + 2**dataset.BitsStored - 1]), dataset)
        if shown.dtype != np.float64 or dataset.get("WindowWidth") is None or dataset.get("WindowCenter") is None:
            black, white = min(black, white), max(black, white)  # a window turns a falling slope round itself
    grey = (shown.astype(np.float64) - black) * (65535 / (float(white) - float(black)))
    if not np.isfinite(grey).all():
        raise InputError(f"it is DICOM whose rescaling gives no numbers: {_ANEW}")
    grey = np.rint(grey.clip(0, 65535)).astype(np.uint16)
    return 65535 - grey if kind == "MONOCHROME1" else grey


def patients_of(files: Sequence[ImageFile]) -> list[str | None]:
    """Each file's PatientID; None where it has none. For memory alone: it is written nowhere, hashed neither, since
    whoever tries all numbers finds a hash.
    """
    found: list[str | None] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some repeat what stands in the file
        for each in files:
            with refusing(f"image {each} cannot be opened", "Make it readable.", OSError), each.open() as file:
                head = file.read(_HEADER)
            with naming(str(each)):
                dataset = _dataset(head, _PATIENT_ID) if is_dicom(head) else {}
            found.append(str(dataset[_PATIENT_ID].value or "") if _PATIENT_ID in dataset else None)
    return found


def _dataset(content: bytes, last: int | None = None) -> Any:
    """What stands in a file; given a `last` tag that alone, and nothing behind it is looked at."""
    from pydicom import dataset, filereader, uid

    read: Any = filereader.read_dataset
    file = io.BytesIO(content)
    file.seek(_START)
    try:
        meta = dataset.FileMetaDataset(read(file, False, True, stop_when=lambda tag, *_: tag >> 16 != 2))
        syntax = meta.TransferSyntaxUID
        if syntax == uid.DeflatedExplicitVRLittleEndian:
            inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            file = io.BytesIO(inflate.decompress(file.read(), _MOST_BYTES))
            if inflate.unconsumed_tail:
                raise InputError(f"it is DICOM that inflates to more than {_MOST_BYTES} bytes: save it anew")
        only = {} if last is None else {"specific_tags": [last], "stop_when": lambda tag, *_: tag > last}
        found = read(file, syntax.is_implicit_VR, syntax.is_little_endian, **only)
        _ = last and found.get(last)  # raises here what its value may
    except (InputError, MemoryError):
        raise
    except Exception as error:  # pydicom raises nearly every type on damaged files, and repeats what stands in them
        raise InputError(f"it is damaged DICOM ({type(error).__name__}): put the original there, or {_ANEW}") from None
    found.file_meta = meta
    return found
