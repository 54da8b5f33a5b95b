"""ImageNet at 32 x 32 pixels, from the pickled batches of Chrabaszcz et al. (2017).

They take 4 GB, so they are copied once to a file that is mapped.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data import store
from sfumato.data.catalogue import NamedSet
from sfumato.data.listing import refusing, stamp_of
from sfumato.errors import InputError

_ORIGINAL = "Put the original file there."
_NUMBERS = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


def read(name: str, named: NamedSet, root: Path, report: Callable[[str], None]) -> store.Rows:
    """All its images and labels, the training part first: `values`, `digests` and `labels`.

    Raises:
        InputError: If a file is damaged or holds more or fewer images.
        OSError: If there is no room.
    """
    paths = [root / file for file in named.files]
    settings = {"name": name, "files": [[str(path.resolve()), *stamp_of(path)] for path in paths]}
    slot = store.slot_of(settings, "images")
    if slot is None:
        raise InputError(f"data set {name} is copied into a cache folder: leave --no-cache out.")

    def fill(part: Path) -> None:
        byte = np.dtype(np.uint8)
        columns: store.Columns = {
            "values": (named.shape, byte),
            "digests": ((32,), byte),
            "labels": ((), np.dtype(np.int64)),
        }
        rows = store.Filling(part, named.num_train + named.num_test, columns)
        before = 0
        for path in paths:
            report(f"reading {path}")
            pixels, labels = _batch(name, named, path)
            if path == paths[-1] and before != named.num_train:
                raise InputError(
                    f"data set {name}: its training files hold {before} images, not {named.num_train}. {_ORIGINAL}"
                )
            values = pixels.reshape(-1, *named.shape)[max(0, rows.num_filled - before) :]
            rows.put(values=values, digests=store.sha256_of_each(values), labels=labels[len(labels) - len(values) :])
            before += len(labels)
        if before != named.num_train + named.num_test:
            count = before - named.num_train
            raise InputError(f"data set {name}: {paths[-1]} holds {count} images, not {named.num_test}. {_ORIGINAL}")

    folder, _ = store.made(slot, settings, fill, report)
    return store.read(folder)


def _batch(name: str, named: NamedSet, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n, C H W) uint8 and labels (n,), int64, from 0 on."""
    kinds = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError, ImportError)
    with refusing(f"data set {name}: {path} is damaged", _ORIGINAL, *kinds), open(path, "rb") as file:
        held = _ArraysOnly(file, encoding="latin1").load()
        pixels, labels = held["data"], np.asarray(held["labels"])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), np.prod(named.shape)):
            raise ValueError(f"its images are {pixels.dtype} of shape {pixels.shape}")
        known = range(1, 1 + named.num_classes)
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or not np.isin(labels, known).all():
            raise ValueError(f"labels are not all in 1 to {named.num_classes}")
    return pixels, labels.astype(np.int64) - 1


class _ArraysOnly(pickle.Unpickler):
    """Nothing but arrays of plain numbers: a pickle could run any code, and NumPy take bytes for objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return _plain_type
        if (module.replace("_core", "core"), name) in {
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would run {module}.{name}")


def _plain_type(name: str, *_: Any) -> np.dtype:
    if name not in _NUMBERS:
        raise pickle.UnpicklingError(f"it holds {name}, not plain numbers")
    return np.dtype(name)
