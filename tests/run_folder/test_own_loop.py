"""A training loop of one's own: what was released is on disk before it is used, and no certificate says less."""

import contextlib
import copy
import errno
import functools
import json
import multiprocessing
import os
import pickle
import signal
import threading

import jsonschema
import numpy as np
import pytest

import sfumato
from sfumato.errors import InputError, MachineError
from sfumato.run_folder.entries import releases
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import LoopCertificate
from sfumato.run_folder.schemas import SCHEMAS, schema_of

MECHANISM = sfumato.Mechanism(num_examples=1000, batch_size=100, noise_multiplier=2.0, num_steps=12)
DELTA = 1e-5


def begin(folder, mechanism=MECHANISM, **changes):
    return sfumato.OwnLoop(folder, mechanism, **{"clipping_norm": 1.0, "delta": DELTA, **changes})


def spent(num_steps):
    return sfumato.epsilon(MECHANISM.replace(num_steps=num_steps), DELTA).epsilon


def written(folder):
    return LoopCertificate.model_validate_json((folder / "privacy.json").read_text())


def test_a_loop_ends_with_a_certificate_of_what_it_released(tmp_path):
    folder = tmp_path / "deep" / "run"
    loop = begin(str(folder))
    for step in range(1, 8):  # it stops early
        assert written(folder).epsilon == spent(12)  # never below what will have been spent
        loop.release(step)
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
        loop.release(8)
    with pytest.raises(InputError, match="has finished"):
        begin(folder)


def killed_after(folder, steps, draws):
    loop = begin(folder)
    for step in range(1, steps + 1):
        loop.release(step)
    np.save(draws, loop.streams.stream("noise", 1).uint64(100))
    os.kill(os.getpid(), signal.SIGKILL)


def test_after_kill_9_what_was_released_counts_and_what_is_repeated_counts_again_under_other_noise(tmp_path):
    folder, draws = tmp_path / "run", tmp_path / "draws.npy"
    process = multiprocessing.get_context("spawn").Process(target=killed_after, args=(folder, 5, draws))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    loop = begin(folder)
    assert written(folder).num_steps == 5 + 12
    assert not np.isin(loop.streams.stream("noise", 1).uint64(100), np.load(draws)).any()
    for step in range(4, 13):
        loop.release(step)
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
    loop.release(1)
    assert loop.finish().num_steps == 1


def test_a_cell_that_is_run_again_goes_on_and_closes_what_it_had(tmp_path):
    first = begin(tmp_path)
    first.release(1)
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="was closed"):
        first.release(2)
    loop.release(1)
    assert loop.finish().num_steps == 2


def test_persons_are_counted_by_all_their_images(tmp_path):
    mechanism = MECHANISM.replace(images_per_unit=4)
    loop = begin(tmp_path, mechanism)
    for step in range(1, 13):
        loop.release(step)
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
        ({"mechanism": MECHANISM.replace(batch_size=100.5)}, "batch_size must be a whole number"),
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
    loop.release(1)
    loop.close()
    with pytest.raises(InputError, match="another mechanism"):
        begin(tmp_path, **changes)
    assert len(Ledger.open(tmp_path / "ledger.jsonl").lines) == 3


def test_an_object_that_was_closed_counts_and_certifies_nothing(tmp_path):
    closed = begin(tmp_path)
    closed.release(1)
    closed.close()
    other = begin(tmp_path)
    for step in range(1, 13):
        other.release(step)
    for call in (closed.finish, lambda: closed.release(2)):
        with pytest.raises(InputError, match="was closed"):
            call()
    assert other.finish().num_steps == 13 and written(tmp_path).epsilon == spent(13)


def test_a_forked_process_has_no_part_in_it(tmp_path):
    loop, (reads, writes) = begin(tmp_path), os.pipe()
    if os.fork() == 0:
        said = []
        for call in (lambda: loop.release(1), loop.finish, loop.close, lambda: loop.streams):
            try:
                call()
            except InputError as error:
                said.append(str(error))
        os.write(writes, json.dumps(said).encode())
        os._exit(0)
    said = json.loads(os.read(reads, 10_000))
    assert len(said) == 4 and all("another process" in line for line in said)
    loop.release(1)
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
                loop.release(step)
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
        loop.release(1)
        with monkeypatch.context() as full:
            full.setattr(os, "write", functools.partial(_half_written, real))
            with pytest.raises(MachineError, match="No space left"):
                loop.release(2)
        for step in (2, 3) if again else (3,):
            loop.release(step)
        assert loop.finish().num_steps == 3  # the one that failed may have been used
        assert len(releases(Ledger.open(folder / "ledger.jsonl").lines)) == 3


def _half_written(write, descriptor, data):
    write(descriptor, bytes(data)[:5])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_cell_that_is_run_again_opens_the_folder_again(tmp_path):
    def cell():
        loop = begin(tmp_path)
        loop.release(1)
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
        loop.release(step)
    loop.release(np.int64(1))
    assert loop.finish().num_steps == 1


def test_each_update_is_released_once_and_no_more_than_are_stated(tmp_path):
    loop = begin(tmp_path)
    loop.release(3)
    for step in (3, 2, 0, 13):
        with pytest.raises(InputError, match="is not one after 3"):
            loop.release(step)
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
        loop.release(step)
    loop.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(InputError, match="lines were removed"):
        begin(tmp_path)


def interrupted(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["_write", "delete_key", "settle"])
def test_an_interrupted_finish_is_called_again_and_the_folder_takes_no_more_after_it(tmp_path, monkeypatch, place):
    from sfumato.run_folder import own_loop

    loop = begin(tmp_path)
    loop.release(1)
    owner = {"_write": sfumato.OwnLoop, "delete_key": own_loop, "settle": Ledger}[place]
    with monkeypatch.context() as there:
        there.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.finish()
    with pytest.raises(InputError, match="finish did not return"):
        loop.release(2)
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
        loop.release(1)

        def stops(*arguments, real=real, calls=calls, turn=turn):
            calls.append(arguments)
            if len(calls) != turn + 1:
                return real(*arguments)
            if after:
                real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as there, contextlib.suppress(KeyboardInterrupt):
            there.setattr(os, name, stops)
            loop.release(2)
        with contextlib.suppress(InputError):  # it did return
            loop.release(2)
        loop.release(3)
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
                        loop.release(step)
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
        for call in (loop.close, loop.finish, lambda: loop.release(2)):
            try:
                call()
            except InputError as error:
                said.append(str(error))

    before = signal.signal(signal.SIGUSR1, handles)
    try:
        with monkeypatch.context() as there:
            there.setattr(os, "fsync", lambda descriptor: (os.kill(os.getpid(), signal.SIGUSR1), real(descriptor)))
            loop.release(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(said) >= 3 and all("under way in this thread" in line for line in said)

    held, free = threading.Event(), threading.Event()
    with monkeypatch.context() as there:
        there.setattr(os, "fsync", lambda descriptor: (held.set(), free.wait(), real(descriptor)))
        thread = threading.Thread(target=loop.release, args=(2,))
        thread.start()
        held.wait()
        if (child := os.fork()) == 0:
            try:
                loop.release(3)
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
        begin(tmp_path / "run").release(10**5000)


def test_a_loop_stays_in_its_folder_wherever_the_process_goes(tmp_path, monkeypatch):
    for name in "xy":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "x")
    first = begin("mine")
    first.release(1)
    monkeypatch.chdir(tmp_path / "y")
    second = begin("mine")
    for step in range(1, 13):
        second.release(step)
    second.finish()
    first.release(2)
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
            loop.release(1)
        except KeyboardInterrupt as held:
            there.undo()
            loop.release(1)
            assert held.__traceback__ is not None
    assert loop.finish().num_steps == 1


def test_a_release_that_was_interrupted_and_not_tried_again_counts_in_all_files(tmp_path, monkeypatch):
    for number, name in enumerate(["replace", "fsync", "ftruncate"]):
        folder = tmp_path / str(number)
        loop, real = begin(folder), getattr(os, name)
        loop.release(1)
        with monkeypatch.context() as there:
            there.setattr(os, name, lambda *arguments, real=real: (real(*arguments), interrupted()))
            with pytest.raises(KeyboardInterrupt):
                loop.release(2)
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
    loop.release(1)
    (tmp_path / "mine").rename(tmp_path / "old")
    for call in (lambda: loop.release(2), loop.finish):
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
    again.release(1)
    assert again.finish().num_steps == 2


def ends_after(folder, steps):
    loop = begin(folder)
    for step in range(1, steps + 1):
        loop.release(step)
    loop.finish()
