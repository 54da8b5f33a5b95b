"""Whatever befalls an own loop, what was released is on disk before it is used, and no noise is shared by two sums."""

import contextlib
import copy
import ctypes
import errno
import functools
import json
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import sfumato
from sfumato.errors import InputError, MachineError, is_from_elsewhere
from sfumato.run_folder.entries import releases
from sfumato.run_folder.ledger import Ledger
from sfumato.training.noise import add_noise
from tests.system import of_the_system
from tests.training.loops import DELTA, MECHANISM, ZEROS, begin, release, spent, written


def killed_after(folder, steps, draws):
    loop = begin(folder)
    np.save(draws, [release(loop, step)["weight"].numpy() for step in range(1, steps + 1)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_kill_9_what_was_released_counts_and_what_is_repeated_counts_again_under_other_noise(tmp_path):
    folder, draws = tmp_path / "run", tmp_path / "draws.npy"
    process = multiprocessing.get_context("spawn").Process(target=killed_after, args=(folder, 5, draws))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    loop = begin(folder)
    assert written(folder).num_steps == 5 + 12
    again = np.stack([release(loop, step)["weight"].numpy() for step in range(4, 13)])
    assert abs(np.corrcoef(np.concatenate([np.load(draws), again]))[np.triu_indices(14, 1)]).max() < 0.5
    assert loop.finish().num_steps == 5 + 9 and written(folder).epsilon == spent(14)


def refused_elsewhere(folder, says):
    try:
        begin(folder)
    except InputError as error:
        says.put(str(error))


def test_two_processes_do_not_count_in_one_folder(tmp_path):
    loop, context = begin(tmp_path), multiprocessing.get_context("spawn")
    says = context.Queue()
    process = context.Process(target=refused_elsewhere, args=(tmp_path, says))
    process.start()
    assert "another process" in says.get(timeout=120)
    process.join()
    release(loop, 1)
    assert loop.finish().num_steps == 1


def test_a_forked_process_has_no_part_in_it(tmp_path):
    loop, (reads, writes) = begin(tmp_path), os.pipe()
    if os.fork() == 0:
        said = []
        for call in (lambda: release(loop, 1), loop.finish, loop.close, lambda: loop.batch(1)):
            try:
                call()
            except InputError as error:
                said.append(str(error))
        os.write(writes, json.dumps(said).encode())
        os._exit(0)
    said = json.loads(os.read(reads, 10_000))
    assert len(said) == 4 and all("another process" in line for line in said)
    release(loop, 1)
    assert loop.finish().num_steps == 1
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InputError, match="cannot be copied"):
            copied(loop)


def test_threads_lose_no_line_and_release_no_update_twice(tmp_path):
    mechanism = MECHANISM.replace(num_steps=200)
    loop, returned = begin(tmp_path, mechanism), []

    def work():
        for step in range(1, 201):
            with contextlib.suppress(InputError):
                release(loop, step)
                returned.append(step)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(returned) == len(set(returned)) == loop.finish().num_steps
    assert releases(Ledger.open(tmp_path / "ledger.jsonl").lines) == {(0, step) for step in returned}


def test_a_full_disk_counts_a_release_once_whether_it_is_tried_again_or_not(tmp_path, monkeypatch):
    for again in (True, False):
        folder = tmp_path / str(again)
        loop, real = begin(folder), os.write
        release(loop, 1)
        with monkeypatch.context() as full:
            full.setattr(os, "write", functools.partial(_half_written, real))
            with pytest.raises(MachineError, match="No space left"):
                release(loop, 2)
        for step in (2, 3) if again else ():
            release(loop, step)
        number = 3 if again else 2
        assert loop.finish().num_steps == number  # the one that failed may have been used
        assert len(releases(Ledger.open(folder / "ledger.jsonl").lines)) == number


@of_the_system
def _half_written(write, descriptor, data):
    write(descriptor, bytes(data)[:5])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["_write", "delete_key", "settle"])
def test_an_interrupted_finish_is_called_again_and_the_folder_takes_no_more_after_it(tmp_path, monkeypatch, place):
    from sfumato.training import own_loop

    loop = begin(tmp_path)
    release(loop, 1)
    owner = {"_write": sfumato.OwnLoop, "delete_key": own_loop, "settle": Ledger}[place]
    with monkeypatch.context() as there:
        there.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.finish()
    with pytest.raises(InputError, match="finish did not return"):
        release(loop, 2)
    assert loop.finish().num_steps == 1
    with pytest.raises(InputError, match="has finished"):
        begin(tmp_path)


@pytest.mark.parametrize("name", ["write", "fsync", "ftruncate", "lseek"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_release_is_tried_again_and_the_ledger_stays_whole(tmp_path, monkeypatch, name, after):
    """At whatever call Ctrl-C arrives, before it or after."""
    for turn in range(4):  # write and fsync are called for the head's file, too
        folder = tmp_path / str(turn)
        loop, real, calls = begin(folder), getattr(os, name), []
        release(loop, 1)

        def stops(*arguments, real=real, calls=calls, turn=turn):
            calls.append(arguments)
            if len(calls) != turn + 1:
                return real(*arguments)
            if after:
                real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as there, contextlib.suppress(KeyboardInterrupt):
            there.setattr(os, name, stops)
            release(loop, 2)
        with contextlib.suppress(InputError):  # it did return
            release(loop, 2)
        release(loop, 3)
        assert loop.finish().num_steps == 3
        assert releases(Ledger.open(folder / "ledger.jsonl").lines) == {(0, 1), (0, 2), (0, 3)}


class Stopped(BaseException):
    """By a signal, wherever the code is."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was being opened
def test_real_signals_leave_the_ledger_whole(tmp_path):
    """Whatever line of code they meet: each release that is tried until it returns counts once."""
    loop, met, delay = begin(tmp_path, MECHANISM.replace(num_steps=60)), 0, np.random.default_rng(0)

    def stop(*arguments):
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for step in range(1, 61):
            counted, longest = False, 1e-3
            while not counted:
                try:
                    longest *= 1.5  # a disk may be slow
                    signal.setitimer(signal.ITIMER_REAL, delay.uniform(1e-5, longest))
                    with contextlib.suppress(InputError):  # it had counted, and was stopped on its way back
                        release(loop, step)
                    counted = True
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Stopped:
                    met += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert met > 5
    assert loop.finish().num_steps == 60
    assert len(Ledger.open(tmp_path / "ledger.jsonl").lines) == 62


def test_a_signal_s_handler_that_calls_it_is_refused_and_a_forked_process_does_not_wait(tmp_path, monkeypatch):
    loop, said, real = begin(tmp_path), [], os.fsync

    def handles(*arguments):
        for call in (loop.close, loop.finish, lambda: release(loop, 2)):
            try:
                call()
            except InputError as error:
                said.append(str(error))

    before = signal.signal(signal.SIGUSR1, handles)
    try:
        with monkeypatch.context() as there:
            there.setattr(os, "fsync", lambda descriptor: (os.kill(os.getpid(), signal.SIGUSR1), real(descriptor)))
            release(loop, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(said) >= 3 and all("under way in this thread" in line for line in said)

    held, free = threading.Event(), threading.Event()
    with monkeypatch.context() as there:
        there.setattr(os, "fsync", lambda descriptor: (held.set(), free.wait(), real(descriptor)))
        thread = threading.Thread(target=release, args=(loop, 2))
        thread.start()
        held.wait()
        if (child := os.fork()) == 0:
            try:
                release(loop, 3)
            except InputError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        free.set()
        thread.join()
    assert loop.finish().num_steps == 2


def test_a_forked_process_that_lives_on_keeps_no_folder_locked(tmp_path):
    loop, (reads, writes) = begin(tmp_path), os.pipe()
    if (child := os.fork()) == 0:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    loop.close()
    begin(tmp_path).finish()
    os.close(writes)
    os.waitpid(child, 0)


def test_an_interrupted_close_is_called_again_and_the_folder_is_free(tmp_path, monkeypatch):
    loop = begin(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(os, "getpid", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.close()
    loop.close()
    del loop
    begin(tmp_path).finish()


def test_what_interrupted_it_may_be_held_while_it_is_tried_again(tmp_path, monkeypatch):
    loop = begin(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(os, "fsync", interrupted)
        try:
            release(loop, 1)
        except KeyboardInterrupt as held:
            there.undo()
            release(loop, 1)
            assert held.__traceback__ is not None
    assert loop.finish().num_steps == 1


def test_a_release_that_was_interrupted_and_not_tried_again_counts_in_all_files(tmp_path, monkeypatch):
    for number, name in enumerate(["replace", "fsync", "ftruncate"]):
        folder = tmp_path / str(number)
        loop, real = begin(folder), getattr(os, name)
        release(loop, 1)
        loop.batch(2)
        with monkeypatch.context() as there:
            there.setattr(os, name, lambda *arguments, real=real: (real(*arguments), interrupted()))
            with pytest.raises(KeyboardInterrupt):
                loop.release(2, ZEROS, sensitivity=1.0)
        claim = loop.finish()
        ledger = Ledger.open(folder / "ledger.jsonl")
        ledger.refuse_another_head()
        assert claim.num_steps == len(releases(ledger.lines)) == 2 and claim.ledger_head == ledger.head


def test_a_release_that_was_stopped_within_its_noise_is_tried_again_with_other_noise(tmp_path, monkeypatch):
    from sfumato.training import own_loop

    loop, real, seen = begin(tmp_path), own_loop.add_noise, []

    def stops(*arguments):
        seen.append(real(*arguments)["weight"])
        raise KeyboardInterrupt

    with monkeypatch.context() as there:
        there.setattr(own_loop, "add_noise", stops)
        with pytest.raises(KeyboardInterrupt):
            release(loop, 1)
    # Noise lies on a grid, so that a few of the coordinates may be equal by chance.
    assert release(loop, 1)["weight"].eq(seen[0]).float().mean() < 0.1
    assert loop.finish().num_steps == 1


def test_an_opening_that_is_interrupted_anywhere_leaves_the_folder_free(tmp_path, monkeypatch):
    from sfumato.training import own_loop

    for number, place in enumerate(["write_key", "claims_of", "read_key", "_place", "write_json"]):
        folder = tmp_path / str(number)
        with monkeypatch.context() as there:
            there.setattr(own_loop, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                begin(folder)
        loop = begin(folder)
        release(loop, 1)
        assert loop.finish().num_steps == 1


def test_two_interrupts_within_an_opening_that_are_held_leave_the_folder_free(tmp_path, monkeypatch):
    with monkeypatch.context() as there:
        there.setattr("sfumato.training.own_loop.read_key", interrupted)
        real, calls = Ledger.close, []

        def close(ledger):
            calls.append(ledger)
            if len(calls) == 1:
                interrupted()
            real(ledger)

        there.setattr(Ledger, "close", close)
        with pytest.raises(KeyboardInterrupt) as held:
            begin(tmp_path)
    loop = begin(tmp_path)  # while what the first opening raised, and its frames, are held
    release(loop, 1)
    assert loop.finish().num_steps == 1
    del held


def test_a_finish_that_was_stopped_after_the_key_was_overwritten_has_finished(tmp_path, monkeypatch):
    loop = begin(tmp_path)
    release(loop, 1)
    monkeypatch.setattr("sfumato.run_folder.key_file.Path.unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.finish()
    loop.close()
    with pytest.raises(InputError, match="has finished"):
        begin(tmp_path)


def test_a_release_whose_noise_fails_is_tried_again_and_counts_once(tmp_path, monkeypatch):
    from sfumato.training import own_loop

    loop = begin(tmp_path)
    release(loop, 1)
    with monkeypatch.context() as there:
        there.setattr(own_loop, "add_noise", lambda *arguments: (_ for _ in ()).throw(RuntimeError("out of memory")))
        for step in (2, 3):
            with pytest.raises((RuntimeError, InputError)):
                release(loop, step)
    for step in (2, 3, 4):
        release(loop, step)
    assert loop.finish().num_steps == 4


def test_a_process_that_was_forked_has_no_part_in_it_whatever_its_number(tmp_path, monkeypatch):
    loop, number = begin(tmp_path), os.getpid()
    if (child := os.fork()) == 0:
        os.getpid = lambda: number  # as in a container of its own
        try:
            loop.batch(1)
        except InputError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert loop.finish().num_steps == 0


def test_a_sample_on_which_a_loop_died_is_drawn_again_whoever_goes_on(tmp_path):
    """Else whoever dies on some samples and is started again has others than the mechanism's."""
    loop = begin(tmp_path)
    for step in (1, 2):
        pending = loop.batch(step)
        for again in (1, step, 7):  # a restart begins at whatever step it likes
            loop = begin(tmp_path)
            assert np.array_equal(loop.batch(again), pending)
        loop = begin(tmp_path)
        loop.batch(step)
        loop.release(step, ZEROS, sensitivity=1.0)
        assert not np.array_equal(loop.batch(step + 1), pending)
        loop = begin(tmp_path)


def test_copies_of_a_folder_draw_samples_of_their_own(tmp_path):
    begin(tmp_path / "0").close()
    for number in (1, 2):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    samples = [begin(tmp_path / str(number)).batch(1).tolist() for number in range(3)]
    assert len(set(map(tuple, samples))) == 3


@pytest.mark.parametrize("name", ["add_noise", "tensor_mac", "new_key"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_a_release_that_fails_and_is_tried_again_from_its_sample_on_is_of_the_same_sample(
    tmp_path, monkeypatch, name, fault
):
    from sfumato.training import own_loop

    loop, samples = begin(tmp_path), []

    def fails(*arguments):
        raise fault

    for step in (1, 2, 3):
        samples.append(loop.batch(step))
        keys = {loop.model_key(step)}
        with monkeypatch.context() as there:
            there.setattr(own_loop, name, fails)
            with pytest.raises(fault):
                loop.release(step, ZEROS, sensitivity=1.0)
        assert np.array_equal(loop.batch(step), samples[-1]) and {loop.model_key(step)} == keys
        loop.release(step, ZEROS, sensitivity=1.0)
    assert len({tuple(sample) for sample in samples}) == 3
    assert loop.finish().num_steps == len(releases(Ledger.open(tmp_path / "ledger.jsonl").lines)) == 3


def test_no_two_loops_write_equal_lines(tmp_path):
    """Where locks do not hold between machines, neither takes the other's lines for its own."""
    heads = set()
    for number in (1, 2):
        loop = begin(tmp_path / str(number))
        heads.add(json.dumps(loop._ledger.lines[1]["environment"]))
    assert len(heads) == 2


def test_a_file_system_without_locks_is_named_in_one_line(tmp_path, monkeypatch):
    import fcntl

    @of_the_system
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as there:
        there.setattr(fcntl, "flock", no_locks)
        with pytest.raises(MachineError, match="cannot be locked: No locks available"):
            begin(tmp_path)


def test_a_copied_process_that_states_another_sensitivity_has_other_noise(tmp_path, monkeypatch):
    from sfumato.training import own_loop

    begin(tmp_path / "0").close()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    monkeypatch.setattr(own_loop, "new_key", lambda: bytes([7] * 32))
    noisy = []
    for number, sensitivity in enumerate((1.0, 2.0)):
        loop = begin(tmp_path / str(number))
        loop.batch(1)
        noisy.append(loop.release(1, {"x": torch.zeros(1000)}, sensitivity=sensitivity)["x"])
    assert (noisy[1] - 2 * noisy[0]).std() > 1.0


def test_a_loop_that_starts_anew_on_each_error_has_the_samples_of_the_mechanism(tmp_path):
    mechanism = sfumato.Mechanism(num_examples=1000, batch_size=1, noise_multiplier=0.6, num_steps=30)
    loop, empty = begin(tmp_path, mechanism), 0
    for step in range(1, 31):
        if len(loop.batch(step)) == 0:  # the user's code dies of it, and a supervisor starts it again
            loop = begin(tmp_path, mechanism)
        empty += len(loop.batch(step)) == 0
        loop.release(step, ZEROS, sensitivity=1.0)
    assert 0 < empty < 26  # binomial of 30 and 0.368: outside of this once in a million


def test_a_process_that_was_copied_whole_has_one_noise_for_one_sum_alone(tmp_path, monkeypatch):
    """A snapshot that is restored twice may draw the same bytes from the system."""
    from sfumato.training import own_loop

    begin(tmp_path / "0").close()
    for number in (1, 2, 3):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    released = []
    with monkeypatch.context() as copied:
        copied.setattr(own_loop, "new_key", lambda: bytes([7] * 32))
        for number, value in enumerate((0.0, 0.0, 0.25)):
            loop = begin(tmp_path / str(number))
            loop.batch(1)
            loop._waiting.size = 100  # whatever was drawn
            released.append(loop.release(1, {"x": torch.full((1000,), value / 10)}, sensitivity=1.0)["x"])
    assert torch.equal(released[0], released[1])
    assert (released[2] - released[0]).std() > 1.0
    loop = begin(tmp_path / "3")
    loop.batch(1)
    assert (loop.release(1, {"x": torch.zeros(1000)}, sensitivity=1.0)["x"] - released[0]).std() > 1.0


def test_a_forked_process_with_its_parent_s_number_frees_no_lock(tmp_path):
    loop, parent = begin(tmp_path), os.getpid()
    child = os.fork()
    if child == 0:
        os.getpid = lambda: parent  # as in a container
        loop._ledger.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(InputError, match="another process"):
        Ledger.open(tmp_path / "ledger.jsonl", exclusive=True)
    release(loop, 1)
    assert loop.finish().num_steps == 1


def test_a_process_that_c_forks_amid_a_release_sees_no_noise(tmp_path, monkeypatch):
    """No hook of Python runs there, so the new process goes on with the call."""
    loop, forked = begin(tmp_path / "loop"), []
    loop.batch(1)

    def fork(*arguments):
        noisy = add_noise(*arguments)
        forked.append(ctypes.CDLL(None).fork())
        return noisy

    monkeypatch.setattr("sfumato.training.own_loop.add_noise", fork)
    sees_nothing = False
    try:
        loop.release(1, ZEROS, sensitivity=1.0)
    except InputError:
        sees_nothing = True
    if forked == [0]:
        os._exit(0 if sees_nothing else 1)
    assert os.waitpid(forked[0], 0)[1] == 0 and not sees_nothing


def test_a_process_that_is_forked_amid_a_call_ends_at_once(tmp_path, capfd):
    """As by a signal's handler, which may run at any line. Else two would go on with one call."""
    class_of_loops, package, count, ended = sfumato.OwnLoop, str(Path(sfumato.__file__).parent), 0, []

    def traced(frame, event, argument):
        nonlocal count
        if event == "line" and frame.f_code.co_filename.startswith(package):
            count += 1
            if count % 5 == 0:
                if (child := os.fork()) == 0:
                    os._exit(0)
                ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return traced

    sys.settrace(traced)
    try:
        loop = class_of_loops(tmp_path, MECHANISM, clipping_norm=1.0, delta=DELTA)
        batch = loop.batch(1)
        noisy = loop.release(1, ZEROS, sensitivity=1.0)
        loop.close()
        again = class_of_loops(tmp_path, MECHANISM, clipping_norm=1.0, delta=DELTA)
        certificate = again.finish()
    finally:
        sys.settrace(None)
    assert set(ended) == {1} and len(ended) > 100
    assert capfd.readouterr().err.count("set a flag that the loop looks at.\n") == len(ended)
    assert len(batch) and noisy["weight"].std() > 1.0 and certificate.num_steps == 1


def test_a_signal_s_handler_may_run_another_program_amid_a_call(tmp_path, monkeypatch):
    loop, said, real = begin(tmp_path), [], os.fsync
    program = [sys.executable, "-c", "print('saved')"]

    def synced(descriptor):
        said.append(subprocess.run(program, capture_output=True, check=True).stdout)
        return real(descriptor)

    with monkeypatch.context() as there:
        there.setattr(os, "fsync", synced)
        loop.batch(1)
    assert set(said) == {b"saved\n"}
    loop.close()


def interrupted_at(function, text):
    """Traces that raise KeyboardInterrupt at the line of a function that holds a text."""

    def traced(frame, event, argument):
        if frame.f_code.co_name != function:
            return traced

        def in_it(frame, event, argument):
            if event == "line" and text in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                raise KeyboardInterrupt
            return in_it

        return in_it

    return traced


@pytest.mark.parametrize("text", ["file = self._file", "flock(", "self._file = None", "file.close("])
@pytest.mark.parametrize("by", ["close", "begin"])
def test_a_loop_whose_closing_was_interrupted_releases_no_more_and_the_folder_is_free(tmp_path, text, by):
    """Else it would go on without its lock, beside whoever opens the folder next."""
    loop = begin(tmp_path)
    release(loop, 1)
    sys.settrace(interrupted_at("close", text))
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.close() if by == "close" else begin(tmp_path)
    finally:
        sys.settrace(None)
    with pytest.raises(InputError, match="was closed"):
        loop.batch(2)
    again = begin(tmp_path)
    release(again, 1)
    assert again.finish().num_steps == 2


def test_a_signal_as_an_open_object_is_dropped_leaves_the_folder_free(tmp_path, monkeypatch):
    """There Python swallows what the handler raises, and nothing of `__del__` runs."""
    monkeypatch.setattr(sys, "unraisablehook", lambda swallowed: None)  # that of pytest keeps it

    def swallowed(frame, event, argument):
        if frame.f_code is Ledger.__del__.__code__:
            raise KeyboardInterrupt

    loop = begin(tmp_path)
    sys.settrace(swallowed)
    try:
        del loop
    finally:
        sys.settrace(None)
    begin(tmp_path).finish()


def waits_beside_a_child(folder, children):
    """The child goes on in its own way, as the workers of a pool."""
    loop = begin(folder)
    loop.batch(1)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    children.put(child)
    time.sleep(60)


def test_a_loop_that_was_killed_is_opened_again_though_its_children_live(tmp_path):
    context = multiprocessing.get_context("spawn")
    children = context.Queue()
    process = context.Process(target=waits_beside_a_child, args=(tmp_path, children))
    process.start()
    child = children.get(timeout=60)
    try:
        with pytest.raises(InputError, match="another process is training"):
            begin(tmp_path)
        process.kill()
        process.join()
        begin(tmp_path).close()
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def goes_on_in_the_background(folder):
    torch.set_num_threads(2)  # of which the forked process has one
    loop = begin(folder)
    release(loop, 1)
    parent = os.getpid()
    if os.fork() != 0:
        os._exit(0)  # as a daemon's parent does
    while os.getppid() == parent:
        time.sleep(0.01)
    again = None
    while again is None:
        try:
            again = begin(folder)
        except InputError as error:  # a thread of the parent's may still end, which holds its files
            if "another process" not in str(error):
                raise
            time.sleep(0.01)
    release(again, 1)
    again.finish()
    os._exit(0)


def test_a_process_that_goes_on_in_the_background_opens_its_folder_again(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=goes_on_in_the_background, args=(tmp_path,))
    process.start()
    process.join()
    until = time.monotonic() + 120
    while written(tmp_path).status != "complete" and time.monotonic() < until:
        time.sleep(0.05)
    assert written(tmp_path).status == "complete" and written(tmp_path).num_steps == 2


FORKS = """
import os, sys, numpy as np, torch, sfumato
from sfumato import OwnLoop
from sfumato.errors import InputError

def begin(folder):
    return OwnLoop(folder, sfumato.Mechanism(1000, 100, 2.0, 4), clipping_norm=1.0, delta=1e-5)

def release(loop, size):
    loop.batch(1)
    zeros = torch.from_numpy(np.zeros((size // 10, 5, 2), np.float32).transpose(1, 2, 0))
    assert loop.release(1, {"a": zeros}, sensitivity=1.0)["a"].numpy().std() > 0.1

def log():
    torch.log(torch.ones(784))

"""


@pytest.mark.parametrize(
    "before, after",
    [
        ("release(begin(folder + '1'), 10)", "log()"),
        ("release(begin(folder + '1'), 500_000)", "log()"),
        ("", "release(begin(folder + '2'), 500_000)"),
        ("", "release(begin(folder + '2'), 10)"),
    ],
)
def test_a_release_neither_waits_for_threads_that_a_fork_left_behind_nor_leaves_others_waiting(tmp_path, before, after):
    """PyTorch's own threads are missing in a forked process. What works there without a release works after one."""
    program = (
        FORKS
        + f"""
folder = {str(tmp_path / "run")!r}
torch.ones(3_000_000).exp()
{before}
if (child := os.fork()) == 0:
    {after}
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    )
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "MKL"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=free)
    assert done.returncode == 0, done.stderr


ONE = torch.full((3, 5), 1.0)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2)[::2], torch.zeros(0)[::2], ONE[:1, 2], torch.ones(()).expand(1), ONE[:, :1].T[:, :1], ONE[:, 2]]
    + [torch.view_as_complex(torch.ones(1, 2)).real, torch.ones(1, 1).double().diagonal(), ONE.expand(2, 3, 5)],
)
def test_a_sum_may_lie_in_memory_as_it_will(tmp_path, value):
    loop = begin(tmp_path)
    loop.batch(1)
    noisy = loop.release(1, {"weight": value, "bias": torch.zeros(1)}, sensitivity=1.0)
    assert noisy["weight"].shape == value.shape and noisy["weight"].isfinite().all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file closed by the collector
@pytest.mark.parametrize("kind", [TimeoutError, OSError, RuntimeError, ValueError, TypeError, IndexError])
@pytest.mark.parametrize("call", ["open", "batch", "release", "finish"])
def test_what_a_signal_s_handler_raises_passes_as_it_is(tmp_path, call, kind):
    """At every seventh line of the package, or fewer. An alarm's handler often raises TimeoutError, an OSError."""

    class Preempted(kind):
        pass

    package, place = str(Path(sfumato.__file__).parent), 0

    def runs(folder, at):
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            if not frame.f_code.co_filename.startswith(package) or frame.f_code.co_name == "__del__":
                return None
            if event == "line":
                lines += 1
                if lines == at:
                    sys.settrace(None)
                    raise Preempted(*([errno.ENOENT] if kind is OSError else []), "too slow")
            return trace

        loop = None if call == "open" else begin(folder)
        if call in ("release", "finish"):
            loop.batch(1)
        if call == "finish":
            loop.release(1, ZEROS, sensitivity=1.0)
        calls = {
            "open": lambda: begin(folder),
            "batch": lambda: loop.batch(1),
            "release": lambda: loop.release(1, ZEROS, sensitivity=1.0),
            "finish": lambda: loop.finish(),
        }
        sys.settrace(trace)
        try:
            calls[call]()
        finally:
            sys.settrace(None)

    while True:
        place += 7 if kind is TimeoutError else 29
        try:
            runs(tmp_path / str(place), place)
        except Preempted:
            pass
        else:
            break
    assert place > 70


def odd_sums():
    plain = torch.zeros(4)
    yield torch.nested.nested_tensor([plain, torch.zeros(3)], layout=torch.strided)
    yield torch.nn.parameter.UninitializedParameter()
    yield torch.nn.parameter.UninitializedBuffer()
    yield TwoTensor(plain, plain.clone())  # as DTensor: it has a norm, and no bytes
    yield torch._efficientzerotensor(4)  # NumPy gives what memory held before
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    yield freed


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("number", range(6))
def test_tensors_without_plain_numbers_are_refused_in_one_line_and_count_nothing(tmp_path, number):
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError) as refusal:
        loop.release(1, {"weight": list(odd_sums())[number]}, sensitivity=1.0)
    assert "\n" not in str(refusal.value)
    for transform in (torch.func.vmap, torch.func.functionalize):
        with pytest.raises(InputError, match="Give plain tensors"):
            transform(lambda value: loop.release(1, {"weight": value}, sensitivity=1.0)["weight"])(torch.zeros(2, 4))
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 1


def test_a_sample_that_memory_does_not_hold_waits_and_is_drawn_again(tmp_path):
    program = f"""
import resource, torch, sfumato
loop = sfumato.OwnLoop({str(tmp_path / "run")!r}, sfumato.Mechanism(2**26, 100, 2.0, 1), clipping_norm=1.0, delta=1e-9)
status = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = int(status.split()[1]) * 1024 + 2**28
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    loop.batch(1)
except sfumato.errors.MachineError as error:
    print(error)
before = open({str(tmp_path / "run/sample.json")!r}).read()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(loop.batch(1)), before == open({str(tmp_path / "run/sample.json")!r}).read())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    said, drawn = done.stdout.splitlines()
    assert "memory is too small to draw from 67,108,864" in said and drawn.endswith(" True"), done.stderr


# The alarm may fall amid a library's own opening of a file, which nobody closes then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_handler_raises_while_threads_add_noise_passes_as_it_is(tmp_path):
    """A real alarm, within the long part of a large release; each release counts once."""

    class Preempted(RuntimeError):
        pass

    def preempt(*arguments):
        raise Preempted

    loop, sums, raised = begin(tmp_path), {"weight": torch.zeros(3_000_000)}, 0
    before = signal.signal(signal.SIGALRM, preempt)
    try:
        for step in range(1, 13):
            loop.batch(step)
            signal.setitimer(signal.ITIMER_REAL, 0.004 * step)
            try:
                loop.release(step, sums, sensitivity=1.0)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Preempted:
                raised += 1
                loop.release(step, sums, sensitivity=1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert raised > 3 and loop.finish().num_steps == 12


def test_memory_that_ends_within_a_release_is_named_and_counts_at_most_once(tmp_path):
    program = f"""
import resource, torch, sfumato
loop = sfumato.OwnLoop({str(tmp_path / "run")!r}, sfumato.Mechanism(1000, 100, 2.0, 1), clipping_norm=1.0, delta=1e-5)
sums, said = {{"weight": torch.zeros(20_000_000)}}, set()
loop.batch(1)
status = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
for extra in range(20, 2000, 60):
    limit = int(status.split()[1]) * 1024 + extra * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        loop.release(1, sums, sensitivity=1.0)
        break
    except sfumato.errors.MachineError as error:
        said.add(str(error))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(loop.finish().num_steps, *said)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("1 memory is too small to copy a sum") and done.stdout.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "module, passes",
    [("__main__", True), ("torch.utils.data._utils.signal_handling", True)]
    + [(name, False) for name in ("sfumato.training.noise", "torch.nn.functional", "concurrent.futures.thread", "os")],
)
def test_whose_exception_it_is_follows_from_who_stands_in_its_traceback(module, passes):
    """PyTorch's loader tells by a signal's handler that a worker died: amid anything."""

    def raises():
        raise RuntimeError

    def calls(function):
        function()

    def caught(function, *arguments):
        try:
            function(*arguments)
        except RuntimeError as error:
            return is_from_elsewhere(error)
        return None

    def of(function, name):
        named = {**globals(), "__name__": name}
        return types.FunctionType(function.__code__, named, closure=function.__closure__)

    first = of(caught, "sfumato.training.own_loop")
    assert first(of(raises, module)) == first(of(calls, module), of(raises, "os")) == passes
