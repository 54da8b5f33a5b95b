"""Arrays of plain numbers from a pickle of others. Nothing in it is run: a pickle could run any code."""

import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

_NUMBERS = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


class _Array:
    """What a pickle says of an array, taken by hand: NumPy's own reading of a forged one writes where
    it should not.
    """

    def __init__(self, *_: Any) -> None:
        self.values = np.zeros(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, in_columns, content = state
        self.values = _laid_out(content, dtype, shape, "F" if in_columns else "C")


class _Dtype:
    """A type of plain numbers, by its name."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


def _laid_out(content: Any, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray:
    if dtype.name not in _NUMBERS:
        raise pickle.UnpicklingError(f"it holds {dtype.name}, not plain numbers")
    content = content.encode("latin1") if isinstance(content, str) else content
    kind = np.dtype((dtype.order if dtype.order in "<>" else "=") + dtype.name)
    return np.frombuffer(content, kind).reshape(shape, order=order)


def _from_buffer(content: Any, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> _Array:
    array = _Array()
    array.values = _laid_out(content, dtype, shape, order)
    return array


def _bytes_of(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Nothing but arrays of plain numbers."""

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
        ("numpy", "ndarray"): None,  # named as the class to reconstruct
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _bytes_of,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"it would run {module}.{name}")
        return self._KNOWN[module, name]


def read_arrays(path: Path) -> Any:
    """What a pickle holds, its arrays as NumPy's.

    Raises:
        Exception: A damaged or forged pickle raises whatever it runs into.
    """
    with open(path, "rb") as file:
        held = _ArraysOnly(file, encoding="latin1").load()
    return {key: part.values if isinstance(part, _Array) else part for key, part in held.items()}
