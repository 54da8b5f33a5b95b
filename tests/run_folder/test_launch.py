"""A start that was frozen, while its lock lapsed and another took over, writes nothing when it wakes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError, MachineError
from sfumato.run_folder import checkpoint, files, launch
from sfumato.run_folder import ledger as ledger_module
from sfumato.run_folder.ledger import new_run_line

LINE = new_run_line(Mechanism(100, 10, 1.0, 8), unit="image", clipping_norm=1.0, delta=1e-5, recipe_sha256=None)
STATE = {"weight": torch.arange(10.0)}


def begun(folder):
    files.make_folders(folder)
    started = launch.start(folder, LINE)
    started.take_over()
    started.ledger.begin(LINE)
    started.save(STATE, 0, {})
    return started


@pytest.fixture
def lapses(monkeypatch):
    """Locks that a shared file system gave to another while their holder was frozen."""
    monkeypatch.setattr(ledger_module, "lock", lambda *given: True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


WRITES = {
    "line": lambda started: started.append(3),
    "checkpoint": lambda started: started.save(STATE, 2, {}),
    "background": lambda started: started.save(STATE, 2, {}, waits=False) or started.settle(),
    "other file": lambda started: started.refuse_other(),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_frozen_start_that_wakes_writes_nothing_more(tmp_path, lapses, write):
    frozen = begun(tmp_path / "run")
    frozen.append(1)
    frozen.append(2)
    other = launch.start(tmp_path / "run", LINE)
    other.take_over()
    before = contents(tmp_path / "run")
    with pytest.raises(MachineError, match="another start goes on"):
        WRITES[write](frozen)
    with pytest.raises(MachineError):  # nor later
        frozen.append(3)
    assert contents(tmp_path / "run") == before
    other.append(1)
    assert other.ledger.lines.num_releases == 3 and other.ledger.lines.releases[-1].launch == 2


def test_a_line_that_came_between_counts(tmp_path, lapses):
    """The frozen start writes after the other has read the ledger, and before it took the run over."""
    frozen = begun(tmp_path / "run")
    other = launch.start(tmp_path / "run", LINE)
    frozen.append(1)
    other.take_over()
    with pytest.raises(MachineError, match="written to by something else"):
        other.append(1)
    other.close()
    third = launch.start(tmp_path / "run", LINE)
    assert third.ledger.lines.num_releases == 1 and third.checkpoint.num_releases == 0


def test_a_checkpoint_that_is_being_written_goes_to_no_file_of_the_other_start(tmp_path, lapses):
    frozen = begun(tmp_path / "run")
    with frozen.checkpoints._open_room() as file:
        other = launch.start(tmp_path / "run", LINE)
        other.take_over()
        other.append(1)
        other.save(STATE, 1, {})
        before = contents(tmp_path / "run")
        file.write(bytes(1000))
        file.flush()
        assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("frozen_in", ["torch.save", "os.fsync"])
def test_a_start_that_was_frozen_in_a_checkpoint_leaves_none(tmp_path, lapses, monkeypatch, frozen_in):
    frozen = begun(tmp_path / "run")
    frozen.append(1)
    module, name = frozen_in.split(".")
    held, before = getattr(checkpoint, module), {}
    real = getattr(held, name)

    def freezes(*given):
        monkeypatch.setattr(held, name, real)
        other = launch.start(tmp_path / "run", LINE)
        other.take_over()
        other.append(1)
        other.save(STATE, 1, {})
        before.update(contents(tmp_path / "run"))
        return real(*given)

    monkeypatch.setattr(held, name, freezes)
    frozen.save(STATE, 1, {}, waits=False)
    with pytest.raises(MachineError, match="another start goes on"):
        frozen.settle()
    assert contents(tmp_path / "run") == before


def test_a_start_frees_the_room_that_one_before_it_held(tmp_path):
    begun(tmp_path / "run").close()
    folder = tmp_path / "run" / "owner" / "checkpoints"
    (held,) = folder.glob(".next*")
    other = launch.start(tmp_path / "run", LINE)
    other.take_over()
    (own,) = folder.glob(".next*")
    assert own != held
    other.close()


def test_a_start_waits_as_long_as_it_is_told_for_another_that_ends(tmp_path):
    first = begun(tmp_path / "run")
    with pytest.raises(InputError, match="another process"):
        launch.start(tmp_path / "run", LINE, patience=0.3)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(launch.start, tmp_path / "run", LINE, patience=30)
        first.close()
        waiting.result().close()


def test_a_checkpoint_in_the_background_that_fails_is_told_once_when_the_next_is_asked_for(tmp_path, monkeypatch):
    started = begun(tmp_path / "run")
    started.append(1)

    def save(*given):
        if threading.current_thread() is not threading.main_thread():
            raise MachineError("full")

    monkeypatch.setattr(started.checkpoints, "save", save)
    started.save(STATE, 1, {}, waits=False)
    with pytest.raises(MachineError, match="full"):
        while True:
            started.is_due(1)
    started.save(STATE, 1, {}, waits=False)
    with pytest.raises(MachineError, match="full"):
        started.save(STATE, 1, {})  # which waits for the last
    monkeypatch.undo()
    started.save(STATE, 1, {})
    started.close()
    assert launch.start(tmp_path / "run", LINE).checkpoint.num_releases == 1
