"""ImageNet at 32 x 32 pixels, from the pickled batches of Chrabaszcz et al. (2017).

They take 4 GB, so they are copied once to a file that is mapped.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from sfumato.data import cache, store
from sfumato.data.catalogue import NamedSet
from sfumato.data.images import Digests
from sfumato.data.listing import stamp_of
from sfumato.data.pickled_arrays import read_arrays
from sfumato.data.raw import Raw, damaged
from sfumato.errors import InputError

_LABELS = "labels.json"


def read(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> Raw:
    """All its images.

    Raises:
        InputError: If a file is damaged, is another one of them or holds more or fewer images, or there is no room.
    """
    paths = [root / file for file, _ in named.files]
    settings = {"name": name, "files": [[str(path.resolve()), *stamp_of(path)] for path in paths]}
    count = named.num_train + named.num_test
    folder = cache.own_folder(settings, "images")
    if folder is None:
        raise InputError(f"data set {name} needs a folder of your own for its images. Set XDG_CACHE_HOME to one.")
    with store.alone(folder, lambda: report(f"another process is filling {folder}: waiting for it")):
        found, labels = store.read(folder, settings), _read_labels(folder, count)
        if found is None or labels is None:
            try:
                new = store.begin(folder, settings, count, named.shape, np.dtype(np.uint8))
            except OSError as error:
                raise InputError(f"{folder} has no room for {name}: {error.strerror}. Free some space.") from None
            _write_labels(folder, _fill(new, name, named, paths, report))
            new.finish()
            found, labels = store.read(folder, settings), _read_labels(folder, count)
        if found is None or labels is None:
            raise InputError(f"{folder} does not hold what was written there. Run again.")
    return Raw(
        torch.from_numpy(found.values),
        torch.tensor(labels),
        torch.ones(count, dtype=torch.bool),
        Digests(found.digests, folder),
    )


def _fill(
    new: store.Store, name: str, named: NamedSet, paths: Sequence[Path], report: Callable[[str], None]
) -> list[int]:
    """Copies all batches into a store, and gives the labels. The last batch is the test part."""
    labels: list[int] = []
    known: dict[bytes, Path] = {}
    for path in paths:
        report(f"reading {path}")
        pixels, given = _batch(name, named, path)
        other = known.setdefault(hashlib.sha256(pixels.tobytes()).digest(), path)
        if other != path:
            raise damaged(name, path, f"it holds the images of {other.name}")
        before, end = len(labels), len(labels) + len(pixels)
        is_last = path == paths[-1]
        if end > (named.num_train + named.num_test if is_last else named.num_train):
            raise damaged(name, path, f"it holds {len(pixels)} images after {before} others")
        if is_last and before != named.num_train:
            raise InputError(
                f"data set {name}: its training files hold {before} images, not {named.num_train}. Put the originals "
                "there."
            )
        new.put(np.arange(before, end), pixels.reshape(-1, *named.shape), {})
        labels += (given - 1).tolist()
    if len(labels) != len(new):
        raise damaged(name, paths[-1], f"it holds {len(labels) - named.num_train} images, not {named.num_test}")
    return labels


def _batch(name: str, named: NamedSet, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n, C H W) uint8 and labels from 1 on."""
    try:
        held = read_arrays(path)
        pixels, labels = held["data"], np.asarray(held["labels"])
    except Exception as error:
        raise damaged(name, path, str(error)) from None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise damaged(name, path, "its images are not rows of bytes")
    if pixels.shape[1:] != (np.prod(named.shape),):
        raise damaged(name, path, f"its images have {pixels.shape[1]} numbers each")
    if labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]:
        raise damaged(name, path, "there is not one whole number for each image")
    if len(labels) and not (labels.min() >= 1 and labels.max() <= named.num_classes):
        raise damaged(name, path, f"labels are not all in 1 to {named.num_classes}")
    return pixels, labels.astype(np.int64)


def _write_labels(folder: Path, labels: list[int]) -> None:
    held = json.dumps(labels)
    sha256 = hashlib.sha256(held.encode()).hexdigest()
    store.write_private(folder / _LABELS, json.dumps({"labels": held, "sha256": sha256}))


def _read_labels(folder: Path, count: int) -> list[int] | None:
    """None where they are not as they were written."""
    try:
        read = json.loads((folder / _LABELS).read_text(encoding="utf-8"))
        if read["sha256"] != hashlib.sha256(read["labels"].encode()).hexdigest():
            return None
        labels: list[int] = json.loads(read["labels"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return labels if len(labels) == count else None
