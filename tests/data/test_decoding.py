import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from sfumato.data.decoding import decode_images
from sfumato.exporting import predict
from tests.data.conftest import refused

SIZE = 16
REFUSED_ALONE = ("camera.tif", "texts.png")
"""Pictures that are read here, and that predict.py refuses: of texts beside pixels it takes more, run as a program."""
RAMP = np.linspace(0, 65535, SIZE * SIZE).round().astype(np.uint16).reshape(SIZE, SIZE)
COLOUR = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def decode(path, channels=1, size=SIZE, resize="crop"):
    """The image as integers (C, S, S), and why it is unreadable. What predict.py of an export sees is the same, bit for
    bit, or it refuses.
    """
    decoded = decode_images([path], image_size=size, channels=channels, resize=resize)
    pixels, reason = decoded.images[0].to(torch.int64).numpy(), decoded.reasons[0]
    try:
        alone = predict.pixels(path, size, size, channels, resize)[0].transpose(2, 0, 1)
    except Exception:
        assert reason is not None or path.name in REFUSED_ALONE
    else:
        assert reason is None
        np.testing.assert_array_equal(alone, pixels)
    return pixels, reason


def luma(rgb):
    """ITU-R 601-2."""
    return rgb.astype(np.float64) @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_16_bit_grey_keeps_its_range_and_every_bit(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    Image.fromarray(RAMP).save(path)
    np.testing.assert_array_equal(decode(path)[0][0], RAMP)
    for channel in decode(path, channels=3)[0]:
        np.testing.assert_array_equal(channel, np.rint(RAMP / 257))
    assert len(np.unique(np.asarray(Image.open(path).convert("L")))) < 5  # Pillow's own conversion: all but white


def test_16_bit_grey_is_resized_at_full_precision_and_stays_in_range(tmp_path):
    checks = np.kron(np.indices((16, 16)).sum(0) % 2, np.ones((4, 4))).astype(np.uint16) * 65535
    Image.fromarray(checks).save(tmp_path / "16.png")
    Image.fromarray((checks // 257).astype(np.uint8)).save(tmp_path / "8.png")
    pixels, _ = decode(tmp_path / "16.png", size=40)
    np.testing.assert_array_equal(decode(tmp_path / "8.png", size=40)[0], pixels)
    as_rgb, _ = decode(tmp_path / "8.png", channels=3, size=40)
    assert np.abs(pixels[0] / 257 - as_rgb[0]).max() < 20  # no overshoot wraps from white to black
    assert pixels.min() == 0 and pixels.max() == 65535 and (pixels % 257 != 0).any()


def write_tiff(path, strips, tags):
    """A minimal little-endian TIFF of these strips, as cameras and scanners write that Pillow does not."""
    starts = [8 + sum(map(len, strips[:number])) for number in range(len(strips))]
    tags = {256: SIZE, 257: SIZE, 259: 1, 273: starts, 278: SIZE, 279: list(map(len, strips))} | tags
    start, entries, tail = 8 + sum(map(len, strips)), b"", b""
    for tag, value in sorted(tags.items()):
        values = value if isinstance(value, list) else [value]
        inside = values[0]
        if len(values) > 1:
            inside = start + 2 + 12 * len(tags) + 4 + len(tail)
            tail += struct.pack(f"<{len(values)}I", *values)
        entries += struct.pack("<HHII", tag, 4, len(values), inside)
    head = b"II*\0" + struct.pack("<I", start) + b"".join(strips)
    path.write_bytes(head + struct.pack("<H", len(tags)) + entries + bytes(4) + tail)


def write_grey_tiff(path, pixels, bits, photometric, more=()):
    data = pixels.astype("<u2").tobytes()
    if bits == 12:
        pairs = pixels.reshape(-1, 2)
        data = bytes(byte for a, b in pairs for byte in (a >> 4, (a & 15) << 4 | b >> 8, b & 255))
    write_tiff(path, [data], {258: bits, 262: photometric, 277: 1} | dict(more))


@pytest.mark.parametrize(("bits", "photometric"), [(16, 0), (16, 1), (12, 1)])
def test_a_tiff_whose_white_is_zero_is_turned_round_and_one_of_12_bits_reaches_white(tmp_path, bits, photometric):
    pixels = (RAMP // 2 ** (16 - bits)).astype(np.uint16)
    write_grey_tiff(tmp_path / "x.tif", pixels, bits, photometric)
    white = pixels * (65535 / (2**bits - 1))
    truth = white if photometric else 65535 - white
    np.testing.assert_allclose(decode(tmp_path / "x.tif")[0][0], truth, atol=bits < 16)


def test_a_tiff_of_planes_is_read_right_or_not_at_all(tmp_path):
    """Colours as tifffile writes (3, H, W)."""
    for bits, dtype in ((8, np.uint8), (16, np.uint16)):
        planes = [COLOUR[..., channel].astype(dtype).tobytes() for channel in range(3)]
        write_tiff(tmp_path / f"{bits}.tif", planes, {258: [bits] * 3, 262: 2, 277: 3, 284: 2, 339: 1})
    np.testing.assert_array_equal(decode(tmp_path / "8.tif", 3)[0], COLOUR.transpose(2, 0, 1))
    assert "a plane for each colour" in decode(tmp_path / "16.tif", 3)[1]


def test_signed_samples_and_several_pages_are_refused_and_a_small_copy_is_no_page(tmp_path):
    write_grey_tiff(tmp_path / "x.tif", RAMP, 16, 1, {339: 2})
    assert "signed samples" in decode(tmp_path / "x.tif")[1]
    pages = [Image.fromarray(RAMP // (1 + i)) for i in range(3)]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    assert "3 pages" in decode(tmp_path / "stack.tif")[1]
    small = Image.fromarray(RAMP[::2, ::2].copy())
    small.encoderinfo = {"tiffinfo": {254: 1}}
    pages[0].save(tmp_path / "camera.tif", save_all=True, append_images=[small])
    np.testing.assert_array_equal(decode(tmp_path / "camera.tif")[0][0], RAMP)


def with_significant_bits(content, bits):
    chunk = b"sBIT" + bytes([bits])
    return content[:33] + struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk)) + content[33:]


def test_a_png_that_says_how_many_bits_count_reaches_white(tmp_path):
    """Scanners leave 12 bits at the bottom of 16; the standard asks to move them to the top, where they are white."""
    at_bottom, at_top, path = (RAMP // 16).astype(np.uint16), (RAMP // 16 * 16).astype(np.uint16), tmp_path / "x.png"
    for pixels, truth in ((at_bottom, at_bottom * (65535 / 4095)), (at_top, at_top)):
        Image.fromarray(pixels).save(path)
        path.write_bytes(with_significant_bits(path.read_bytes(), 12))
        np.testing.assert_allclose(decode(path)[0][0], truth, atol=1)
    Image.fromarray(at_bottom).save(path)
    np.testing.assert_array_equal(decode(path)[0][0], at_bottom)  # nothing says so


@pytest.mark.parametrize("size", [(17, 40), (40, 17)])
def test_an_oblong_picture_is_its_middle_square_resized(tmp_path, size):
    pixels = np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    side, (width, height) = min(size), size
    top, left = (height - side) // 2, (width - side) // 2
    Image.fromarray(pixels[top : top + side, left : left + side].copy()).save(tmp_path / "square.png")
    np.testing.assert_array_equal(decode(tmp_path / "x.png", 3)[0], decode(tmp_path / "square.png", 3)[0])


@pytest.mark.parametrize(("extension", "is_upright"), [("png", True), ("jpg", False)])
def test_an_oblong_picture_is_cut_padded_with_black_or_stretched(tmp_path, extension, is_upright):
    thirds = np.repeat(np.array([[200, 30, 30], [30, 200, 30], [30, 30, 200]], np.uint8), 16, axis=0)  # 48 pixels
    picture = np.repeat(thirds[None], 16, axis=0)
    exif = Image.Exif()
    exif[0x0112] = 1 if is_upright else 6  # the proportions are those that are seen
    stored = picture if is_upright else np.rot90(picture)
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / f"x.{extension}", exif=exif, quality=100)
    found = {how: decode(tmp_path / f"x.{extension}", 3, 24, resize=how)[0] for how in ("crop", "pad", "stretch")}
    grey = decode(tmp_path / f"x.{extension}", 1, 24, resize="pad")[0][0]
    inside = [slice(2, 6), slice(10, 14), slice(18, 22)]  # of each colour, away from its edges
    for third, columns in zip(thirds[8::16], inside, strict=True):
        colour = third[:, None, None]
        assert np.abs(found["crop"] - thirds[24][:, None, None])[:, 3:-3, columns].max() < 5
        assert np.abs(found["stretch"] - colour)[:, :, columns].max() < 5
        assert np.abs(found["pad"] - colour)[:, 9:15, columns].max() < 5
        assert np.abs(grey[9:15, columns] / 257 - luma(third)).max() < 5
    for padded in (found["pad"], grey[None]):
        assert not padded[:, :8].any() and not padded[:, 16:].any()  # 24 x 8 in the middle


def test_a_picture_of_one_row_takes_no_more_memory_than_any_other(tmp_path):
    Image.new("L", (60_000, 1), 255).save(tmp_path / "x.png")
    row = decode(tmp_path / "x.png", resize="pad")[0][0]
    assert (row[7:9].any(1)).sum() == 1 and (row.any(1)).sum() == 1
    assert (decode(tmp_path / "x.png", resize="stretch")[0] == 65535).all()


HEAD = b"\x89PNG\r\n\x1a\n"


def chunk_of(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


LARGE = zlib.compress(bytes(3_000_000))
CHUNKS = [
    (b"iCCP", b"profile\0\0" + LARGE),
    (b"zTXt", b"Raw profile type 8bim\0\0" + LARGE),
    (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + LARGE),
    (b"tEXt", b"ImageJ\0" + bytes(3_000_000)),
]


@pytest.mark.parametrize(("kind", "data"), CHUNKS, ids=[kind.decode() for kind, _ in CHUNKS])
def test_a_png_is_seen_whatever_texts_and_profiles_lie_beside_its_pixels(tmp_path, monkeypatch, kind, data):
    """Design tools and microscopes write them, larger than Pillow takes; what is read beside them stays."""
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 2_000_000)  # of all texts; else 64 MB
    exif = Image.Exif()
    exif[0x0112] = 3
    path = tmp_path / "texts.png"
    Image.fromarray(COLOUR[::-1, ::-1].copy()).save(path, exif=exif)
    plain = path.read_bytes()
    for place in (33, len(plain) - 12):  # behind the header, before the end
        path.write_bytes(plain[:place] + chunk_of(kind, data) + plain[place:])
        pixels, reason = decode(path, 3)
        assert reason is None
        np.testing.assert_array_equal(pixels, COLOUR.transpose(2, 0, 1))


TEXTS = [("XML:com.adobe.xmp", True), ("Raw profile type exif", True), ("x", False)]


@pytest.mark.parametrize(("text", "is_turned"), TEXTS)
def test_texts_of_a_png_that_turn_it_are_read(tmp_path, text, is_turned):
    exif, texts = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = 3
    raw = exif.tobytes()
    if text.startswith("Raw"):
        texts.add_text(text, f"\nexif\n{len(raw):8}\n{raw.hex()}\n", zip=True)
    else:
        texts.add_itxt(text, '<x tiff:Orientation="3"/>')
    Image.fromarray(COLOUR).save(tmp_path / "x.png", pnginfo=texts)
    truth = COLOUR[::-1, ::-1] if is_turned else COLOUR
    np.testing.assert_array_equal(decode(tmp_path / "x.png", 3)[0], truth.transpose(2, 0, 1))


def test_a_palette_is_looked_up(tmp_path):
    image = Image.fromarray(COLOUR).quantize(200)
    image.save(tmp_path / "x.png")
    truth = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode(tmp_path / "x.png", 3)[0], truth.transpose(2, 0, 1))
    np.testing.assert_allclose(decode(tmp_path / "x.png")[0][0] / 257, luma(truth), atol=0.51)


@pytest.mark.parametrize("mode, extension", [("LA", "png"), ("RGBA", "webp"), ("RGBA", "tif")])
def test_transparency_is_composited_on_white(tmp_path, mode, extension):
    alpha = np.tile(np.array([0, 64, 192, 255], np.uint8), (SIZE, SIZE // 4))
    colour = COLOUR if mode == "RGBA" else np.repeat(COLOUR[..., :1], 3, axis=2)
    stored = np.dstack([colour if mode == "RGBA" else colour[..., :1], alpha])
    options = {"lossless": True, "exact": True} if extension == "webp" else {}
    Image.fromarray(stored).save(tmp_path / f"x.{extension}", **options)
    weight = alpha[..., None] / 255
    truth = colour * weight + 255 * (1 - weight)
    np.testing.assert_allclose(decode(tmp_path / f"x.{extension}", 3)[0], truth.transpose(2, 0, 1), atol=1)
    np.testing.assert_allclose(decode(tmp_path / f"x.{extension}", 1)[0][0] / 257, luma(truth), atol=1.5)


def test_a_transparent_palette_entry_is_white(tmp_path):
    image = Image.new("P", (SIZE, SIZE), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.paste(0, (0, 0, 8, SIZE))
    image.save(tmp_path / "x.png", transparency=0)
    pixels, _ = decode(tmp_path / "x.png", 3)
    assert (pixels[:, :, :8] == 255).all() and (pixels[:, :, 8:] == np.array([10, 20, 30])[:, None, None]).all()


@pytest.mark.parametrize(("bits", "channels"), [(1, 3), (2, 1), (4, 3), (8, 1), (16, 1), (16, 3)])
def test_the_grey_that_a_png_calls_transparent_is_white(tmp_path, bits, channels):
    """Of any depth: programs that make files small write grey of few bits so."""
    values = np.random.default_rng(bits).integers(0, 2**bits, (SIZE, SIZE))
    values[:2] = seen_through = 1
    row_bits = (values[..., None] >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(row_bits.reshape(SIZE, -1).astype(np.uint8), axis=1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", SIZE, SIZE, bits, 0, 0, 0, 0)),
        (b"tRNS", struct.pack(">H", seen_through)),
    ]
    parts += [(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))), (b"IEND", b"")]
    (tmp_path / "x.png").write_bytes(HEAD + b"".join(chunk_of(*part) for part in parts))
    truth = np.where(values == seen_through, 65535, values * (65535 / (2**bits - 1)))
    pixels, _ = decode(tmp_path / "x.png", channels)
    np.testing.assert_allclose(pixels[0] * (257 if channels == 3 else 1), truth, atol=128 if channels == 3 else 0)


@pytest.mark.parametrize("extension", ["jpg", "tif"])
def test_cmyk_becomes_the_colours_that_are_seen(tmp_path, extension):
    image = Image.new("CMYK", (SIZE, SIZE), (0, 255, 255, 0))  # magenta and yellow ink: red
    image.save(tmp_path / f"x.{extension}", quality=95)
    red = np.array([255, 0, 0])[:, None, None] + np.zeros((3, SIZE, SIZE))
    np.testing.assert_allclose(decode(tmp_path / f"x.{extension}", 3)[0], red, atol=3)


UPRIGHT = {  # how the stored pixels come from the upright ones, for each EXIF orientation
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize(
    "orientation, extension, is_grey_16",
    [(turn, "png", turn % 2 == 0) for turn in UPRIGHT]
    + [(5, "jpg", False), (6, "webp", False), (7, "tif", False), (8, "tif", True)],
)
def test_all_eight_exif_orientations_give_the_same_pixels(tmp_path, orientation, extension, is_grey_16):
    upright = RAMP if is_grey_16 else COLOUR
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(extension, {})
    path = tmp_path / f"x.{extension}"
    Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](upright))).save(path, exif=exif, **lossless)
    pixels, _ = decode(path, channels=1 if is_grey_16 else 3)
    truth = upright[None] if is_grey_16 else upright.transpose(2, 0, 1)
    np.testing.assert_allclose(pixels, truth, atol=4 if extension == "jpg" else 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.bmp", {}),
        ("x.JPG", {"format": "PNG"}),  # the container decides, not the extension
        ("x.png", {"exif": b"Exif\0\0broken"}),  # no orientation and no warning
    ],
)
def test_a_picture_of_the_right_size_is_taken_as_it_is(tmp_path, name, options):
    Image.fromarray(COLOUR).save(tmp_path / name, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels, reason = decode(tmp_path / name, 3)
    assert reason is None
    np.testing.assert_array_equal(pixels, COLOUR.transpose(2, 0, 1))


def test_shrinking_averages_rather_than_picks(tmp_path):
    stripes = np.tile(np.array([0, 255], np.uint8), (256, 128))
    for extension in ("png", "jpg"):
        Image.fromarray(stripes).save(tmp_path / f"x.{extension}", quality=100)
        pixels, _ = decode(tmp_path / f"x.{extension}")
        np.testing.assert_allclose(pixels[0, 1:-1, 1:-1] / 257, 127.5, atol=6)


@pytest.mark.parametrize("extension", ["jpg", "png", "tif"])
def test_a_truncated_file_is_unreadable_and_keeps_its_index(tmp_path, extension):
    paths = [tmp_path / f"{i}.{extension}" for i in range(3)]
    for path in paths:
        Image.fromarray(np.kron(COLOUR, np.ones((8, 8, 1), np.uint8))).save(path)
    data = paths[1].read_bytes()
    paths[1].write_bytes(data[: len(data) // 2])
    decoded = decode_images(paths, image_size=SIZE, channels=3)
    assert decoded.readable.tolist() == [True, False, True]
    assert decoded.reasons[1] and "\n" not in decoded.reasons[1]
    assert not decoded.images[1].any() and decoded.images[0].any() and torch.equal(decoded.images[0], decoded.images[2])


UNREADABLE = [
    (
        lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk_of(b"IHDR", bytes(13))[:-1] + b"x"),
        "a damaged PNG, or",
    ),
    (lambda path: path.write_bytes(b"\xff\xd8\xff\xc3" + bytes(20)), "a damaged JPEG, or of a kind that is not read"),
    (lambda path: path.write_bytes(b"MM\0*\0\0\0\x08\0\0"), "TIFF"),
    (lambda path: path.write_bytes(b""), "it is empty"),
    (lambda path: path.write_bytes(b"GIF89a\x01\0\x01\0\0\0\0;"), "PNG, JPEG, BMP, WEBP, TIFF"),
    (lambda path: Image.new("1", (9_000, 9_000)).save(path, "PNG"), "more than 64 million pixels"),  # our limit
    (lambda path: Image.new("1", (20_000, 20_000)).save(path, "PNG"), "more than 64 million pixels"),  # Pillow's
    (lambda path: Image.fromarray(RAMP.astype(np.int32)).save(path), "pixels of 32 bits"),  # never guessed
    (lambda path: Image.fromarray(RAMP.astype(np.float32)).save(path), "pixels of 32 bits"),
]


@pytest.mark.parametrize(("write", "why"), UNREADABLE)
def test_what_holds_no_image_or_too_much_is_unreadable(tmp_path, write, why):
    write(tmp_path / "x.tif")
    pixels, reason = decode(tmp_path / "x.tif")
    assert why in reason and not pixels.any()


def test_a_missing_file_is_an_error_of_the_input(tmp_path):
    refused("gone.png cannot be opened", decode, tmp_path / "gone.png")
