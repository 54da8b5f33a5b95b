"""A training loop of one's own: what was released is on disk before it is used, and no certificate says less."""

import contextlib
import copy
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
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

import sfumato
from sfumato.accounting.rounding import epsilon_text
from sfumato.errors import InputError, MachineError
from sfumato.randomness import key_from_seed
from sfumato.run_folder import files
from sfumato.run_folder.entries import releases
from sfumato.run_folder.key_file import read_key, write_key
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import LoopCertificate
from sfumato.run_folder.schemas import SCHEMAS, schema_of
from sfumato.training.own_loop_arguments import length, sum_that_noise_fits

MECHANISM = sfumato.Mechanism(num_examples=1000, batch_size=100, noise_multiplier=2.0, num_steps=12)
DELTA = 1e-5
ZEROS = {"weight": torch.zeros(100)}


def begin(folder, mechanism=MECHANISM, **changes):
    return sfumato.OwnLoop(folder, mechanism, **{"clipping_norm": 1.0, "delta": DELTA, **changes})


def release(loop, step, **sums):
    """Draws the sample of an update, and releases a sum."""
    loop.batch(step)
    return loop.release(step, sums or ZEROS, sensitivity=1.0)


def spent(num_steps):
    return sfumato.epsilon(MECHANISM.replace(num_steps=num_steps), DELTA).epsilon


def written(folder):
    return LoopCertificate.model_validate_json((folder / "privacy.json").read_text())


def test_a_loop_ends_with_a_certificate_of_what_it_released(tmp_path):
    folder = tmp_path / "deep" / "run"
    loop = begin(str(folder))
    for step in range(1, 8):  # it stops early
        assert written(folder).epsilon == spent(12)  # never below what will have been spent
        release(loop, step)
    claim = loop.finish()
    assert claim == written(folder) == loop.finish()
    assert (claim.status, claim.num_steps, claim.epsilon, claim.delta) == ("complete", 7, spent(7), DELTA)
    assert claim.attacker is not None and claim.private and claim.unit == "one image"
    assert any("its author's word" in line for line in claim.not_covered)
    ledger = Ledger.open(folder / "ledger.jsonl")
    assert releases(ledger.lines) == {(0, step) for step in range(1, 8)}
    assert (claim.ledger_lines, claim.ledger_head, claim.run_id) == (9, ledger.head, ledger.lines[0]["run_id"])
    jsonschema.validate(json.loads((folder / "privacy.json").read_text()), schema_of(SCHEMAS["loop-certificate"]))
    assert sorted(path.name for path in folder.iterdir()) == ["ledger.head", "ledger.jsonl", "privacy.json"]
    with pytest.raises(InputError, match="has finished"):
        release(loop, 8)
    with pytest.raises(InputError, match="has finished"):
        begin(folder)


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


def test_a_cell_that_is_run_again_goes_on_and_closes_what_it_had(tmp_path):
    first = begin(tmp_path)
    release(first, 1)
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="was closed"):
        release(first, 2)
    release(loop, 1)
    assert loop.finish().num_steps == 2


def test_persons_are_counted_by_all_their_images(tmp_path):
    mechanism = MECHANISM.replace(images_per_unit=4)
    loop = begin(tmp_path, mechanism)
    for step in range(1, 13):
        release(loop, step)
    claim = loop.finish()
    assert claim.epsilon == claim.epsilon_person == sfumato.epsilon(mechanism, DELTA).epsilon > spent(12)
    assert claim.unit == "one person with at most 4 images" and claim.person_groups == "declared, not checked"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mechanism": MECHANISM.replace(noise_multiplier=0.0)}, "without noise"),
        ({"mechanism": MECHANISM.replace(sampling="shuffled")}, "shuffled"),
        ({"delta": 1.0}, "delta must lie"),
        ({"clipping_norm": 0.0}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": float("inf")}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": "1"}, "clipping_norm must be a number above 0"),
        ({"clipping_norm": True}, "clipping_norm must be a number above 0"),
        ({"delta": "1e-5"}, "delta must be a number above 0"),
        ({"accountant": "x"}, "accountant must be one of"),
        ({"clipping_norm": float("nan")}, "clipping_norm must be a number above 0"),
    ],
)
def test_what_has_no_epsilon_is_refused_before_anything_is_written(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        begin(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"mechanism": MECHANISM.replace(noise_multiplier=3.0)},
        {"mechanism": MECHANISM.replace(batch_size=99)},
        {"clipping_norm": 2.0},
    ],
)
def test_a_loop_goes_on_under_its_own_mechanism_alone(tmp_path, changes):
    loop = begin(tmp_path)
    release(loop, 1)
    loop.close()
    with pytest.raises(InputError, match="another mechanism"):
        begin(tmp_path, **changes)
    assert len(Ledger.open(tmp_path / "ledger.jsonl").lines) == 3


def test_an_object_that_was_closed_counts_and_certifies_nothing(tmp_path):
    closed = begin(tmp_path)
    release(closed, 1)
    closed.close()
    other = begin(tmp_path)
    for step in range(1, 13):
        release(other, step)
    for call in (closed.finish, lambda: release(closed, 2)):
        with pytest.raises(InputError, match="was closed"):
            call()
    assert other.finish().num_steps == 13 and written(tmp_path).epsilon == spent(13)


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


def _half_written(write, descriptor, data):
    write(descriptor, bytes(data)[:5])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_cell_that_is_run_again_opens_the_folder_again(tmp_path):
    def cell():
        loop = begin(tmp_path)
        release(loop, 1)
        raise ValueError("a bug of the user's")

    for _ in range(3):
        with pytest.raises(ValueError, match="bug"):
            cell()
    loop = begin(tmp_path)
    assert loop.finish().num_steps == 3


@pytest.mark.parametrize("step", [1.0, 1.5, True, "1", None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="step must be a whole number"):
        release(loop, step)
    release(loop, np.int64(1))
    assert loop.finish().num_steps == 1


def test_each_update_is_released_once_and_no_more_than_are_stated(tmp_path):
    loop = begin(tmp_path)
    release(loop, 3)
    for step in (3, 2, 0, 13):
        with pytest.raises(InputError, match="is not one after 3"):
            release(loop, step)
    assert loop.finish().num_steps == 1


@pytest.mark.parametrize("name", ["notes.txt", "recipe.toml"])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_lines_that_were_removed_are_noticed(tmp_path):
    loop = begin(tmp_path)
    for step in (1, 2, 3):
        release(loop, step)
    loop.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(InputError, match="lines were removed"):
        begin(tmp_path)


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"folder": None}, "folder must be a path"),
        ({"folder": b"run"}, "folder must be a path"),
        ({"folder": "a\0b"}, "folder must be a path"),
        ({"folder": 300 * "a"}, "folder must be a path"),
        ({"folder": "\ud800"}, "folder must be a path"),
        ({"accountant": np.array(["pld", "rdp"])}, "accountant must be one of"),
        ({"clipping_norm": b"1"}, "clipping_norm must be a number"),
        ({"clipping_norm": np.True_}, "clipping_norm must be a number"),
        ({"mechanism": sfumato.Mechanism(1000, 100, 1e160, 12)}, "leaves nothing to learn"),
        ({"mechanism": None}, "mechanism must be"),
        ({"mechanism": {"num_steps": 3}}, "mechanism must be"),
        ({"mechanism": sfumato.Mechanism(2**70, 100, 2.0, 12)}, "below 2"),
        ({"clipping_norm": 10**400}, "so many digits"),
        ({"delta": 10**400}, "so many digits"),
    ],
)
def test_what_is_no_folder_mechanism_or_number_is_one_line(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        begin(**{"folder": tmp_path / "run", **changes})


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="file is no folder"):
            begin(place)
    with pytest.raises(InputError, match="below 2"):
        release(begin(tmp_path / "run"), 10**5000)


def test_a_loop_stays_in_its_folder_wherever_the_process_goes(tmp_path, monkeypatch):
    for name in "xy":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "x")
    first = begin("mine")
    release(first, 1)
    monkeypatch.chdir(tmp_path / "y")
    second = begin("mine")
    for step in range(1, 13):
        release(second, step)
    second.finish()
    release(first, 2)
    first.finish()
    assert [written(tmp_path / name / "mine").num_steps for name in "xy"] == [2, 12]
    for name in "xy":
        Ledger.open(tmp_path / name / "mine" / "ledger.jsonl").refuse_another_head()


@pytest.mark.parametrize("name", ["close", "getpid"])
def test_an_interrupted_close_is_called_again_and_the_folder_is_free(tmp_path, monkeypatch, name):
    loop = begin(tmp_path)
    with monkeypatch.context() as there:
        there.setattr(os, name, interrupted)
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


@pytest.mark.parametrize("noise", ["2", None, 10**400, float("nan")])
def test_a_mechanism_s_noise_is_a_number(noise):
    with pytest.raises(InputError, match="noise_multiplier must be finite"):
        sfumato.Mechanism(1000, 100, noise, 12)


def test_a_folder_that_is_moved_while_a_loop_is_open_takes_no_more_from_it(tmp_path):
    """Another process may begin a loop where it was: neither writes among the other's files."""
    loop = begin(tmp_path / "mine")
    release(loop, 1)
    (tmp_path / "mine").rename(tmp_path / "old")
    for call in (lambda: release(loop, 2), loop.finish):
        with pytest.raises(MachineError, match="moved, deleted or replaced"):
            call()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=ends_after, args=(tmp_path / "mine", 12))
    process.start()
    process.join()
    with pytest.raises(MachineError, match="moved, deleted or replaced"):
        loop.finish()
    assert written(tmp_path / "mine").num_steps == 12 and written(tmp_path / "old").num_steps >= 12
    loop.close()
    again = begin(tmp_path / "old")
    release(again, 1)
    assert again.finish().num_steps == 2


def ends_after(folder, steps):
    loop = begin(folder)
    for step in range(1, steps + 1):
        release(loop, step)
    loop.finish()


def test_a_mechanism_s_numbers_are_whole_whatever_library_they_come_from(tmp_path):
    for kind in (np.int64, np.int32, torch.tensor):
        mechanism = sfumato.Mechanism(kind(1000), kind(100), 2.0, kind(12))
        assert mechanism == MECHANISM and type(mechanism.batch_size) is int
        assert 50 < len(begin(tmp_path / kind.__name__, mechanism).batch(1)) < 150
    for name in ("num_examples", "batch_size", "num_steps"):
        for value in (100.5, "100", None, True):
            with pytest.raises(InputError, match=f"{name} must be a whole number"):
                MECHANISM.replace(**{name: value})


def test_every_release_has_noise_of_its_own_of_the_mechanism_s_scale(tmp_path):
    """Of one object, of one that goes on, and of updates that are tried again."""
    mechanism, size = MECHANISM.replace(num_steps=3), 40_000
    found = []
    for _ in range(3):
        loop = begin(tmp_path, mechanism)
        for step in (1, 2, 3):
            loop.batch(step)
            sums = {"weight": torch.full((size,), 0.01), "bias": torch.ones(0)}
            noisy = loop.release(step, sums, sensitivity=0.5)
            assert noisy["weight"].dtype == torch.float32 and noisy["bias"].shape == (0,)
            found.append(noisy["weight"].double().numpy() - 0.01)
        loop.close()
    noise = np.stack(found)
    assert noise.std() == pytest.approx(2.0 * 0.5, rel=0.01) and abs(noise.mean()) < 0.01
    assert abs(np.corrcoef(noise)[np.triu_indices(9, 1)]).max() < 6 / size**0.5


def test_each_sample_is_drawn_for_one_release_and_each_release_has_one(tmp_path):
    mechanism = MECHANISM.replace(num_steps=200)
    loop, batches = begin(tmp_path, mechanism), []
    for step in range(1, 201):
        with pytest.raises(InputError, match="no sample was drawn"):
            loop.release(step, ZEROS, sensitivity=1.0)
        batches.append(loop.batch(step))
        assert (loop.batch(step) == batches[-1]).all()
        loop.release(step, ZEROS, sensitivity=1.0)
        for late in (loop.batch, loop.model_key):
            with pytest.raises(InputError, match="is not one after"):
                late(step)
    drawn = np.concatenate(batches)
    counts = np.bincount(drawn, minlength=1000)
    assert abs(len(drawn) - 20_000) < 5 * (20_000 * 0.9) ** 0.5 and abs(counts - 20).max() < 6 * (20 * 0.9) ** 0.5
    assert len({batch.tobytes() for batch in batches}) == 200


def test_a_model_key_is_of_one_release_as_its_sample_is(tmp_path):
    keys = []
    for _ in range(2):
        loop = begin(tmp_path)
        for step in (1, 2):
            keys.append(loop.model_key(step))
            release(loop, step)
            assert loop.model_key(step + 1) != keys[-1]
        keys.append(loop.model_key(3))
    loop = begin(tmp_path)
    assert loop.model_key(1) == keys[-1]  # nothing was released since
    assert len(set(keys)) == 5 and {len(key) for key in keys} == {32}


@pytest.mark.parametrize(
    ("grad_sum", "sensitivity", "says"),
    [
        ({}, 1.0, "must be a dictionary of tensors"),
        ([torch.zeros(2)], 1.0, "must be a dictionary of tensors"),
        ({"x": [0.0]}, 1.0, "float32 or float64, not a list"),
        ({"x": torch.zeros(2, dtype=torch.int64)}, 1.0, "not a torch.int64 tensor"),  # halves beside it would round it
        ({"x": torch.zeros(2, dtype=torch.complex64)}, 1.0, "not a torch.complex64 tensor"),
        ({"x": torch.zeros(2).to_sparse()}, 1.0, "must be a dense tensor"),
        ({"x": torch.zeros(2), "y": torch.zeros(2, device="meta")}, 1.0, "must be a dense tensor"),
        (ZEROS, 0.0, "sensitivity must be a number above 0"),
        (ZEROS, float("nan"), "sensitivity must be a number above 0"),
        (ZEROS, "1", "sensitivity must be a number above 0"),
        (ZEROS, 1e-320, "is no noise in float32"),
    ],
)
def test_a_sum_that_takes_no_noise_is_refused_and_does_not_count(tmp_path, grad_sum, sensitivity, says):
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match=says):
        loop.release(1, grad_sum, sensitivity=sensitivity)
    assert not releases(Ledger.open(tmp_path / "ledger.jsonl").lines)
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 1


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
    assert not release(loop, 1)["weight"].eq(seen[0]).any()
    assert loop.finish().num_steps == 1


def test_an_older_copy_that_is_put_back_is_refused(tmp_path):
    """Its updates are not repeated, as a run's are: what was released since would count for nothing."""
    loop = begin(tmp_path)
    for step in range(1, 4):
        release(loop, step)
    loop.close()
    backup = {name: (tmp_path / name).read_bytes() for name in ("ledger.jsonl", "ledger.head")}
    loop = begin(tmp_path)
    for step in range(1, 13):
        release(loop, step)
    loop.close()
    begin(tmp_path).close()
    for name, content in backup.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="an older copy was put back"):
        begin(tmp_path)


def test_a_ledger_that_is_written_over_while_it_is_in_use_ends_in_no_certificate(tmp_path):
    loop, path = begin(tmp_path), tmp_path / "ledger.jsonl"
    release(loop, 1)
    backup = path.read_bytes()
    release(loop, 2)
    with path.open("r+b") as file:  # the same file, shorter
        file.truncate(len(backup))
    for call in (lambda: release(loop, 3), loop.finish):
        with pytest.raises(MachineError, match="moved, deleted or replaced"):
            call()
    other = begin(tmp_path / "other")
    release(other, 1)
    content = bytearray((tmp_path / "other" / "ledger.jsonl").read_bytes())
    with (tmp_path / "other" / "ledger.jsonl").open("r+b") as file:
        file.write(bytes(len(content)))
    with pytest.raises((InputError, MachineError)):
        other.finish()
    with (tmp_path / "other" / "ledger.jsonl").open("r+b") as file:
        file.write(content)
    assert other.finish().num_steps == 1


def test_a_folder_that_was_renamed_is_opened_again_by_its_new_name(tmp_path):
    first = begin(tmp_path / "mine")
    release(first, 1)
    (tmp_path / "mine").rename(tmp_path / "new")
    loop = begin(tmp_path / "new")
    release(loop, 1)
    assert loop.finish().num_steps == 2


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


def test_a_finish_that_was_stopped_after_the_key_was_overwritten_has_finished(tmp_path, monkeypatch):
    loop = begin(tmp_path)
    release(loop, 1)
    monkeypatch.setattr("sfumato.run_folder.key_file.Path.unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.finish()
    loop.close()
    with pytest.raises(InputError, match="has finished"):
        begin(tmp_path)


def test_commands_on_runs_say_what_an_own_loop_s_folder_is(tmp_path, capsys):
    from tests.cli.test_cli import refused

    loop = begin(tmp_path / "mine")
    release(loop, 1)
    loop.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    words = ["train", "demo/digits", "--output", tmp_path / "mine"]
    assert "loop of somebody's own" in refused(capsys, *words, "--resume")
    assert "holds releases of its own" in refused(capsys, *words, "--repeat", "2")
    search = ["search", "demo/digits", "--epsilon", "3", "--trials", "2", "--output", tmp_path / "mine"]
    assert "is a run's folder" in refused(capsys, *search)
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before
    begin(tmp_path / "series" / "run-3").close()
    assert "run-3" in refused(capsys, *words[:-1], tmp_path / "series", "--repeat", "2")


def test_a_pipe_is_no_ledger_and_a_home_is_meant_by_its_sign(tmp_path, monkeypatch):
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "ledger.jsonl")
    with pytest.raises(InputError, match="is no file"):
        begin(tmp_path / "pipe")
    with pytest.raises(InputError, match="folder must be a path"):
        begin("")
    monkeypatch.setenv("HOME", str(tmp_path))
    begin("~/mine").close()
    assert (tmp_path / "mine" / "ledger.jsonl").exists()


def test_no_sample_is_passed_over(tmp_path):
    """Whoever passes over empty samples releases more of each that is not."""
    loop = begin(tmp_path, MECHANISM.replace(num_examples=100, batch_size=1))
    loop.batch(1)
    with pytest.raises(InputError, match="sample 1 was drawn and not released"):
        loop.batch(2)
    loop.release(1, ZEROS, sensitivity=1.0)
    release(loop, 2)
    assert loop.finish().num_steps == 2


@pytest.mark.parametrize("value", [1e8, float("nan"), float("inf")])
def test_a_sum_that_its_sample_cannot_have_is_refused_and_does_not_count(tmp_path, value):
    loop = begin(tmp_path)
    size = len(loop.batch(1))
    with pytest.raises(InputError, match="the sum is longer than"):
        loop.release(1, {"weight": torch.tensor([value, 0.0])}, sensitivity=1.0)
    loop.release(1, {"weight": torch.tensor([float(size), 0.0])}, sensitivity=1.0)
    assert loop.finish().num_steps == 1


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


def test_a_refused_opening_leaves_the_key_as_it_was(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    loop.close()
    kept = {name: (tmp_path / name).read_bytes() for name in ("ledger.jsonl", "ledger.head", "key")}
    (tmp_path / "ledger.jsonl").write_bytes(b"")
    (tmp_path / "ledger.head").unlink()
    with pytest.raises(InputError, match="has no ledger of a loop"):
        begin(tmp_path)
    assert (tmp_path / "key").read_bytes() == kept["key"]
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert begin(tmp_path).finish().num_steps == 1


def test_what_finish_returns_is_the_caller_s_own(tmp_path):
    loop = begin(tmp_path)
    loop.finish().not_covered.clear()
    assert any("author's word" in line for line in loop.finish().not_covered)


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


def test_a_sample_that_waited_when_its_loop_was_closed_waits_when_it_ends(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    pending = loop.batch(2)
    loop.close()
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="a sample of a session before was drawn"):
        loop.finish()
    with pytest.raises(InputError, match="no sample was drawn for update 1"):
        loop.release(1, ZEROS, sensitivity=1.0)
    assert np.array_equal(loop.batch(1), pending)
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 2
    assert {path.name for path in tmp_path.iterdir()} == {"ledger.head", "ledger.jsonl", "privacy.json"}


@pytest.mark.parametrize("change", ["deleted", "empty", "a folder", "of the release before", "of the beginning"])
def test_a_folder_whose_waiting_sample_is_not_known_is_not_gone_on_with(tmp_path, change):
    loop = begin(tmp_path)
    path = tmp_path / "sample.json"
    contents = [path.read_bytes()]
    for step in (1, 2):
        loop.batch(step)
        contents.append(path.read_bytes())
        loop.release(step, ZEROS, sensitivity=1.0)
    loop.batch(3)
    loop.close()
    count = len(Ledger.open(tmp_path / "ledger.jsonl").lines)
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change != "deleted":
        path.write_bytes({"empty": b"", "of the release before": contents[1], "of the beginning": contents[0]}[change])
    with pytest.raises(InputError, match="whether a sample waits"):
        begin(tmp_path)
    assert len(Ledger.open(tmp_path / "ledger.jsonl").lines) == count


def test_no_two_loops_write_equal_lines(tmp_path):
    """Where locks do not hold between machines, neither takes the other's lines for its own."""
    heads = set()
    for number in (1, 2):
        loop = begin(tmp_path / str(number))
        heads.add(json.dumps(loop._ledger.lines[1]["environment"]))
    assert len(heads) == 2


def test_a_file_system_without_locks_is_named_in_one_line(tmp_path, monkeypatch):
    import fcntl

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
    monkeypatch.setattr(own_loop, "new_key", lambda: bytes(32))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_few_bits_is_refused_for_one_image_moves_it_by_more_than_it_adds(tmp_path, dtype):
    rows = torch.full((5000, 1), 1.0, dtype=dtype)
    moved = float(rows.sum() - rows[1:].sum())
    assert moved == 0 or moved > 1.5
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match="float32 or float64"):
        loop.release(1, {"x": rows[:2].sum(0)}, sensitivity=1.0)


def test_a_loop_that_stops_early_says_what_all_planned_updates_would_have_cost(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    claim = loop.finish()
    [line] = [line for line in claim.not_covered if "chosen by samples or by what" in line]
    assert f"12 were planned, whose epsilon is {epsilon_text(spent(12))}" in line and claim.epsilon == spent(1)


def test_a_loop_with_a_sample_that_waits_does_not_end(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    with pytest.raises(InputError, match="sample 1 was drawn and not released"):
        loop.finish()
    loop.release(1, ZEROS, sensitivity=1.0)
    assert loop.finish().num_steps == 1


def test_a_process_that_was_copied_whole_has_one_noise_for_one_sum_alone(tmp_path, monkeypatch):
    """A snapshot that is restored twice may draw the same bytes from the system."""
    from sfumato.training import own_loop

    begin(tmp_path / "0").close()
    for number in (1, 2, 3):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    released = []
    with monkeypatch.context() as copied:
        copied.setattr(own_loop, "new_key", lambda: bytes(32))
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


def test_another_mechanism_is_refused_and_the_loop_that_is_open_goes_on(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    with pytest.raises(InputError, match="another mechanism"):
        begin(tmp_path, MECHANISM.replace(noise_multiplier=50.0))
    with pytest.raises(InputError, match="was begun"):
        loop.__init__(tmp_path / "other", MECHANISM.replace(noise_multiplier=50.0), clipping_norm=1.0, delta=DELTA)
    release(loop, 2)
    assert loop.finish().epsilon == spent(2) and not (tmp_path / "other").exists()


def test_a_ledger_that_something_else_wrote_to_ends_in_no_certificate(tmp_path):
    loop, path = begin(tmp_path), tmp_path / "ledger.jsonl"
    release(loop, 1)
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(content[-20:])
    for call in (lambda: release(loop, 2), loop.finish):
        with pytest.raises(MachineError, match="written to by something else"):
            call()
    path.write_bytes(content)


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


@pytest.mark.parametrize(("noise", "delta"), [(0.1, 1e-5), (1e-3, 1e-5), (1.0, 1e-30), (2.0, 1e-320)])
def test_what_the_end_of_the_noise_would_give_away_is_not_claimed(tmp_path, noise, delta):
    with pytest.raises(InputError, match="ends at 10.6 standard deviations"):
        begin(tmp_path / "run", MECHANISM.replace(noise_multiplier=noise), delta=delta)
    assert not (tmp_path / "run").exists()


def test_numbers_of_an_array_are_not_in_a_refusal(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    for wrong in (torch.tensor([0.123, 0.456]), np.array([[0.123], [0.456]]), torch.tensor(True), bytearray(b"1")):
        with pytest.raises(InputError, match="sensitivity must be a number above 0, not a") as refusal:
            loop.release(1, ZEROS, sensitivity=wrong)
        assert "0.123" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_large_sum_is_released_in_inference_mode(tmp_path):
    loop = begin(tmp_path)
    loop.batch(1)
    with torch.inference_mode():
        noisy = loop.release(1, {"x": torch.zeros(200_000)}, sensitivity=1.0)["x"]
    assert abs(float(noisy.std()) - 2.0) < 0.05


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


def test_what_a_loop_without_its_ledger_left_and_what_a_run_left_is_not_taken_for_a_new_folder(tmp_path):
    for name in ("lost", "run"):
        folder = tmp_path / name
        loop = begin(folder)
        release(loop, 1)
        loop.close()
        if name == "lost":
            (folder / "ledger.jsonl").unlink()
        else:  # a run that was killed as it began
            for path in folder.iterdir():
                path.unlink()
            (folder / "ledger.jsonl").touch()
            (folder / "recipe.toml").touch()
            write_key(folder, key_from_seed(7))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(InputError, match="has no ledger of a loop .* the epsilons of both add up"):
            begin(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("names", [("ledger.jsonl", "ledger.head", "privacy.json"), ("key",)])
def test_files_that_were_away_for_a_while_are_put_back_and_the_loop_goes_on(tmp_path, names):
    folder, away = tmp_path / "run", tmp_path / "away"
    release(loop := begin(folder), 1)
    sample = loop.batch(2).tolist()
    loop.close()
    away.mkdir()
    for name in names:
        (folder / name).rename(away / name)
    with pytest.raises(InputError, match="put (it|that) back.* the epsilons of both add up"):
        begin(folder)
    for name in names:
        (away / name).rename(folder / name)
    again = begin(folder)
    assert again.batch(1).tolist() == sample and len(releases(again._ledger.lines)) == 1


@pytest.mark.parametrize(
    "names", [("key",), ("ledger.jsonl",), ("ledger.jsonl", "key"), ("sample.json",), ("ledger.jsonl", "photo.jpg")]
)
def test_files_of_somebody_else_that_bear_a_loop_s_names_are_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text(f"my own {name}")
    with pytest.raises(InputError, match="has no ledger of a loop"):
        begin(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: f"my own {name}" for name in names}


def test_a_beginning_that_was_cut_short_goes_on_under_a_new_key(tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    write_key(tmp_path, key_from_seed(7))
    begin(tmp_path).close()
    assert read_key(tmp_path) != key_from_seed(7)


def test_a_certificate_that_is_damaged_is_named_with_what_helps(tmp_path):
    release(loop := begin(tmp_path), 1)
    loop.close()
    (tmp_path / "privacy.json").write_text("{")
    with pytest.raises(InputError, match="delete it"):
        begin(tmp_path)
    (tmp_path / "privacy.json").unlink()
    begin(tmp_path)
    assert written(tmp_path).num_steps == 13


def test_names_of_all_folders_that_are_made_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    for _ in range(2):  # again, after a kill
        files.make_folder(tmp_path / "runs" / "a" / "mine")
        assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "a"} <= set(synced)
        synced.clear()


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


@pytest.mark.parametrize("text", ["descriptor = self._descriptor", "flock(", "self._descriptor = None", "os.close("])
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


def test_a_sum_is_read_once():
    """Else memory that others write to, or a mapping that makes its values anew, would be noised unmeasured."""

    class Anew(dict):
        def items(self):
            return [("weight", torch.randn(4))]

    shared = torch.ones(4).share_memory_()
    whole = sum_that_noise_fits({"weight": shared}, 1.0)
    shared.fill_(7.0)
    assert torch.equal(whole["weight"], torch.ones(4))
    anew = sum_that_noise_fits(Anew(weight=torch.zeros(4)), 1.0)
    assert torch.equal(anew["weight"], anew["weight"]) and length(anew) == length(anew)
