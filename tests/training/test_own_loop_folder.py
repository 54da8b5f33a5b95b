"""The folder of an own loop: what may go on in it, and what is refused."""

import errno
import functools
import json
import multiprocessing
import os
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import sfumato
from sfumato.errors import InputError, MachineError
from sfumato.randomness import key_from_seed
from sfumato.run_folder import files
from sfumato.run_folder.entries import releases
from sfumato.run_folder.key_file import read_key, write_key
from sfumato.run_folder.ledger import Ledger
from tests.system import of_the_system
from tests.training.loops import DELTA, MECHANISM, ZEROS, begin, release, spent, written


def test_a_cell_that_is_run_again_goes_on_and_closes_what_it_had(tmp_path):
    first = begin(tmp_path)
    release(first, 1)
    loop = begin(tmp_path)
    with pytest.raises(InputError, match="was closed"):
        release(first, 2)
    release(loop, 1)
    assert loop.finish().num_steps == 2


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"folder": None}, "folder must be a path"),
        ({"folder": b"run"}, "folder must be a path"),
        ({"folder": "a\0b"}, "folder must be a path"),
        ({"folder": 300 * "a"}, "folder must be a path"),
        ({"folder": "\ud800"}, "folder must be a path"),
        ({"accountant": np.array(["pld", "rdp"])}, "accountant must be one of"),
        ({"folder": 10**5000}, "folder must be a path, not a int"),
        ({"accountant": torch.tensor([0.125])}, "not a Tensor"),
        ({"clipping_norm": b"1"}, "clipping_norm must be a number"),
        ({"clipping_norm": np.complex64(1 + 1j)}, "clipping_norm must be a number"),
        ({"clipping_norm": torch.tensor(1j)}, "clipping_norm must be a number"),
        ({"clipping_norm": np.array("1")}, "clipping_norm must be a number"),
        ({"clipping_norm": memoryview(b"1")}, "clipping_norm must be a number"),
        ({"clipping_norm": np.ma.masked}, "clipping_norm must be a number"),
        ({"clipping_norm": torch.tensor(1.0, device="meta")}, "clipping_norm must be a number"),
        ({"clipping_norm": np.True_}, "clipping_norm must be a number"),
        ({"mechanism": sfumato.Mechanism(1000, 100, 1e160, 12)}, "leaves nothing to learn"),
        ({"mechanism": sfumato.Mechanism(2**40, 100, 1.0, 12)}, "which no memory holds"),
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


def test_numbers_of_every_library_are_taken_without_a_warning(tmp_path):
    ones = [
        1,
        np.float32(1),
        np.int64(1),
        Fraction(1),
        Decimal(1),
        torch.tensor(1.0, requires_grad=True),
        np.array(1.0),
    ]
    for number, one in enumerate(ones):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop = begin(tmp_path / str(number), clipping_norm=one)
            loop.batch(1)
            loop.release(1, ZEROS, sensitivity=one)
            assert loop.finish().clipping_norm == 1.0
    with pytest.raises(InputError, match="step must be a whole number"):
        begin(tmp_path / "meta").batch(torch.tensor(1, device="meta"))


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


@pytest.mark.parametrize(
    "change", ["deleted", "empty", "a folder", "of the release before", "of the beginning", "another salt"]
)
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
    last = json.loads(path.read_text())
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change == "another salt":
        path.write_text(json.dumps({**last, "salt": last["salt"][::-1]}))
    elif change != "deleted":
        path.write_bytes({"empty": b"", "of the release before": contents[1], "of the beginning": contents[0]}[change])
    with pytest.raises(InputError, match="whether a sample waits|is no file"):
        begin(tmp_path)
    assert len(Ledger.open(tmp_path / "ledger.jsonl").lines) == count


def test_another_mechanism_is_refused_and_the_loop_that_is_open_goes_on(tmp_path):
    loop = begin(tmp_path)
    release(loop, 1)
    with pytest.raises(InputError, match="another mechanism"):
        begin(tmp_path, MECHANISM.replace(noise_multiplier=50.0))
    with pytest.raises(InputError, match="another mechanism"):
        begin(tmp_path, MECHANISM.replace(images_per_unit=3))
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


def test_a_key_of_somebody_else_is_no_beginning_that_was_cut_short(tmp_path):
    (tmp_path / "key").write_text(64 * "a" + "\n")
    with pytest.raises(InputError, match="has no ledger of a loop .key is there"):
        begin(tmp_path)
    assert (tmp_path / "key").read_text() == 64 * "a" + "\n"


@pytest.mark.parametrize("name", ["key", "ledger.head", "sample.json", "privacy.json"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch, name):
    begin(tmp_path).close()
    real = {each: getattr(Path, each) for each in ("read_text", "read_bytes")}

    @of_the_system
    def read(path, each, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real[each](path, **options)

    with monkeypatch.context() as there:
        for each in real:
            there.setattr(Path, each, functools.partialmethod(read, each))
        with pytest.raises(MachineError, match="cannot be read: Permission denied"):
            begin(tmp_path)
    assert begin(tmp_path).finish().num_steps == 0


@pytest.mark.parametrize("name", ["key", "sample.json", "privacy.json", "ledger.head", "ledger.jsonl"])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name, is_begun):
    if is_begun:
        begin(tmp_path).close()
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is no file. Name a new folder"):
        begin(tmp_path)


def test_another_loop_s_key_and_sample_are_left_as_they_are(tmp_path):
    """Somebody moves another loop into the folder while this one is open."""
    loop, other = begin(tmp_path / "run"), begin(tmp_path / "other")
    other.batch(1)
    other.close()
    release(loop, 1)
    key = (tmp_path / "run" / "key").read_bytes()
    for name in ("key", "sample.json"):
        (tmp_path / "other" / name).rename(tmp_path / "run" / name)
    held = {name: (tmp_path / "run" / name).read_bytes() for name in ("key", "sample.json")}
    with pytest.raises(InputError, match="key is not the key that this run wrote"):
        loop.finish()
    assert {name: (tmp_path / "run" / name).read_bytes() for name in held} == held
    (tmp_path / "run" / "key").write_bytes(key)
    assert loop.finish().num_steps == 1
    assert (tmp_path / "run" / "sample.json").read_bytes() == held["sample.json"]
    assert not (tmp_path / "run" / "key").exists()


@pytest.mark.parametrize("change", [bytes.strip, lambda key: key.replace(b"\n", b"\r\n"), bytes.upper])
def test_a_key_that_an_editor_saved_anew_is_the_key_to_the_end(tmp_path, change):
    begin(tmp_path).close()
    path = tmp_path / "key"
    path.write_bytes(change(path.read_bytes()))
    loop = begin(tmp_path)
    release(loop, 1)
    assert loop.finish().num_steps == 1 and not path.exists()


def test_a_longer_key_whose_deletion_was_cut_off_is_gone(tmp_path, monkeypatch):
    """No byte of it is left, and the folder is that of a loop that has finished."""
    loop = begin(tmp_path)
    release(loop, 1)
    path = tmp_path / "key"
    path.write_bytes(b" ".join(path.read_bytes()[i : i + 2] for i in range(0, 64, 2)))

    @of_the_system
    def refused(path):
        raise PermissionError(errno.EPERM, "refused")

    with monkeypatch.context() as there:
        there.setattr("sfumato.run_folder.key_file.Path.unlink", refused)
        with pytest.raises(MachineError):
            loop.finish()
    assert not path.read_bytes().strip(b"0")
    assert loop.finish().num_steps == 1 and not path.exists()
