"""DICOM files are images as PNG files are, and their PatientID is written nowhere."""

import importlib.metadata
import io
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom import pixels, uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence

import sfumato
from sfumato.config import DataConfig
from sfumato.data import listing
from sfumato.data.decoding import decode_images
from sfumato.data.examples import dataset_digest
from sfumato.data.folders import Listing
from tests.data.conftest import quiet, refused, tar_of

SIZE = 16
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
SHIPPED = Path(pydicom.data.__file__).parent / "test_files"
SECRET = "Quxley^Zebra-7741"


def dicom(values, kind="MONOCHROME2", bits=8, syntax=uid.ExplicitVRLittleEndian, **more) -> bytes:
    """A DICOM file of these stored values."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = uid.SecondaryCaptureImageStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = uid.generate_uid()
    dataset.Rows, dataset.Columns = values.shape[:2]
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = (3 if values.ndim == 3 else 1), kind
    if values.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 8 * values.itemsize, bits, bits - 1
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    dataset.PixelData = values.tobytes()
    dataset["PixelData"].VR = "OB" if values.itemsize == 1 else "OW"
    for name, value in more.items():
        setattr(dataset, name, value)
    file = io.BytesIO()
    pydicom.dcmwrite(file, dataset, enforce_file_format=True)
    return file.getvalue()


def stored(bits, is_signed=False, channels=()):
    """Values of all sizes that so many bits can hold, the least and the largest among them."""
    lowest = -(2 ** (bits - 1)) if is_signed else 0
    found = np.random.default_rng(bits).integers(lowest, lowest + 2**bits, (SIZE, SIZE, *channels))
    found.flat[:2] = lowest, lowest + 2**bits - 1
    return found.astype(("i" if is_signed else "u") + str(1 if bits <= 8 else 2))


def decode(path, channels=1):
    decoded = decode_images([path], image_size=SIZE, channels=channels)
    return decoded.images[0].numpy().astype(np.int64), decoded.reasons[0]


def truth(dataset, black=None, white=None):
    """By pydicom's functions: grey from 0 to 65535, or colour from 0 to 255. Black and white, where not given, are what
    the least and the largest stored value become, or what a window makes of values far outside.
    """
    kind, values = dataset.PhotometricInterpretation, dataset.pixel_array
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        if kind == "PALETTE COLOR":
            values = pixels.apply_color_lut(values, dataset)
        bits = 8 if values.dtype == np.uint8 else 16 if kind == "PALETTE COLOR" else dataset.BitsStored
        return np.rint(values.astype(float) * 255 / (2**bits - 1)).astype(np.int64)
    shown = pixels.apply_voi_lut(pixels.apply_modality_lut(values, dataset), dataset)
    lowest = -(2 ** (dataset.BitsStored - 1)) if dataset.PixelRepresentation else 0
    ends = pixels.apply_modality_lut(np.array([lowest, lowest + 2**dataset.BitsStored - 1]), dataset)
    if "WindowWidth" in dataset:
        ends = pixels.apply_windowing(np.array([-1e9, 1e9]), dataset)
    black, white = (ends[0], ends[1]) if black is None else (black, white)
    grey = np.rint((shown.astype(np.float64) - black) * (65535 / (white - black))).clip(0, 65535).astype(np.int64)
    return 65535 - grey if kind == "MONOCHROME1" else grey


RESCALED = {"RescaleSlope": 2, "RescaleIntercept": -100}
STEPS = {
    "stored": {},
    "rescaled": RESCALED,
    "window": {"WindowCenter": 40, "WindowWidth": 80},
    "rescaled window": RESCALED | {"WindowCenter": ["40", "1"], "WindowWidth": ["80", "2"]},
    "sigmoid": {"WindowCenter": 40, "WindowWidth": 80, "VOILUTFunction": "SIGMOID"},
    "falling window": {"RescaleSlope": -1, "RescaleIntercept": 100, "WindowCenter": 40, "WindowWidth": 80},
}


@pytest.mark.parametrize(("at", "steps"), list(enumerate(STEPS)))
@pytest.mark.parametrize(("column", "bits"), list(enumerate([8, 12, 16])))
def test_grey_is_what_pydicom_shows_from_black_to_white(tmp_path, at, steps, column, bits):
    """Kinds and signs alternate: each meets all steps and all numbers of bits."""
    kind, is_signed = f"MONOCHROME{1 + (at + column) % 2}", (at // 2 + column) % 2 == 1
    path = tmp_path / "x.dcm"
    path.write_bytes(dicom(stored(bits, is_signed), kind, bits, **STEPS[steps]))
    found, reason = decode(path)
    expected = truth(pydicom.dcmread(path))
    assert reason is None and np.ptp(expected) > 50_000
    np.testing.assert_array_equal(found[0], expected)
    for channel in decode(path, 3)[0]:
        np.testing.assert_array_equal(channel, np.rint(expected / 257))


def test_a_falling_rescale_without_a_window_shows_the_largest_result_white(tmp_path):
    values = stored(12)
    (tmp_path / "x.ima").write_bytes(dicom(values, bits=12, RescaleSlope=-1, RescaleIntercept=4095))
    np.testing.assert_array_equal(
        decode(tmp_path / "x.ima")[0][0], np.rint((4095 - values.astype(float)) * 65535 / 4095)
    )


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_tables_of_grey_are_looked_up(tmp_path, bits):
    lut, path, values = Dataset(), tmp_path / "x.dicom", stored(8)
    table = np.array([(index * 7919) % 2**bits for index in range(256)])
    lut.LUTDescriptor, lut.ModalityLUTType = [256, 0, bits], "US"
    lut.add_new("LUTData", "US", table.tolist())
    for name in ("ModalityLUTSequence", "VOILUTSequence")[bits == 12 :]:  # of 12 bits pydicom has the latter alone
        path.write_bytes(dicom(values, **{name: Sequence([lut])}))
        np.testing.assert_array_equal(decode(path)[0][0], truth(pydicom.dcmread(path), 0, 2**bits - 1))
        np.testing.assert_array_equal(decode(path)[0][0], np.rint(table[values] * (65535 / (2**bits - 1))))


def test_colours_are_what_pydicom_shows(tmp_path):
    rgb, path = stored(8, channels=(3,)), tmp_path / "x.dcm"
    path.write_bytes(dicom(rgb, "RGB"))
    np.testing.assert_array_equal(decode(path, 3)[0], rgb.transpose(2, 0, 1))
    path.write_bytes(dicom(pixels.convert_color_space(rgb, "RGB", "YBR_FULL"), "YBR_FULL"))
    np.testing.assert_array_equal(decode(path, 3)[0], truth(pydicom.dcmread(path)).transpose(2, 0, 1))
    assert np.abs(decode(path, 3)[0] - rgb.transpose(2, 0, 1)).max() <= 2
    path.write_bytes(dicom(stored(16, channels=(3,)), "RGB", 16))
    np.testing.assert_array_equal(decode(path, 3)[0], truth(pydicom.dcmread(path)).transpose(2, 0, 1))
    for depth, allocated in ((8, 8), (16, 16), (8, 16)):
        table, values = np.random.default_rng(depth).integers(0, 2**depth, (3, 256)), stored(8)
        palette = {}
        for channel, name in enumerate(("Red", "Green", "Blue")):
            data = table[channel].astype(f"<u{allocated // 8}").tobytes()
            palette |= {f"{name}PaletteColorLookupTableDescriptor": [256, 0, depth]}
            palette |= {f"{name}PaletteColorLookupTableData": data}
        path.write_bytes(dicom(values, "PALETTE COLOR", **palette))
        shown = np.rint(table[:, values] * 255 / (2**depth - 1))
        np.testing.assert_array_equal(decode(path, 3)[0], shown)
    path.write_bytes(dicom(stored(8), "PALETTE COLOR", SegmentedRedPaletteColorLookupTableData=bytes([1, 0, 255, 255])))
    assert "segmented palette" in decode(path, 3)[1]  # a few bytes of which may stand for thousands of millions


REFUSED = {
    "holds none of": "ExplVR_BigEndNoMeta ExplVR_LitEndNoMeta no_meta rtstruct",
    "DICOM as JPEG": "GDCMJ2K_TextGBR JPEGLSNearLossless_08 JPEGLSNearLossless_16 MR_small_jpeg_ls_lossless "
    "SC_rgb_jls_lossy_line SC_rgb_jls_lossy_sample SC_rgb_jpeg_gdcm",
    "cannot be decoded": "JPEG-lossy JPEG2000-embedded-sequence-delimiter JPGExtended MR_truncated "
    "badVR nested_priv_SQ",
    "frames: save each": "SC_rgb_rle_16bit_2frame SC_rgb_rle_2frame SC_rgb_rle_32bit_2frame examples_ybr_color rtdose "
    "rtdose_expb rtdose_rle",
    "of 32 bits": "SC_rgb_rle_32bit rtdose_1frame rtdose_expb_1frame rtdose_rle_1frame",
    "without a picture": "UN_sequence DICOMDIR-empty empty_charset_LEI no_meta_group_length priv_SQ reportsi "
    "reportsi_with_empty_number_tags rtplan rtplan_truncated test-SR waveform_ecg",
    "damaged DICOM": "meta_missing_tsyntax",
}


def test_each_of_pydicom_s_own_files_is_shown_as_pydicom_does_or_refused_by_name():
    files, found, equal = sorted(SHIPPED.rglob("*.dcm")), {}, 0
    reasons = decode_images(files, image_size=4, channels=1).reasons
    for path, reason in zip(files, reasons, strict=True):
        if reason is not None:
            found[path.stem] = next((why for why in REFUSED if why in reason), reason)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = truth(pydicom.dcmread(path))
        side, is_grey = min(expected.shape[:2]), expected.ndim == 2
        top, left = ((length - side) // 2 for length in expected.shape[:2])
        decoded = decode_images([path], image_size=side, channels=1 if is_grey else 3).images[0].numpy()
        centre = expected[top : top + side, left : left + side]
        np.testing.assert_array_equal(decoded[0] if is_grey else decoded.transpose(1, 2, 0), centre, str(path))
        equal += 1
    assert found == {name: why for why, names in REFUSED.items() for name in names.split()}
    assert equal == len(files) - len(found) >= 37


def test_a_stranger_s_file_neither_fills_memory_nor_is_taken_for_another(tmp_path, monkeypatch):
    path, plain = tmp_path / "x.dcm", dicom(stored(8))
    deflated = dicom(stored(8), syntax=uid.DeflatedExplicitVRLittleEndian)
    path.write_bytes(deflated)
    np.testing.assert_array_equal(decode(path)[0], stored(8)[None].astype(np.int64) * 257)
    monkeypatch.setattr("sfumato.data.dicom._MOST_BYTES", 2**20)
    header = deflated[: 144 + int.from_bytes(deflated[140:144], "little")]
    squeezed = zlib.compressobj(wbits=-15)
    path.write_bytes(header + squeezed.compress(b"\x08\0\x08\0UN\0\0\0\0\0\1" + bytes(2**24)) + squeezed.flush())
    assert "inflates to more than" in decode(path)[1] and path.stat().st_size < 2**16
    rows = plain.index(b"\x28\0\x10\0US")
    path.write_bytes(plain[: rows + 8] + b"\xff\xff" + plain[rows + 10 : rows + 18] + b"\xff\xff" + plain[rows + 20 :])
    assert "64 million pixels" in decode(path)[1]
    monkeypatch.setattr("sfumato.data.dicom._MOST_BYTES_OF_RLE", 2**10)
    assert "RLE Lossless of this form or size" in decode(SHIPPED / "MR_small_RLE.dcm")[1]
    boxes = (SHIPPED / "JPEG2000.dcm").read_bytes()
    path.write_bytes(boxes.replace(b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  " + bytes(64) + b"\xff\x4f\xff\x51"))
    assert "of this form" in decode(path)[1]  # pydicom would look for the picture for ever
    path.write_bytes(plain[:500])
    assert "DICOM" in decode(path)[1]
    path.write_bytes(dicom(stored(8), RescaleSlope="1.5", RescaleIntercept="1").replace(b"1.5 ", b"nan "))
    assert "rescaling gives no numbers" in decode(path)[1]
    path.rename(tmp_path / "x.png")
    assert "holds none of" in decode(tmp_path / "x.png")[1]


def people(root, ids, **more):
    """A folder of two classes, one picture for each PatientID in order."""
    for number, patient in enumerate(ids):
        path = root / ("bright" if number % 2 else "dark") / f"{number:03}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 128, (SIZE, SIZE), np.uint8) + np.uint8(number % 2 * 128)
        path.write_bytes(dicom(values, **({} if patient is None else {"PatientID": patient}), **more))
    return root


def listed(root, said=quiet, group_by="PatientID"):
    return Listing(DataConfig(name="folder", group_by=group_by, channels=1, image_size=SIZE), root, said)


@pytest.mark.parametrize("syntax", [uid.ImplicitVRLittleEndian, uid.DeflatedExplicitVRLittleEndian])
def test_a_person_is_who_the_files_name_and_stays_on_one_side(tmp_path, syntax):
    ids = [f"{SECRET}-{number // 3}" for number in range(90)]
    found = listed(people(tmp_path / "a", ids, syntax=syntax))
    sides = {part: {found.files[place].group for place in places} for part, places in found.parts.items()}
    assert found.facts.num_people == len(sides["train"]) >= 20 and len(sides["test"]) > 2
    assert not sides["train"] & sides["test"] and sides["train"] | sides["test"] == set(ids)


def test_what_is_said_and_digested_names_files_and_no_person(tmp_path):
    said, ids = [], [f"{SECRET}-{number // 3}" for number in range(60)]
    root = people(tmp_path / "a", [*ids, SECRET.upper(), SECRET.lower()])
    data = listed(root, said.append).load()
    (line,) = (line for line in said if "upper and lower case" in line)
    assert "dark/060.dcm" in line and "bright/061.dcm" in line
    parts = b"".join(part for each in (data.train, data.held_out) for part in each.content())
    assert SECRET.encode() not in parts and SECRET.casefold() not in "".join(said).casefold()
    renamed = people(tmp_path / "b", [f"Other-{patient}" for patient in [*ids, SECRET.upper(), SECRET.lower()]])
    assert dataset_digest(listed(root).load()) == dataset_digest(data)
    assert next(listed(renamed)._decoded().content()) == next(listed(root)._decoded().content())
    swapped = people(tmp_path / "c", [*ids[1:], ids[0], "x", "y"])
    assert next(listed(swapped)._decoded().content()) != next(listed(root)._decoded().content())
    both = people(tmp_path / "d" / "train", ids[:8])
    people(tmp_path / "d" / "test", ids[:8])
    assert SECRET not in refused("one group has images on both sides: test/.*dcm", listed, both.parent)


def test_what_another_pydicom_decoded_is_decoded_anew(tmp_path, monkeypatch):
    root, said = people(tmp_path / "a", [None] * 40), []
    listed(root, said.append, None).load()
    listed(root, said.append, None).load()
    assert sum("decoding 40 of 40" in line for line in said) == 1
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.99" if name == "pydicom" else version(name))
    listed(root, said.append, None).load()
    assert sum("decoding 40 of 40" in line for line in said) == 2


def test_a_file_without_a_person_is_refused_and_without_the_setting_it_is_told(tmp_path):
    root, said = people(tmp_path / "a", [*(f"P{number}" for number in range(20)), None, " "]), []
    refused(r"reads no group from .*020.dcm.*\(2 of 22 files\)", listed, root)
    assert listed(root, said.append, None).facts.num_people is None
    assert any("data.group_by=PatientID" in line for line in said)
    (root / "dark/000.dcm").write_bytes(b"no DICOM")
    damaged = dicom(stored(8), PatientID=SECRET).replace(b"\x10\0\x20\0LO", b"\x10\0\x20\0L\1")
    (root / "dark/002.dcm").write_bytes(damaged)
    refused(r"dark/002.dcm: it is damaged DICOM \(NotImplementedError\)", listed, root)
    (root / "dark/002.dcm").unlink()
    refused(r"reads no group from bright/021.dcm, dark/000.dcm", listed, root)


def test_what_holds_no_picture_is_told_and_a_directory_of_dicom_is_passed_over(tmp_path):
    root, said = people(tmp_path / "a", [None] * 40), []
    (root / "DICOMDIR").write_bytes((SHIPPED / "dicomdirtests" / "DICOMDIR").read_bytes())
    (root / "dark/sr.dcm").write_bytes((SHIPPED / "test-SR.dcm").read_bytes())
    data = listed(root, said.append, None).load()
    assert "passed over: DICOMDIR" in said and int((~data.train.readable).sum() + (~data.held_out.readable).sum()) == 1
    assert any("dark/sr.dcm: it is DICOM without a picture" in line for line in said)


def test_archives_of_dicom_are_refused_since_they_are_copied(tmp_path, cache_home):
    (tmp_path / "a").mkdir()
    members = [(f"{label}/{number}.dcm", dicom(stored(8), PatientID=SECRET)) for label in "ab" for number in range(3)]
    (tmp_path / "a/train.tar").write_bytes(tar_of(members))
    refused("holds DICOM, which names people.*Unpack", listed, tmp_path / "a", quiet, None)
    assert not any(SECRET.encode() in path.read_bytes() for path in cache_home.rglob("*") if path.is_file())


def test_without_pydicom_a_file_is_refused_with_what_installs_it_and_nothing_imports_it_early(tmp_path, monkeypatch):
    root = people(tmp_path / "a", [None] * 4)
    program = (
        "import sys, sfumato.cli, sfumato.data.layouts, sfumato.data.dicom\n"
        "assert 'pydicom' not in sys.modules\nsys.modules['pydicom'] = None\n"
        "import importlib, sfumato.data.listing as listing\nimportlib.reload(listing)\n"
        f"try:\n    listing.check_file(listing.Path({str(root / 'dark/000.dcm')!r}))\n"
        "except ValueError as error:\n    print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "000.dcm is DICOM, and pydicom" in said and "pip install pydicom" in said
    monkeypatch.setattr(listing, "EXTENSIONS", listing._PICTURES)
    refused("is DICOM, and pydicom, which reads it, is not installed", listed, root, quiet, None)


def test_no_file_of_a_run_and_none_of_the_cache_holds_a_person_s_id(tmp_path, cache_home, capfd):
    """Trained, resumed, evaluated, calibrated, reported, asked: PatientID and name are in no byte that was written."""
    root = people(tmp_path / "images", [f"{SECRET}-{number // 2}" for number in range(240)], PatientName=SECRET)
    run = tmp_path / "run"
    settings = {
        "data.image_size": SIZE,
        "data.channels": 1,
        "data.group_by": "PatientID",
        "training.num_steps": 4,
        "privacy.unit": "person",
        "privacy.max_images_per_person": 2,
    }
    result = sfumato.train("image-folder", run, data_root=str(root), epsilon=8, settings=settings)
    assert result.private and sfumato.load(run).certificate.unit.startswith("one person")
    other = people(tmp_path / "others", [f"{SECRET}-new-{number // 2}" for number in range(120)])
    assert sfumato.evaluate(run, other).num_people == 60
    answers = sfumato.predict(run, [other / "bright/001.dcm", other / "dark"])
    assert len(answers) == 61 and {answer.class_name for answer in answers} <= {"bright", "dark"}
    written = [path for folder in (run, cache_home) for path in folder.rglob("*") if path.is_file()]
    assert {"report.html", "privacy.json", "values.npy", "files.json"} <= {path.name for path in written}
    for spelled in (SECRET, SECRET.casefold(), "7741-"):
        assert not [path for path in written if spelled.encode() in path.read_bytes()]
    assert SECRET not in "".join(capfd.readouterr())
