"""A training loop of one's own, made private: its samples, its noise, its ledger and its certificate."""

import functools
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, get_args

import numpy as np
import torch

from sfumato.accounting.gaussian import refuse_beyond_reach
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError, MachineError, is_from_elsewhere
from sfumato.planning.claims import claims_of
from sfumato.randomness import Stream, Streams, new_key, run_id, subkey
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
from sfumato.run_folder.files import is_there, machine_faults, make_folder, read_json, write_json
from sfumato.run_folder.key_file import KEY_FILE, delete_key, has_key, read_key, write_key
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.process import this_process
from sfumato.run_folder.record import CERTIFICATE_FILE, LoopCertificate
from sfumato.run_folder.tensor_mac import tensor_mac
from sfumato.training import waiting_sample
from sfumato.training.noise import add_noise
from sfumato.training.own_loop_arguments import (
    above_zero,
    integer,
    length,
    memory_faults,
    path_of,
    refuse_other_files,
    shown,
    sum_that_noise_fits,
    whole_mechanism,
)
from sfumato.training.own_loop_certificate import Terms, loop_certificate
from sfumato.training.uncompiled import uncompiled
from sfumato.training.waiting_sample import WaitingSample

_opened: "weakref.WeakValueDictionary[tuple[int, int], OwnLoop]" = weakref.WeakValueDictionary()
"""In this process, by device and number of the ledger's file. A notebook's cell that is run again opens the
folder anew, and closes the object that it had before.
"""
_FORKED_AMID_A_CALL = (
    "sfumato: this process was forked amid a call of an own loop, as by a signal's handler. Two processes would go on "
    "with that call, so the new one ends. Have the handler set a flag that the loop looks at.\n"
)
P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(
    method: Callable[Concatenate["OwnLoop", P], T],
) -> Callable[Concatenate["OwnLoop", P], T]:
    """Other threads wait; a handler of a signal that interrupts a call is told so. Nothing of it is compiled."""

    def call(self: "OwnLoop", *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._has_begun:
            raise InputError("the folder was not opened; what the opening raised says why. Make another object.")
        self._refuse_another_process()  # there another thread's lock is held for ever
        with self._lock:
            if self._is_called:
                raise InputError(
                    "a call of this loop is under way in this thread: a signal's handler interrupted it, or what it was"
                    " given calls it. Let it end first; have a handler set a flag that the loop looks at."
                )
            try:
                self._is_called = True
                found = method(self, *args, **kwargs)
                # Nothing is handed out twice, though a fork by C, or one too deep to call anything, runs no hook.
                self._refuse_another_process()
                return found
            finally:  # at once, though an exception may be held for long
                self._is_called = False

    @functools.wraps(method)  # here, so that a process that is forked before `call` begins is forked amid a call
    def as_written(self: "OwnLoop", *args: P.args, **kwargs: P.kwargs) -> T:
        return uncompiled(call)(self, *args, **kwargs)

    return as_written


class OwnLoop:
    """Draws the samples and the noise of somebody's own loop, counts its releases on disk, and states what they cost.

    Guarantee: a sum leaves `release` with noise of the mechanism's scale that no other sum has, and is in the
    ledger by then, whatever happens next; no certificate counts fewer releases than the ledger. Each sample is
    drawn for one release, and the next one is drawn once it was released, whoever goes on in between: a sample on
    which a loop died is drawn again. A folder that is opened again goes on: what was released before counts, and
    updates that are repeated count again, on other samples with other noise; an object that this process had open
    there is closed. One process uses the object, from any of its threads; in a forked one it refuses, and one
    that is forked amid a call by the thread that makes it, as by a signal's handler, ends at once. A function that
    `torch.compile` compiles may call it, but for one that must be one graph (``fullgraph=True``).

    Example:
        >>> loop = sfumato.OwnLoop("runs/mine", mechanism, clipping_norm=1.0, delta=1e-5)  # doctest: +SKIP
        >>> for step in range(1, mechanism.num_steps + 1):  # doctest: +SKIP
        ...     batch = loop.batch(step)
        ...     grad_sum = grad_fn(images[batch], labels[batch]).grad_sum
        ...     noisy = loop.release(step, grad_sum, sensitivity=grad_fn.sensitivity)
        >>> loop.finish().epsilon  # doctest: +SKIP
    """

    _ledger: Ledger
    _key: bytes
    _waiting: WaitingSample | None
    _has_begun = False  # the opening succeeded

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
            folder: New, empty, or that of the same loop before, whole. Takes ledger.jsonl, ledger.head and
                privacy.json; and while the loop goes on key and sample.json, which are for you alone.
            mechanism: Its num_steps is how many updates this loop may still take.
            clipping_norm: C, stated in the certificate.
            delta: In (0, 1).

        Raises:
            InputError: If no epsilon is known for the mechanism, the folder holds something else, a
                loop that has finished, or one with another mechanism, or another process works in it.
            MachineError: If it cannot be written.
        """
        uncompiled(self._open)(folder, mechanism, clipping_norm, delta, accountant)

    def _open(
        self, folder: str | Path, mechanism: Mechanism, clipping_norm: float, delta: float, accountant: Accountant
    ) -> None:
        if hasattr(self, "_ledger"):
            raise InputError("this loop was begun. Make another object.")
        self._process = this_process()
        self._clipping_norm = above_zero("clipping_norm", clipping_norm)
        self._delta = above_zero("delta", delta)
        if not isinstance(accountant, str) or accountant not in get_args(Accountant):
            raise InputError(f"accountant must be one of {', '.join(get_args(Accountant))}, not {shown(accountant)}.")
        self._folder, self._mechanism, self._accountant = path_of(folder), whole_mechanism(mechanism), accountant
        claims_of(self._mechanism, self._delta, accountant)  # refused before anything is written
        path = self._path("ledger.jsonl")
        with machine_faults(self._folder):
            make_folder(self._folder)
            refuse_other_files(self._folder)
            before = _opened.get(_place(path)) if path.exists() else None
        if before is not None and before._process == self._process:
            if before._ledger.is_open:
                self._refuse_another(before._ledger.lines, before._key)
            before.close()  # again, where that was interrupted
        self._ledger = Ledger.open(path, exclusive=True)  # closed by itself where nothing holds it any more
        try:
            self._key = self._begin()
            # Of one thread; a signal's handler runs in the thread that it interrupts, and is told so.
            self._lock, self._is_called = threading.RLock(), False
            self._last_step, self._num_noises, self._ends = 0, 0, False
            self._certificate: LoopCertificate | None = None  # of a loop that has finished
            with machine_faults(path):
                _opened[_place(path)] = self
            self._has_begun = True
        except BaseException:
            try:
                self._ledger.close()
            finally:  # again, where that was interrupted
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
            MachineError: If it cannot be noted, or memory is too small; nobody saw a sample then.
        """
        return self._sample(self._next(step))

    @_one_at_a_time
    def model_key(self, step: int) -> bytes:
        """For a model that draws random numbers (dropout): the ``key`` that `clipped_grad` takes in update
        ``step``, 32 bytes. Raises what `batch` does.
        """
        self._sample(self._next(step))
        return bytes(self._stream_of_sample("model").bytes(32))

    @_one_at_a_time
    @memory_faults("to copy a sum and add noise to it")
    def release(
        self, step: int, grad_sum: Mapping[str, torch.Tensor], *, sensitivity: float
    ) -> dict[str, torch.Tensor]:
        """Counts update ``step``, and gives its sum with noise. All that an update releases is one sum: of two
        networks, put both into one dictionary.

        Args:
            step: That `batch` was called with last.
            grad_sum: Name -> sum over the sample's examples, float32 or float64. In fewer bits one example moves a
                large sum by many times what it adds.
            sensitivity: How far one example moves all of it, in L2 norm: `grad_fn.sensitivity`. The noise has
                noise_multiplier times that. Choose it without looking at the images: it shows in the noise.

        Returns:
            Name -> float32 noisy sum, to be divided by the mechanism's batch_size.

        Raises:
            InputError: If the step or the sum is not as said, or the loop has finished or was closed.
            MachineError: If it cannot be written, or memory is too small; nothing was released then. The same
                release may be tried again, as after an interrupt; it is refused where it did count.
        """
        number = self._next(step)
        if self._waiting is None or number != self._waiting.number:
            raise InputError(
                f"no sample was drawn for update {number}: the certificate is for samples of the mechanism alone. Draw "
                f"it by batch({number})."
            )
        most = above_zero("sensitivity", sensitivity)
        noise_stddev = self._mechanism.noise_multiplier * most
        whole, device = sum_that_noise_fits(grad_sum, noise_stddev)
        if not length(whole) <= self._waiting.size * most * 1.001:
            raise InputError(
                "the sum is longer than the examples of its sample can make it, or not finite: they were not clipped "
                "to the stated sensitivity, or are those of another sample."
            )
        sums = dict(zip(map(str, range(len(whole))), whole.values(), strict=True))
        sum_mac = tensor_mac(subkey(self._key, "sum"), [self._session, number, noise_stddev], sums)
        if self._is_counted(number):
            self._ledger.settle()  # a full disk kept the line from the ledger; the head's file has it
        else:
            self._ledger.append(step_line(self._session, number, None))
        self._num_noises += 1  # not the step: what is tried again, since it was interrupted, has other noise
        # A key of its own for each, and bound to the sum: a process that was copied whole may draw the same key.
        streams = Streams(new_key(), context={}, session={"number": self._session})
        noisy = add_noise(whole, noise_stddev, streams.stream("noise", self._num_noises, sum_mac=sum_mac))
        noisy = {name: value.to(device) for name, value in noisy.items()}
        self._last_step, self._waiting = number, None
        return noisy

    @_one_at_a_time
    def finish(self) -> LoopCertificate:
        """Ends the loop: writes and returns what its releases cost. The folder takes no more.

        Raises:
            InputError: If the loop was closed, or a sample was drawn that is not released.
            MachineError: If it cannot be written. It may be called again, as after an interrupt.
        """
        if self._certificate is None:
            self._refuse_closed()
            if self._waiting is not None and not self._is_counted(self._waiting.number):  # an interrupted release does
                self._ledger.settle()  # which says if nothing can be released any more
                self._refuse_pending()
            self._ends = True
            self._ledger.settle()
            if Ledger.open(self._ledger.path).lines != self._ledger.lines:
                raise MachineError(
                    f"{self._ledger.path} was written over while it was in use. Put it back as it was, and call finish "
                    "again; else what was spent is not known."
                )
            written = self._write("complete", self._released())
            delete_key(self._folder, self._key)  # from here on nobody goes on in the folder
            waiting_sample.forget(self._folder, [line["hash"] for line in self._ledger.lines])
            self._certificate = written
        self._ledger.close()
        return self._certificate.model_copy(deep=True)

    def close(self) -> None:
        """Ends this object without a last certificate: the folder may be opened again, to go on."""
        if self._has_begun:
            self._close()

    @_one_at_a_time
    def _close(self) -> None:
        self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise InputError("a loop's object cannot be copied or sent: two of them would share randomness. Open another.")

    def _next(self, step: Any) -> int:
        """The number of an update that may come next."""
        number = integer("step", step)
        self._refuse_closed()
        if self._ends:
            raise InputError("this loop ends: a call of finish did not return. Call it again.")
        if not self._last_step < number <= self._mechanism.num_steps:
            raise InputError(
                f"update {number} is not one after {self._last_step} and up to {self._mechanism.num_steps}, which "
                "the mechanism states. Each update is released once; for more, state more."
            )
        return number

    def _is_counted(self, number: int) -> bool:
        return releases(self._ledger.lines[-1:]) == {(self._session, number)}

    def _sample(self, number: int) -> np.ndarray:
        """Of update ``number``: the one that waits for its release, or a new one, which waits from then on."""
        self._refuse_pending(number)
        if self._waiting is None:
            self._ledger.settle()  # which says if nothing can be released any more
            self._waiting = waiting_sample.new(self._folder, self._key, new_key().hex(), self._last_release())
        self._waiting.number = number
        with memory_faults(f"to draw from {self._mechanism.num_examples:,} examples: 8 bytes for each, and the sample"):
            indices = poisson_batch(self._mechanism, self._stream_of_sample("sampling"))
        self._waiting.size = len(indices)
        return indices

    def _stream_of_sample(self, purpose: str) -> Stream:
        assert self._waiting is not None
        return Streams(self._key, context={}, session={}).stream(purpose, salt=self._waiting.salt)

    def _last_release(self) -> str:
        lines = self._ledger.lines
        before = next((line for line in reversed(lines) if line["kind"] == "step"), lines[0])
        return str(before["hash"])

    def _kept_sample(self, key: bytes) -> WaitingSample | None:
        """What an earlier session drew; its file names the last release, or the one before where its own counts."""
        lines = self._ledger.lines
        hashes = [line["hash"] for line in lines if line["kind"] == "step"]
        return waiting_sample.kept(self._folder, key, [lines[0]["hash"], *hashes][-2:])

    def _refuse_pending(self, number: int | None = None) -> None:
        """Raises InputError where another sample than that of update ``number`` waits for its release; one of a session
        before has no number yet.
        """
        waiting = self._waiting
        if waiting is not None and waiting.number != number and (waiting.number or number is None):
            which = f"sample {waiting.number}" if waiting.number else "a sample of a session before"
            raise InputError(
                f"{which} was drawn and not released. Release it first, with zeros where it is empty: to pass over "
                "samples costs more than is stated."
            )

    def _refuse_closed(self) -> None:
        if self._certificate is not None:
            raise InputError("this loop has finished: its certificate counts no more releases. Begin another one.")
        if not self._ledger.is_open:
            raise InputError("this loop was closed, and another may go on in its folder. Open the folder again.")

    def _refuse_another_process(self) -> None:
        if this_process() != self._process:
            raise InputError(
                "this loop was opened by another process: two that share its randomness would release one noise twice. "
                "Count releases in one process."
            )

    def _begin(self) -> bytes:
        """Reads what was released before, and begins a session. Returns the folder's key."""
        ledger, stated = self._ledger, self._mechanism
        if not ledger.lines and not is_there(ledger.head_path):
            self._refuse_older_copy()
            # In place of what a beginning that was cut short left.
            write_key(self._folder, new_key())
        elif not has_key(self._folder):
            raise InputError(
                f"{self._folder} holds a loop that has finished, another run, or a loop that has lost its {KEY_FILE}: "
                "put that back. Or name a new folder; the epsilons of both add up."
            )
        key = read_key(self._folder)
        ledger.appends_under(key)
        self._refuse_older_copy()
        ledger.settle()
        if not ledger.lines:
            waiting_sample.begin(self._folder)
            ledger.append(self._run_line(key))
        self._refuse_another(ledger.lines, key)
        self._waiting = self._kept_sample(key)
        self._planned = self._released() + stated.num_steps
        refuse_beyond_reach(stated.replace(num_steps=self._planned), self._delta)
        if len(ledger.lines) == 1:
            # Bytes of its own: where locks do not hold, two processes that begin at once would write equal lines.
            ledger.append(first_session_line({"begun": secrets.token_hex(16)}))
        else:
            ledger.append(next_session_line(last_session(ledger.lines), 0, None, {}))
        self._session: int = last_session(ledger.lines)["session"]
        self._write("running", self._planned)
        return key

    def _run_line(self, key: bytes) -> dict[str, Any]:
        return run_line(run_id(key), self._mechanism, self._clipping_norm, OWN_LOOP)

    def _refuse_another(self, lines: list[dict[str, Any]], key: bytes) -> None:
        first = self._run_line(key)
        if {name: lines[0].get(name) for name in first} != first:
            raise InputError(
                f"{self._folder} holds a run with another mechanism or clipping norm, so that its releases and these "
                "have no common epsilon. Name a new folder."
            )

    def _refuse_older_copy(self) -> None:
        """Raises InputError where the certificate counts lines that the ledger has not: it is a copy from before."""
        path = self._path(CERTIFICATE_FILE)
        try:
            stated = read_json(path) if is_there(path) else {}
        except InputError as error:
            if is_from_elsewhere(error):
                raise
            raise InputError(
                f"{path} is damaged, so it does not tell whether an older copy of the ledger was put back. Restore it; "
                "if no copy was put back since the last release, delete it."
            ) from None
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
        terms = Terms(self._clipping_norm, self._delta, self._accountant)
        written = loop_certificate(self._ledger, num_steps, terms, planned=self._planned, status=status)
        write_json(self._path(CERTIFICATE_FILE), written.as_json())
        return written

    def _path(self, name: str) -> Path:
        return self._folder / name


def _place(path: Path) -> tuple[int, int]:
    """Of a file, whatever it is called."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _end_amid_a_call() -> None:
    """Ends a new process that would go on with a call which its parent goes on with, too."""
    ends = True  # also if its stderr is closed, or a signal comes
    try:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals is not globals():
            frame = frame.f_back
        ends = frame is not None
        if ends:
            os.write(2, _FORKED_AMID_A_CALL.encode())
    finally:
        if ends:
            os._exit(1)


os.register_at_fork(after_in_child=_end_amid_a_call)
