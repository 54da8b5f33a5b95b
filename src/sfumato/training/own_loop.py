"""A training loop of one's own, made private: its samples, its noise, its ledger and its certificate."""

import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, get_args

import numpy as np
import torch

from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError, MachineError
from sfumato.planning.claims import claims_of
from sfumato.randomness import Streams, new_key, run_id
from sfumato.run_folder.certificate import (
    OTHER_RUNS,
    PERSONS,
    RUNNING_TIME,
    SEVERAL_IMAGES,
    UNSEARCHED,
)
from sfumato.run_folder.entries import (
    OWN_LOOP,
    first_session_line,
    last_session,
    next_session_line,
    releases,
    run_line,
    spent_mechanism,
    step_line,
)
from sfumato.run_folder.files import machine_faults, read_json, write_json
from sfumato.run_folder.key_file import delete_key, has_key, read_key, write_key
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import CERTIFICATE_FILE, LoopCertificate
from sfumato.training.noise import add_noise

OF_THE_LOOP = (
    "what the loop did: that each release was the sum over the sample that was drawn for it, each image clipped alone "
    "to the stated sensitivity, that nothing else of them left it, and that nobody put an older copy of its folder "
    "back, is its author's word"
)
_LARGEST, _MOST_NOISE, _LEAST_STDDEV = 2**62, 1e12, 1e-30
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_opened: "weakref.WeakValueDictionary[tuple[int, int], OwnLoop]" = weakref.WeakValueDictionary()
"""In this process, by device and number of the ledger's file. A notebook's cell that is run again opens the
folder anew, and closes the object that it had before.
"""


_num_forks = 0
"""Above this process: in a container, a forked process may have its parent's number."""


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)
P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(
    method: Callable[Concatenate["OwnLoop", P], T],
) -> Callable[Concatenate["OwnLoop", P], T]:
    """Other threads wait; a handler of a signal that interrupts a call is told so."""

    @functools.wraps(method)
    def call(self: "OwnLoop", *args: P.args, **kwargs: P.kwargs) -> T:
        self._refuse_another_process()  # there another thread's lock is held for ever
        with self._lock:
            if self._is_called:
                raise InputError(
                    "a call of this loop is under way in this thread, which a signal's handler interrupted. Let it end "
                    "first: have the handler set a flag that the loop looks at."
                )
            try:
                self._is_called = True
                return method(self, *args, **kwargs)
            finally:  # at once, though an exception may be held for long
                self._is_called = False

    return call


class OwnLoop:
    """Draws the samples and the noise of somebody's own loop, counts its releases on disk, and states what they cost.

    Guarantee: a sum leaves `release` with noise of the mechanism's scale that no other sum has, and is in the
    ledger by then, whatever happens next; no certificate counts fewer releases than the ledger. Each sample is
    drawn for one release. A folder that is opened again goes on: what was released before counts, updates that
    are repeated count again, and they are drawn from other randomness; an object that this process had open
    there is closed. One process uses the object, from any of its threads; in a forked one it refuses.

    Example:
        >>> loop = sfumato.OwnLoop("runs/mine", mechanism, clipping_norm=1.0, delta=1e-5)  # doctest: +SKIP
        >>> for step in range(1, mechanism.num_steps + 1):  # doctest: +SKIP
        ...     batch = loop.batch(step)
        ...     grad_sum = grad_fn(images[batch], labels[batch]).grad_sum
        ...     noisy = loop.release(step, grad_sum, sensitivity=grad_fn.sensitivity)
        >>> loop.finish().epsilon  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path,
        mechanism: Mechanism,
        *,
        clipping_norm: float,
        delta: float,
        accountant: Accountant = "pld",
    ) -> None:
        """Begins, or goes on.

        Args:
            folder: New, empty, or that of the same loop before. Takes ledger.jsonl and privacy.json.
            mechanism: Its num_steps is how many updates this loop may still take.
            clipping_norm: C, stated in the certificate.
            delta: In (0, 1).

        Raises:
            InputError: If no epsilon is known for the mechanism, the folder holds something else, a
                loop that has finished, or one with another mechanism, or another process works in it.
            MachineError: If it cannot be written.
        """
        self._process = os.getpid(), _num_forks
        self._clipping_norm = _above_zero("clipping_norm", clipping_norm)
        self._delta = _above_zero("delta", delta)
        if not isinstance(accountant, str) or accountant not in get_args(Accountant):
            raise InputError(f"accountant must be one of {', '.join(get_args(Accountant))}, not {accountant!r}.")
        self._folder, self._mechanism, self._accountant = _path_of(folder), _whole(mechanism), accountant
        claims_of(self._mechanism, self._delta, accountant)  # refused before anything is written
        path = self._path("ledger.jsonl")
        with machine_faults(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not path.exists() and any(self._folder.iterdir()):
                raise InputError(f"{folder} is not empty, and no loop was begun there. Name a new folder.")
            before = _opened.get(_place(path)) if path.exists() else None
        if before is not None and before._process == self._process:
            before.close()
        self._ledger = Ledger.open(path, exclusive=True)  # closed by itself where nothing holds it any more
        try:
            self._begin()
            self._streams = Streams(new_key(), context={}, session={"number": self._session})
            # Of one thread; a signal's handler runs in the thread that it interrupts, and is told so.
            self._lock, self._is_called = threading.RLock(), False
            self._last_step, self._num_noises, self._ends = 0, 0, False
            self._drawn: tuple[int, int] | None = None  # number and size of the sample that is to be released
            self._certificate: LoopCertificate | None = None  # of a loop that has finished
            _opened[_place(path)] = self
        except BaseException:
            self._ledger.close()
            raise

    @_one_at_a_time
    def batch(self, step: int) -> np.ndarray:
        """The sample of update ``step``: each example alone, with the mechanism's probability. It may be empty,
        and is released all the same: to pass over samples by their size would cost more than is stated.

        Args:
            step: From 1, higher than that of the release before; up to the mechanism's num_steps.

        Returns:
            Ascending indices, shape (realised batch,), int64. The same at each call, until it is released.

        Raises:
            InputError: If the step is none of these, or the loop has finished or was closed.
        """
        number = self._next(step)
        if self._drawn is not None and self._drawn[0] != number:
            raise InputError(
                f"sample {self._drawn[0]} was drawn and not released. Release it first, with zeros where it is empty: "
                "to pass over samples costs more than is stated."
            )
        indices = poisson_batch(self._mechanism, self._streams.stream("sampling", number))
        self._drawn = number, len(indices)
        return indices

    @_one_at_a_time
    def model_key(self, step: int) -> bytes:
        """For a model that draws random numbers (dropout): the ``key`` that `clipped_grad` takes in update
        ``step``, 32 bytes. Raises InputError as `batch` does.
        """
        return bytes(self._streams.stream("model", self._next(step)).bytes(32))

    @_one_at_a_time
    def release(
        self, step: int, grad_sum: Mapping[str, torch.Tensor], *, sensitivity: float
    ) -> dict[str, torch.Tensor]:
        """Counts update ``step``, and gives its sum with noise. All that an update releases is one sum: of two
        networks, put both into one dictionary.

        Args:
            step: That `batch` was called with last.
            grad_sum: Name -> sum over the sample's examples, floating point.
            sensitivity: How far one example moves all of it, in L2 norm: `grad_fn.sensitivity`. The noise has
                noise_multiplier times that.

        Returns:
            Name -> float32 noisy sum, to be divided by the mechanism's batch_size.

        Raises:
            InputError: If the step or the sum is not as said, or the loop has finished or was closed.
            MachineError: If it cannot be written; nothing was released then. The same release may be
                tried again, as after an interrupt; it is refused where it did count.
        """
        number = self._next(step)
        if self._drawn is None or number != self._drawn[0]:
            raise InputError(
                f"no sample was drawn for update {number}: the certificate is for samples of the mechanism alone. Draw "
                f"it by batch({number})."
            )
        most = _above_zero("sensitivity", sensitivity)
        noise_stddev = self._mechanism.noise_multiplier * most
        whole = _checked(grad_sum, noise_stddev)
        if not _length(whole) <= self._drawn[1] * most * 1.001:
            raise InputError(
                "the sum is longer than the examples of its sample can make it, or not finite: they were not clipped "
                "to the stated sensitivity, or are those of another sample."
            )
        if releases(self._ledger.lines[-1:]) == {(self._session, number)}:
            self._ledger.settle()  # a full disk kept the line from the ledger; the head's file has it
        else:
            self._ledger.append(step_line(self._session, number, None))
        self._num_noises += 1  # not the step: what is tried again, since it was interrupted, has other noise
        noisy = add_noise(whole, noise_stddev, self._streams.stream("noise", self._num_noises))
        self._last_step, self._drawn = number, None
        return noisy

    @_one_at_a_time
    def finish(self) -> LoopCertificate:
        """Ends the loop: writes and returns what its releases cost. The folder takes no more.

        Raises:
            InputError: If the loop was closed.
            MachineError: If it cannot be written. It may be called again, as after an interrupt.
        """
        if self._certificate is None:
            self._refuse_closed()
            self._ends = True
            self._ledger.settle()
            if Ledger.open(self._ledger.path).lines != self._ledger.lines:
                raise MachineError(
                    f"{self._ledger.path} was written over while it was in use. Put it back as it was, and call finish "
                    "again; else what was spent is not known."
                )
            written = self._write("complete", self._released())
            delete_key(self._folder)  # from here on nobody goes on in the folder
            self._certificate = written
        self._ledger.close()
        return self._certificate.model_copy(deep=True)

    @_one_at_a_time
    def close(self) -> None:
        """Ends this object without a last certificate: the folder may be opened again, to go on."""
        self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise InputError("a loop's object cannot be copied or sent: two of them would share randomness. Open another.")

    def _next(self, step: Any) -> int:
        """The number of an update that may come next."""
        number = _integer("step", step)
        self._refuse_closed()
        if self._ends:
            raise InputError("this loop ends: a call of finish did not return. Call it again.")
        if not self._last_step < number <= self._mechanism.num_steps:
            raise InputError(
                f"update {number} is not one after {self._last_step} and up to {self._mechanism.num_steps}, which "
                "the mechanism states. Each update is released once; for more, state more."
            )
        return number

    def _refuse_closed(self) -> None:
        if self._certificate is not None:
            raise InputError("this loop has finished: its certificate counts no more releases. Begin another one.")
        if not self._ledger.is_open:
            raise InputError("this loop was closed, and another may go on in its folder. Open the folder again.")

    def _refuse_another_process(self) -> None:
        if (os.getpid(), _num_forks) != self._process:
            raise InputError(
                "this loop was opened by another process: two that share its randomness would release one noise twice. "
                "Count releases in one process."
            )

    def _begin(self) -> None:
        """Reads what was released before, and begins a session."""
        ledger, stated = self._ledger, self._mechanism
        if not ledger.lines and not ledger.head_path.exists():
            self._refuse_older_copy()
            if not has_key(self._folder):  # of a beginning that was cut short
                write_key(self._folder, new_key())
        elif not has_key(self._folder):
            raise InputError(f"{self._folder} holds a loop that has finished, or another run. Name a new folder.")
        key = read_key(self._folder)
        ledger.appends_under(key)
        self._refuse_older_copy()
        ledger.settle()
        first = run_line(run_id(key), stated, self._clipping_norm, OWN_LOOP)
        if not ledger.lines:
            ledger.append(first)
        elif {name: ledger.lines[0].get(name) for name in first} != first:
            raise InputError(
                f"{self._folder} holds a run with another mechanism or clipping norm, so that its releases and these "
                "have no common epsilon. Name a new folder."
            )
        if len(ledger.lines) == 1:
            ledger.append(first_session_line({}))
        else:
            ledger.append(next_session_line(last_session(ledger.lines), 0, None, {}))
        self._session: int = last_session(ledger.lines)["session"]
        self._write("running", self._released() + stated.num_steps)

    def _refuse_older_copy(self) -> None:
        """Raises InputError where the certificate counts lines that the ledger has not: it is a copy from before."""
        path = self._path(CERTIFICATE_FILE)
        stated = read_json(path) if path.exists() else {}
        lines = stated.get("ledger_lines") if isinstance(stated, dict) else None
        if isinstance(lines, int) and lines > len(self._ledger.lines):
            raise InputError(
                f"{path} counts {lines} lines of a ledger that has {len(self._ledger.lines)}: an older copy was put "
                "back, and what was released since is not in it. Begin another loop in a new folder; the epsilons of "
                "both add up."
            )

    def _released(self) -> int:
        return spent_mechanism(self._ledger.lines).num_steps

    def _write(self, status: Literal["running", "complete"], num_steps: int) -> LoopCertificate:
        mechanism = self._mechanism.replace(num_steps=num_steps)
        written = LoopCertificate(
            **dict(claims_of(mechanism, self._delta, self._accountant)),
            status=status,
            sampling=mechanism.sampling,
            noise_multiplier=mechanism.noise_multiplier,
            sampling_prob=mechanism.sampling_prob,
            batch_size=mechanism.batch_size,
            num_examples=mechanism.num_examples,
            num_steps=num_steps,
            clipping_norm=self._clipping_norm,
            run_id=self._ledger.lines[0]["run_id"],
            ledger_lines=len(self._ledger.lines),
            ledger_head=self._ledger.head,
            not_covered=[
                OF_THE_LOOP,
                UNSEARCHED,
                SEVERAL_IMAGES if mechanism.images_per_unit == 1 else PERSONS,
                OTHER_RUNS,
                RUNNING_TIME,
            ],
        )
        write_json(self._path(CERTIFICATE_FILE), written.as_json())
        return written

    def _path(self, name: str) -> Path:
        return self._folder / name


def _path_of(folder: Any) -> Path:
    """The same folder wherever the process goes.

    Raises:
        InputError: If nothing can be written there, whatever room there is.
    """
    if not isinstance(folder, (str, os.PathLike)) or not str(folder):
        raise InputError(f"folder must be a path, not {folder!r}.")
    try:
        path = Path(os.path.realpath(os.path.expanduser(os.fspath(folder))))
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, TypeError) as error:  # too long, a null byte
        raise InputError(f"folder must be a path that can be made, not {str(folder)[:80]!r}: {error}.") from None
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not above.is_dir():
        raise InputError(f"{above} is no folder. Name another folder.")
    return path


def _place(path: Path) -> tuple[int, int]:
    """Of a file, whatever it is called."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _checked(grad_sum: Any, noise_stddev: float) -> Mapping[str, torch.Tensor]:
    """Raises InputError where noise cannot be added to a sum."""
    if torch.jit.is_tracing():
        raise InputError("a release cannot be traced: what is traced would be released again without being counted.")
    if not isinstance(grad_sum, Mapping) or not grad_sum:
        raise InputError(f"grad_sum must be a dictionary of tensors, not {type(grad_sum).__name__} or empty.")
    for name, value in grad_sum.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS or value.layout != torch.strided:
            kind = f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise InputError(f"grad_sum[{name!r}] must be a dense tensor of floating point numbers, not {kind}.")
    if len({value.device for value in grad_sum.values()}) > 1:
        raise InputError("the tensors of grad_sum lie on several devices. Move them to one.")
    if not _LEAST_STDDEV < noise_stddev < 1 / _LEAST_STDDEV:
        raise InputError(
            f"noise of standard deviation {noise_stddev:g} is no noise in float32. State sensitivity in units in which "
            "gradients are of usual size."
        )
    return grad_sum


def _length(grad_sum: Mapping[str, torch.Tensor]) -> float:
    """The L2 norm, in float64; NaN where a number is none."""
    return math.sqrt(sum(float(value.detach().double().square().sum()) for value in grad_sum.values()))


def _integer(name: str, value: Any) -> int:
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise InputError(f"{name} must be a whole number, not {value!r}.")
    if abs(found) >= _LARGEST:
        raise InputError(f"{name} must be a whole number below 2**62.")
    return found


def _above_zero(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes, np.bool_)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    except OverflowError:
        raise InputError(f"{name} must be a number above 0, not one of so many digits.") from None
    if not 0 < number < math.inf:
        raise InputError(f"{name} must be a number above 0, not {value!r}.")
    return number


def _whole(mechanism: Mechanism) -> Mechanism:
    """With noise as JSON has it, whatever library it comes from, and numbers that a file can hold."""
    if not isinstance(mechanism, Mechanism):
        raise InputError(f"mechanism must be a sfumato.Mechanism, not a {type(mechanism).__name__}.")
    if mechanism.first_release_noise is not None:
        raise InputError(
            "a loop of your own counts updates alone, so mechanism.first_release_noise must be None. Count that "
            "release in a loop of its own: a mechanism of all examples and one step; the epsilons add up."
        )
    for name in ("num_examples", "batch_size", "num_steps", "images_per_unit"):
        _integer(name, getattr(mechanism, name))
    if mechanism.noise_multiplier > _MOST_NOISE:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier:g} leaves nothing to learn. Take a smaller one."
        )
    return mechanism.replace(noise_multiplier=float(mechanism.noise_multiplier))
