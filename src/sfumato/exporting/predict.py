"""Names the class of pictures by model.onnx, which lies beside this file: pip install onnxruntime pillow numpy

python predict.py PICTURE... prints a line for each: its name, its class, and probabilities where they are calibrated.
Of several labels those that are named stand in the place of the class, with | between them.
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, PngImagePlugin

GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")
MIRRORED, UPSIDE, TRANSPOSED = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
)
TURNS = {2: MIRRORED, 3: Image.Transpose.ROTATE_180, 4: UPSIDE, 5: TRANSPOSED, 6: Image.Transpose.ROTATE_270}
TURNS |= {7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90}


def refuse(image):  # what Pillow would read otherwise than it is meant
    tag = getattr(image, "tag_v2", {}).get
    planes, bits = tag(284, 1) == 2 and tag(277, 1) > 1, tag(258, (1,))[0]
    for what, is_so in {
        "more than 64 million pixels": image.width * image.height > 64_000_000,
        "a TIFF of signed samples": bits <= 16 and set(tag(339, (1,))) == {2},
        "a TIFF of 16 bits with a plane for each colour": planes and bits > 8,
        "a TIFF of several pages": image.format == "TIFF" and image.n_frames > 1,
        "pixels of 32 bits": image.mode in ("I", "F"),
    }.items():
        if is_so:
            raise ValueError(f"it has or is {what}: save it anew as PNG of 8 or 16 bits")


def opaque(image):  # transparency on white
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB") if image.mode in ("P", "CMYK", "YCbCr", "LAB", "HSV") else image


def grey(image, bits):  # luma from 0 to 65535
    if image.mode not in GREY_16:
        return Image.fromarray(np.asarray(opaque(image).convert("L")).astype(np.float32) * 257)
    values, is_tiff = np.asarray(image).astype(np.float32), image.format == "TIFF"
    hidden = values == image.info.get("transparency", -1)
    bits = image.tag_v2[258][0] if is_tiff else bits if values.max() < 2**bits else 16
    values *= 65535 / (2**bits - 1)
    values = 65535 - values if is_tiff and image.tag_v2.get(262) == 0 else values
    values[hidden] = 65535
    return Image.fromarray(values)


def centre(image, side):  # black where the picture is smaller
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def pixels(path, size, whole, channels, resize):  # (1, size, size, channels), uint16 of one channel, else uint8
    content = Path(path).read_bytes()
    image = Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "BMP", "WEBP", "TIFF"))
    refuse(image)
    place, depth = content.find(b"sBIT", 0, content.find(b"IDAT")), content[24]
    if image.format == "PNG" and image.mode in ("1", "L") and "transparency" in image.info and depth < 8:
        image.info["transparency"] *= 255 // (2**depth - 1)
    image.draft(None, (2 * whole, 2 * whole))
    image.load()
    is_grey = channels == 1 or image.mode in GREY_16
    out = grey(image, content[place + 4] if place > 0 else 16) if is_grey else opaque(image).convert("RGB")
    try:
        turn = TURNS.get(image.getexif().get(0x0112, 1))
    except (OSError, SyntaxError, ValueError, TypeError, LookupError):  # damaged, so it says nothing
        turn = None
    out = out if turn is None else out.transpose(turn)
    out = centre(out, min(out.size)) if resize == "crop" else out
    sides = [max(1, round(whole * side / max(out.size))) if resize == "pad" else whole for side in out.size]
    values = np.asarray(centre(out.resize(sides, Image.Resampling.BICUBIC, reducing_gap=3.0), whole))
    if is_grey:
        values = np.clip(np.rint(values), 0, 65535)[..., None]
        values = values.astype(np.uint16) if channels == 1 else np.rint(values / 257).astype(np.uint8).repeat(3, 2)
    edge = (whole - size) // 2
    return np.ascontiguousarray(values[edge : edge + size, edge : edge + size])[None]


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python predict.py PICTURE...")
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2**28  # beside pixels some tools write much
    net = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
    facts = json.loads(net.get_modelmeta().custom_metadata_map["sfumato"])
    how = [facts[key] for key in ("image_size", "decoded_size", "channels", "resize")]
    for path in sys.argv[1:]:
        try:
            decided, probabilities = net.run(["class", "probabilities"], {"pixels": pixels(path, *how)})
        except Exception as error:  # Pillow's decoders raise nearly every type on damaged files
            print(path, f"unreadable: {error}", sep="\t")
            continue
        named = zip(facts["classes"], probabilities[0], strict=True) if facts["is_calibrated"] else ()
        chosen = np.flatnonzero(decided[0]) if facts["is_multilabel"] else decided
        print(
            path,
            "|".join(facts["classes"][place] for place in chosen),
            *(f"{name} {share:.6f}" for name, share in named),
            sep="\t",
        )
