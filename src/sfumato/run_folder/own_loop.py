"""The ledger and the certificate of a training loop of one's own."""

import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, get_args

import numpy as np

from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.errors import InputError
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
    first_session_line,
    last_session,
    next_session_line,
    releases,
    run_line,
    spent_mechanism,
    step_line,
)
from sfumato.run_folder.files import machine_faults, write_json
from sfumato.run_folder.key_file import KEY_FILE, delete_key, read_key, write_key
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import CERTIFICATE_FILE, LoopCertificate

OF_THE_LOOP = (
    "what the loop did: that each release was one Poisson sample of these images, each clipped alone and noised once, "
    "and that nothing else of them left it, is its author's word"
)
NO_RECIPE = "own loop"
_LARGEST, _MOST_NOISE = 2**62, 1e12
_opened: "weakref.WeakValueDictionary[Path, OwnLoop]" = weakref.WeakValueDictionary()
"""In this process, by folder. A notebook's cell that is run again opens the folder anew, and closes the
object that it had before.
"""


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
    """Counts the releases of somebody's own loop on disk, and states what they cost.

    Guarantee: a release that `release` returned from is in the ledger, whatever happens next, and no
    certificate counts fewer releases than the ledger. A folder that is opened again goes on: what was
    released before counts, updates that are repeated count again, and they are drawn from other
    randomness; an object that this process had open there is closed. One process uses the object,
    from any of its threads; in a forked one it refuses.

    Example:
        >>> loop = sfumato.OwnLoop("runs/mine", mechanism, clipping_norm=1.0, delta=1e-5)  # doctest: +SKIP
        >>> for step in range(1, mechanism.num_steps + 1):  # doctest: +SKIP
        ...     batch = sfumato.poisson_batch(mechanism, loop.streams.stream("sampling", step))
        ...     grad_sum = grad_fn(images[batch], labels[batch]).grad_sum
        ...     loop.release(step)
        ...     noisy = sfumato.add_noise(grad_sum, noise_stddev, loop.streams.stream("noise", step))
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
        self._process = os.getpid()
        self._clipping_norm = _above_zero("clipping_norm", clipping_norm)
        self._delta = _above_zero("delta", delta)
        if not isinstance(accountant, str) or accountant not in get_args(Accountant):
            raise InputError(f"accountant must be one of {', '.join(get_args(Accountant))}, not {accountant!r}.")
        self._folder, self._mechanism, self._accountant = _path_of(folder), _whole(mechanism), accountant
        claims_of(self._mechanism, self._delta, accountant)  # refused before anything is written
        with machine_faults(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        if not self._path("ledger.jsonl").exists() and any(self._folder.iterdir()):
            raise InputError(f"{folder} is not empty, and no loop was begun there. Name a new folder.")
        before = _opened.get(self._folder.resolve())
        if before is not None and before._process == os.getpid():
            before.close()
        self._ledger = Ledger.open(self._path("ledger.jsonl"), exclusive=True)
        weakref.finalize(self, self._ledger.close)
        try:
            self._begin()
        except BaseException:
            self._ledger.close()
            raise
        self._streams = Streams(new_key(), context={}, session={"number": self._session})
        # Of one thread; a signal's handler runs in the thread that it interrupts, and is told so.
        self._lock, self._is_called = threading.RLock(), False
        self._last_step, self._ends = 0, False
        self._certificate: LoopCertificate | None = None  # of a loop that has finished
        _opened[self._folder.resolve()] = self

    @property
    def streams(self) -> Streams:
        """Randomness of this object alone, from a key that is never written down: for `poisson_batch`,
        `add_noise` and a model's own draws, by purpose and step.
        """
        self._refuse_another_process()
        return self._streams

    @_one_at_a_time
    def release(self, step: int) -> None:
        """Counts one release: call it before the noisy sum of update ``step`` is used.

        Args:
            step: From 1, higher than that of the release before; up to the mechanism's num_steps.

        Raises:
            InputError: If it is not, or the loop has finished or was closed.
            MachineError: If it cannot be written; the update must then not be applied. The same
                release may be tried again, as after an interrupt; it is refused where it did count.
        """
        number = _integer("step", step)
        self._refuse_closed()
        if self._ends:
            raise InputError("this loop ends: a call of finish did not return. Call it again.")
        if not self._last_step < number <= self._mechanism.num_steps:
            raise InputError(
                f"update {number} is not one after {self._last_step} and up to {self._mechanism.num_steps}, which "
                "the mechanism states. Each update is released once; for more, state more."
            )
        if releases(self._ledger.lines[-1:]) == {(self._session, number)}:
            self._ledger.settle()  # a full disk kept the line from the ledger; the head's file has it
        else:
            self._ledger.append(step_line(self._session, number, None))
        self._last_step = number

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
            written = self._write("complete", self._released())
            delete_key(self._folder)  # from here on nobody goes on in the folder
            self._certificate = written
        self._ledger.close()
        return self._certificate

    @_one_at_a_time
    def close(self) -> None:
        """Ends this object without a last certificate: the folder may be opened again, to go on."""
        self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise InputError("a loop's object cannot be copied or sent: two of them would share randomness. Open another.")

    def _refuse_closed(self) -> None:
        if self._certificate is not None:
            raise InputError("this loop has finished: its certificate counts no more releases. Begin another one.")
        if not self._ledger.is_open:
            raise InputError("this loop was closed, and another may go on in its folder. Open the folder again.")

    def _refuse_another_process(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                "this loop was opened by another process: two that share its randomness would release one noise twice. "
                "Count releases in one process."
            )

    def _begin(self) -> None:
        """Reads what was released before, and begins a session."""
        ledger, stated = self._ledger, self._mechanism
        if not ledger.lines and not ledger.head_path.exists():
            write_key(self._folder, new_key())
        elif not self._path(KEY_FILE).exists():
            raise InputError(f"{self._folder} holds a loop that has finished, or another run. Name a new folder.")
        key = read_key(self._folder)
        ledger.appends_under(key)
        ledger.settle()
        first = run_line(run_id(key), stated, self._clipping_norm, NO_RECIPE)
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
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder must be a path, not {folder!r}.")
    try:
        path = Path(os.path.abspath(os.fspath(folder)))
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, TypeError) as error:  # too long, a null byte
        raise InputError(f"folder must be a path that can be made, not {str(folder)[:80]!r}: {error}.") from None
    above = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not above.is_dir():
        raise InputError(f"{above} is no folder. Name another folder.")
    return path


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
    """With numbers as JSON has them, whatever library they come from."""
    if not isinstance(mechanism, Mechanism):
        raise InputError(f"mechanism must be a sfumato.Mechanism, not a {type(mechanism).__name__}.")
    if mechanism.first_release_noise is not None:
        raise InputError(
            "a loop of your own counts updates alone, so mechanism.first_release_noise must be None. Count that "
            "release in a loop of its own: a mechanism of all examples and one step; the epsilons add up."
        )
    names = ("num_examples", "batch_size", "num_steps", "images_per_unit")
    numbers: dict[str, Any] = {name: _integer(name, getattr(mechanism, name)) for name in names}
    if mechanism.noise_multiplier > _MOST_NOISE:
        raise InputError(
            f"noise_multiplier = {mechanism.noise_multiplier:g} leaves nothing to learn. Take a smaller one."
        )
    return mechanism.replace(**numbers, noise_multiplier=float(mechanism.noise_multiplier))
