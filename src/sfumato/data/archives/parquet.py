"""The images of a Parquet file as Hugging Face writes it: rows of "image" (bytes, or a record with "bytes" and "path"),
"label" and perhaps "group".
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from sfumato.data.archives.example import Example, as_text, part_of_folders
from sfumato.data.archives.tar import first_line
from sfumato.data.listing import EXTENSIONS
from sfumato.errors import InputError


def examples_of_parquet(path: Path, report: Callable[[str], None]) -> Iterator[Example]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: pyarrow is not installed. Install it: pip install 'sfumato[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        names = _class_names(file.schema_arrow.metadata)
        given = file.schema_arrow.names
        columns = [name for name in ("image", "label", "group") if name in given]
        twice = next((name for name in columns if given.count(name) > 1), None)
        if twice is not None:
            raise InputError(f'{path} has the column "{twice}" twice. Keep one.')
        if columns[:2] != ["image", "label"]:
            listed = ", ".join(given)
            raise InputError(f'{path} needs the columns "image" and "label"; it has {listed}. Rename them.')
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                yield _of_row(f"{path} row {number}", row, names)
                number += 1
    except InputError:
        raise
    except Exception as error:  # Arrow's own are of many kinds
        raise InputError(f"{path} cannot be read as Parquet: {first_line(error)}. Put the original there.") from None


def _of_row(where: str, row: dict[str, Any], names: list[str]) -> Example:
    image: Any = row["image"]
    name = ""
    if isinstance(image, dict):
        image, name = image.get("bytes"), str(image.get("path") or "")
    if image is not None and not isinstance(image, bytes):
        raise InputError(f'{where} has an "image" that is {type(image).__name__}, not bytes. Store the files\' bytes.')
    label = row["label"]
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        label = names[label]
    group = as_text(where, "group", row["group"]) if "group" in row else ""
    content = image or b""
    suffix = PurePosixPath(name).suffix
    part = part_of_folders(where, PurePosixPath(name).parts[:-1])
    return Example(content, name.removesuffix(suffix), _suffix(content), as_text(where, "label", label), group, part)


def _class_names(metadata: dict[bytes, bytes] | None) -> list[str]:
    """Of whole-number labels, where Hugging Face's library noted them."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features["label"]["names"]]
    except (KeyError, ValueError, TypeError):
        return []


def _suffix(content: bytes) -> str:
    """A name for the file: which kind it is, the decoder finds by itself."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            kind = f".{(image.format or 'png').lower()}"
    except Exception:  # damaged: an image that cannot be read
        return ".png"
    return kind if kind in EXTENSIONS else ".png"
