"""Thirty folders as people have them: is each read as its owner means it, or refused with the remedy?

    python -m benchmarks.layouts DEST

writes them (small pictures of two classes, light and dark) and prints a line of a table for each: what was
found, or the refusal. The pictures tell whether labels and parts are what they should be: light ones are
"light", and those that were made for testing have a mark that no training image may have.
"""

import argparse
import io
import shutil
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.config import DataConfig
from sfumato.data.loading import load
from sfumato.errors import InputError

SIDE = 16
CLASSES = ["dark", "light"]


def picture(label: str, number: int, *, test: bool = False, mode: str = "L", kind: str = "png") -> bytes:
    level = 60 if label == "dark" else 190
    pixels = np.random.default_rng(number).normal(level, 8, (SIDE, SIDE)).clip(0, 255)
    if test:
        pixels[:4, :4] = 255 - level  # the mark
    image = Image.fromarray(pixels.astype(np.uint8))
    if mode == "16":
        image = Image.fromarray((pixels * 257).astype(np.uint16))
    elif mode != "L":
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, {"jpg": "JPEG"}.get(kind, kind.upper()))
    return file.getvalue()


def fill(root: Path, name: Callable[[str, int, bool], str], count: int = 20, tests: int = 5, **how: str) -> None:
    for label in CLASSES:
        for number in range(count + tests):
            is_test = number >= count
            path = root / name(label, number, is_test)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(label, number, test=is_test, **how))


def by_parts(train: str, test: str) -> Callable[[Path], None]:
    return lambda root: fill(root, lambda label, n, is_test: f"{test if is_test else train}/{label}/{n:03}.png")


def flat(ending: str = "png", **how: str) -> Callable[[Path], None]:
    return lambda root: fill(root, lambda label, n, is_test: f"{label}/{n:03}.{ending}", tests=0, count=40, **how)


def table(
    text: Callable[[list[tuple[str, str, bool]]], str], name: str = "labels.csv", tests: int = 0
) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        rows: list[tuple[str, str, bool]] = []

        def named(label: str, n: int, is_test: bool) -> str:
            rows.append((f"pictures/{label[0]}{n:03}.png", label, is_test))
            return rows[-1][0]

        fill(root, named, 40, tests)
        (root / name).write_text(text(rows), encoding="utf-8-sig")

    return write


def beside(*more: tuple[str, bytes]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        flat()(root)
        for name, content in more:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)

    return write


def shard(root: Path) -> None:
    for name, numbers, is_test in (("train2017", range(20), False), ("val2017", range(20, 25), True)):
        with tarfile.open(root / f"{name}.tar", "w") as tar:
            for label in CLASSES:
                for number in numbers:
                    for ending, content in ((".png", picture(label, number, test=is_test)), (".cls", label.encode())):
                        info = tarfile.TarInfo(f"{label[0]}{number:03}{ending}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))


def gif(root: Path) -> None:
    flat()(root)
    frames = [Image.fromarray(np.full((SIDE, SIDE), level, np.uint8)) for level in (10, 200)]
    frames[0].save(root / "dark" / "moving.gif", save_all=True, append_images=frames[1:])


STATED = {"classes": CLASSES}
# (what it is, how it is made, keys of the recipe's data section)
LAYOUTS: list[tuple[str, Callable[[Path], None], dict]] = [
    ("a folder for each class", flat(), {}),
    ("train/, test/", by_parts("train", "test"), {}),
    ("Training/, Testing/", by_parts("Training", "Testing"), {}),
    ("TRAIN/, VAL/, tuned on valid", by_parts("TRAIN", "VAL"), {"split": "train"}),
    ("train2017/, test2017/", by_parts("train2017", "test2017"), {}),
    ("training_set/, test_set/", by_parts("training_set", "test_set"), {}),
    ("one level too deep", lambda root: flat()(root / "chest_xray"), {}),
    (
        "nested below classes",
        lambda root: fill(root, lambda c, n, t: f"{c}/ward {n % 3}/{n}.png", count=40, tests=0),
        {},
    ),
    ("spaces, umlauts, signs", lambda root: fill(root, lambda c, n, t: f"{c}/Aufnahme Nr. {n} ü #.png", 40, 0), {}),
    (
        "class names in two Unicode forms",
        lambda root: fill(
            root, lambda c, n, t: f"{unicodedata.normalize('NFD' if n % 2 else 'NFC', c + 'é')}/{n}.png", 40, 0
        ),
        {},
    ),
    ("upper-case endings", flat("PNG"), {}),
    ("JPEG", flat("jpg", kind="jpg"), {}),
    ("16 bits", flat(mode="16"), {}),
    ("CMYK in TIFF", flat("tif", mode="CMYK", kind="tiff"), {}),
    ("palettes", flat(mode="P"), {}),
    ("an animated GIF among them", gif, {}),
    ("a truncated image among them", beside(("dark/cut.png", picture("dark", 99)[:150])), {}),
    ("README, .DS_Store, Thumbs.db", beside(("README.txt", b"x"), (".DS_Store", b"x"), ("Thumbs.db", b"x")), {}),
    ("an empty class", beside(("grey/.keep", b"")), {}),
    ("one class", lambda root: [flat()(root), shutil.rmtree(root / "light")], {}),
    ("labels.csv", table(lambda rows: "file,label\n" + "".join(f"{f},{c}\n" for f, c, _ in rows)), STATED),
    ("labels.csv, classes not stated", table(lambda r: "file,label\n" + "".join(f"{f},{c}\n" for f, c, _ in r)), {}),
    (
        "labels.csv of Excel, column Split",
        table(
            lambda rows: (
                "file;label;Split\r\n" + "".join(f"{f};{c};{'Test' if t else 'Train'}\r\n" for f, c, t in rows)
            ),
            tests=5,
        ),
        STATED,
    ),
    (
        "several labels in a cell",
        table(
            lambda rows: (
                "file,label\n" + "".join(f"{f},{c if i else 'dark|light'}\n" for i, (f, c, _) in enumerate(rows))
            )
        ),
        STATED,
    ),
    ("findings.csv", table(lambda rows: "image,finding\n", name="findings.csv"), {}),
    (
        "metadata.csv (Hugging Face)",
        table(lambda rows: "file_name,label\n" + "".join(f"{f},{c}\n" for f, c, _ in rows), name="metadata.csv"),
        STATED,
    ),
    (
        "metadata.jsonl",
        table(
            lambda rows: "".join(f'{{"file_name": "{f}", "label": "{c}"}}\n' for f, c, _ in rows), name="metadata.jsonl"
        ),
        STATED,
    ),
    ("tar shards train2017, val2017", shard, {**STATED, "split": "train"}),
    ("archives beside folders", lambda root: [flat()(root), shard(root)], {}),
    ("a DICOM file", beside(("dark/scan.dcm", bytes(128) + b"DICM")), {}),
]


def verdict(root: Path, keys: dict) -> str:
    lines: list[str] = []
    try:
        data = load(DataConfig(name="folder", image_size=SIDE, channels=1, **keys), root, lines.append)
    except InputError as refusal:
        return f"refused: {str(refusal).replace(str(root), '.')}"
    wrong, marked = 0, 0
    for images in (data.train, data.held_out):
        for index in images.readable.nonzero()[:, 0].tolist():
            pixels = images.stored[index if images.rows is None else int(images.rows[index])].float() / images.max_value
            bright = float(pixels[0, 6:].mean()) > 0.5
            wrong += bright != data.classes[int(images.labels[index])].startswith("light")
            is_marked = (float(pixels[0, :3, :3].mean()) > 0.5) != bright
            marked += is_marked and images is data.train
    has_parts = data.held_out_name if any(f"({data.held_out_name}/)" in line for line in lines) else "a hash"
    found = f"{len(data.train)} + {len(data.held_out_files)} by {has_parts}"
    unreadable = int((~data.train.readable).sum() + (~data.held_out_files.readable).sum())
    found += f", {unreadable} unreadable" if unreadable else ""
    return (
        found + (f"; WRONG: {wrong} labels" if wrong else "") + (f"; {marked} test images trained on" if marked else "")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path)
    for number, (name, make, keys) in enumerate(LAYOUTS):
        root = parser.parse_args().dest / f"{number:02}"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        make(root)
        print(f"| {name} | {verdict(root, keys)} |", flush=True)
