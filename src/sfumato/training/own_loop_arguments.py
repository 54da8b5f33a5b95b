"""What somebody's own loop hands over, checked before anything is drawn, counted or released."""

import contextlib
import math
import numbers
import operator
import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError, MachineError, is_from_elsewhere
from sfumato.run_folder.files import is_there, machine_faults
from sfumato.run_folder.key_file import KEY_FILE, is_key
from sfumato.run_folder.record import CERTIFICATE_FILE
from sfumato.training.waiting_sample import SAMPLE_FILE, is_fresh

_LARGEST, _MOST_NOISE, _LEAST_STDDEV = 2**62, 1e12, 1e-30
_MOST_EXAMPLES = 2**32  # 34 GB of random words a sample
_FLOATS = (torch.float32, torch.float64)


def path_of(folder: Any) -> Path:
    """The same folder wherever the process goes.

    Raises:
        InputError: If nothing can be written there, whatever room there is.
    """
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise InputError(f"folder must be a path, not {shown(folder)}.")
    try:
        path = Path(os.path.realpath(os.path.expanduser(os.fspath(folder))))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, TypeError) as error:  # too long, a null byte
        if is_from_elsewhere(error):
            raise
        raise InputError(f"folder must be a path that can be made, not {str(folder)[:80]!r}: {error}.") from None
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    with machine_faults(above):
        is_folder = above.is_dir()
    if not is_folder:
        raise InputError(f"{above} is no folder. Name another folder.")
    return path


_READ = ("ledger.jsonl", "ledger.head", KEY_FILE, SAMPLE_FILE, CERTIFICATE_FILE)
"""What an opening reads."""


def refuse_other_files(folder: Path) -> None:
    """Raises InputError where a folder has no ledger, but more than a beginning that was cut short leaves."""
    names = sorted(os.listdir(folder))  # before anything is looked for: another process may just begin
    ledger = folder / "ledger.jsonl"
    for path in (folder / name for name in _READ):
        if is_there(path) and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path} is no file. Name a new folder.")
    content = ledger.read_bytes() if ledger.exists() else None
    if content is not None and (b"\n" in content or (folder / "ledger.head").exists()):
        return
    # An empty ledger comes first, and its first byte after its head; a key is written whole; a sample is drawn after
    # two lines.
    is_begun = content == b""
    begun = {ledger.name: is_begun, KEY_FILE: is_begun and is_key(folder), SAMPLE_FILE: is_begun and is_fresh(folder)}
    others = [name for name in names if not begun.get(name, name.endswith(".part"))]
    if others:
        raise InputError(
            f"{folder} is not empty, and has no ledger of a loop ({others[0]} is there). Name a new folder; if a "
            "loop's ledger was lost here, put it back, or the epsilons of both add up."
        )


def sum_that_noise_fits(grad_sum: Any, noise_stddev: float) -> tuple[dict[str, torch.Tensor], torch.device]:
    """A copy of a sum on the CPU, which nobody else writes to: not through shared memory either, as a process that was
    forked off. And the device of the sum.

    Raises:
        InputError: If noise cannot be added to it.
    """
    if torch.jit.is_tracing():
        raise InputError("a release cannot be traced: what is traced would be released again without being counted.")
    if not isinstance(grad_sum, Mapping) or not grad_sum:
        raise InputError(f"grad_sum must be a dictionary of tensors, not {type(grad_sum).__name__} or empty.")
    grad_sum = dict(grad_sum.items())  # once: a mapping may make its values anew
    for name, value in grad_sum.items():
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype not in _FLOATS
            or value.layout != torch.strided
            or value.device.type == "meta"
        ):
            kind = (
                f"a {value.dtype} tensor ({value.layout}, {value.device})"
                if isinstance(value, torch.Tensor)
                else f"a {type(value).__name__}"
            )
            raise InputError(
                f"grad_sum[{name!r}] must be a dense tensor of float32 or float64, not {kind}. Gradients of fewer bits "
                "are converted each by itself, before they are added: in a sum one image would count many times."
            )
    if len({value.device for value in grad_sum.values()}) > 1:
        raise InputError("the tensors of grad_sum lie on several devices. Move them to one.")
    if not _LEAST_STDDEV < noise_stddev < 1 / _LEAST_STDDEV:
        raise InputError(
            f"noise of standard deviation {noise_stddev:g} is no noise in float32. State sensitivity in units in which "
            "gradients are of usual size."
        )
    try:
        copied = {name: torch.from_numpy(_numbers_of(value)) for name, value in grad_sum.items()}
    except (RuntimeError, TypeError, ValueError) as error:  # nested, masked, lazy, or within a transform of torch.func
        if is_from_elsewhere(error) or _is_of_memory(error) or "CUDA error" in str(error):  # of an earlier kernel
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"the numbers of grad_sum cannot be read ({reason}). Give plain tensors.") from None
    return copied, next(iter(grad_sum.values())).device


def _numbers_of(value: torch.Tensor) -> np.ndarray:
    """A copy, in C order."""
    found = value.numpy(force=True)
    if found.size and found.flags.owndata:
        # NumPy took memory of its own, and whatever lay there: the tensor has none, as within `functionalize`.
        raise TypeError("a tensor has no memory, as where its storage was freed")
    # By NumPy, row by row: a process that was forked waits for PyTorch's threads, which reorder, without end.
    return np.array(found, order="C")


@contextlib.contextmanager
def memory_faults(what: str) -> Iterator[None]:
    """Turns memory that is too small into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_from_elsewhere(error) or not _is_of_memory(error):
            raise
        raise MachineError(f"memory is too small {what}. Make room, then make the same call again.") from None


def _is_of_memory(error: Exception) -> bool:
    says = str(error)
    is_said = "can't allocate memory" in says or "out of memory" in says
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or is_said


def length(grad_sum: Mapping[str, torch.Tensor]) -> float:
    """The L2 norm of tensors on the CPU, in float64; NaN where a number is none."""
    with np.errstate(all="ignore"):
        return math.sqrt(sum(float(np.square(value.numpy(), dtype=np.float64).sum()) for value in grad_sum.values()))


def integer(name: str, value: Any) -> int:
    try:
        found = None if isinstance(value, bool) or _is_of_bool(value) else operator.index(value)
    except (TypeError, RuntimeError) as error:  # a tensor without numbers
        if is_from_elsewhere(error):
            raise
        found = None
    if found is None:
        raise InputError(f"{name} must be a whole number, not {shown(value)}.")
    if abs(found) >= _LARGEST:
        raise InputError(f"{name} must be a whole number below 2**62.")
    return found


def above_zero(name: str, value: Any) -> float:
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach()  # else PyTorch warns of what needs a gradient
        number = float(value) if _is_real(value) else math.nan
    except (TypeError, ValueError, RuntimeError) as error:
        if is_from_elsewhere(error):
            raise
        number = math.nan
    except OverflowError:
        raise InputError(f"{name} must be a number above 0, not one of so many digits.") from None
    if not 0 < number < math.inf:
        raise InputError(f"{name} must be a number above 0, not {shown(value)}.")
    return number


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype != torch.bool and not value.is_complex()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "iuf" and not np.ma.isMaskedArray(value)
    return isinstance(value, (numbers.Real, Decimal)) and not isinstance(value, bool)


def _is_of_bool(value: Any) -> bool:
    return getattr(value, "dtype", None) in (torch.bool, np.bool_)


def shown(value: Any) -> str:
    """Numbers and words as they are; of an array its type alone: it may hold what nobody should read."""
    if isinstance(value, (float, str, bytes)) or isinstance(value, int) and abs(value) < _LARGEST:
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def whole_mechanism(mechanism: Mechanism) -> Mechanism:
    """With noise as JSON has it, whatever library it comes from, and numbers that a file can hold."""
    if not isinstance(mechanism, Mechanism):
        raise InputError(f"mechanism must be a sfumato.Mechanism, not a {type(mechanism).__name__}.")
    if mechanism.first_release_noise is not None:
        raise InputError(
            "a loop of your own counts updates alone, so mechanism.first_release_noise must be None. Count that "
            "release in a loop of its own: a mechanism of all examples and one step; the epsilons add up."
        )
    for name in ("num_examples", "batch_size", "num_steps", "images_per_unit"):
        integer(name, getattr(mechanism, name))
    if mechanism.num_examples > _MOST_EXAMPLES:
        raise InputError(f"num_examples = {mechanism.num_examples:,} is more than 2**32, which no memory holds.")
    if mechanism.noise_multiplier > _MOST_NOISE:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier:g} leaves nothing to learn. Take a smaller one."
        )
    return mechanism.replace(noise_multiplier=float(mechanism.noise_multiplier))
