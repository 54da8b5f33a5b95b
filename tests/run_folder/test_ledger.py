"""A count that no fault lowers, and files that are whole or absent."""

import errno
import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch

from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError, MachineError
from sfumato.run_folder import files, ledger
from sfumato.run_folder.checkpoint import Checkpoint, Checkpoints
from sfumato.run_folder.ledger import Ledger, new_run_line
from sfumato.run_folder.record import Metrics, RecordLines, read_lines

MECHANISM = Mechanism(100, 10, 1.0, 8)


def begun(folder, count=0, **options):
    opened = Ledger(folder / "ledger.jsonl", **options)
    opened.begin(new_run_line(MECHANISM, unit="image", clipping_norm=1.0, delta=1e-5, recipe_sha256=None))
    for step in range(1, count + 1):
        opened.append(step)
    return opened


def test_a_new_run_takes_no_folder_that_holds_anything(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(InputError, match="is not empty"):
            files.refuse_filled(path)
    files.refuse_filled(tmp_path / "new")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_ledger_states_the_whole_plan_and_then_counts_each_release(tmp_path):
    opened = begun(tmp_path, 3)
    found = ledger.read(tmp_path / "ledger.jsonl")
    assert found == opened.lines and found.run.mechanism == MECHANISM
    assert [(line.release, line.step, line.launch) for line in found.releases] == [(n, n, 1) for n in (1, 2, 3)]
    assert len(found.run.run_id) == 32 and (found.num_releases, found.count) == (3, 4)
    opened.close()
    again = Ledger(tmp_path / "ledger.jsonl")
    again.append(2)  # the third was lost
    last = again.lines.releases[-1]
    assert (last.release, last.step, last.launch) == (4, 2, 2) and last.launch_id != found.releases[0].launch_id


def test_a_line_is_on_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size) or real(fd))
    opened = begun(tmp_path, 2)
    opened.append(3)
    path = tmp_path / "ledger.jsonl"
    assert json.loads(path.read_bytes().splitlines()[-1])["release"] == 3 and synced[-1] == path.stat().st_size
    assert synced[1] == tmp_path.stat().st_size  # the folder, after the first line


def test_the_plan_is_a_hard_cap(tmp_path):
    opened = begun(tmp_path, 8)
    with pytest.raises(MachineError, match="all 8 releases of its plan"):
        opened.append(9)
    line = opened.lines.releases[-1].model_copy(update={"release": 9})
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(line.model_dump_json() + "\n")
    with pytest.raises(InputError, match="its plan"):
        ledger.read(tmp_path / "ledger.jsonl")


def test_a_failed_append_ends_it_for_this_process_and_the_next_one_sees_what_is_there(tmp_path, monkeypatch):
    for share, count in ((0.5, 2), (1.0, 3)):
        folder = tmp_path / str(share)
        folder.mkdir()
        opened = begun(folder, 2)
        real = os.write

        def fails(descriptor, data, share=share, real=real):
            real(descriptor, data[: int(len(data) * share)])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", fails)
        with pytest.raises(MachineError, match="No space left"):
            opened.append(3)
        monkeypatch.undo()
        with pytest.raises(MachineError, match="was closed"):
            opened.append(3)
        again = Ledger(folder / "ledger.jsonl")
        assert again.lines.num_releases == count
        again.append(count + 1)
        assert ledger.read(folder / "ledger.jsonl").num_releases == count + 1


def test_nothing_is_released_where_something_else_wrote(tmp_path):
    opened = begun(tmp_path, 1)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(MachineError, match="written to by something else"):
        opened.append(2)


def test_lines_of_a_selected_run_do_not_tell_how_often_it_was_started(tmp_path):
    opened = begun(tmp_path, 2, anonymous=True)
    assert all(line.launch is None and line.launch_id is None for line in opened.lines.releases)


def test_what_does_not_count_from_1_is_refused(tmp_path):
    begun(tmp_path, 3).close()
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for others in ([], [*lines[:2], *lines[3:]], [*lines[:2], b"not json\n", *lines[3:]]):
        path.write_bytes(b"".join(others))
        with pytest.raises(InputError, match="what was spent is not known"):
            ledger.read(path)


def state(size=10):
    return {"weight": torch.arange(float(size)), "nested": {"lr": 0.1, "step": [1, 2]}}


def saved(checkpoints, num_releases, **changes):
    checkpoints.save(Checkpoint("id", num_releases + 1, num_releases, num_releases, state(**changes), {"seconds": 1.5}))


def test_the_newest_two_checkpoints_are_kept_and_come_back_as_they_were(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for num_releases in (0, 5, 10):
        saved(checkpoints, num_releases)
    assert [path.name for path in checkpoints.paths()] == ["release-000000005.pt", "release-000000010.pt"]
    found = checkpoints.newest()
    assert found is not None and (found.run_id, found.num_releases, found.facts) == ("id", 10, {"seconds": 1.5})
    assert found.state["weight"].equal(torch.arange(10.0)) and found.state["nested"] == {"lr": 0.1, "step": [1, 2]}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())


def test_room_for_the_next_checkpoint_is_held(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved(checkpoints, 0, size=10_000)
    size = checkpoints.paths()[0].stat().st_size
    assert (tmp_path / ".next-").stat().st_blocks * 512 >= 4 * size  # an optimizer remembers nothing yet
    saved(checkpoints, 1, size=20_000)
    assert (tmp_path / ".next-").stat().st_size == checkpoints.paths()[-1].stat().st_size


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.ENOSPC])
def test_where_a_file_system_cannot_reserve_room_is_written_and_a_full_disk_is_one(tmp_path, monkeypatch, code):
    def cannot(*given):
        raise OSError(code, os.strerror(code))

    checkpoints = Checkpoints(tmp_path)
    if code is None:  # as on macOS
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", cannot)
    if code == errno.ENOSPC:
        with pytest.raises(MachineError, match="No space left"):
            saved(checkpoints, 0, size=10_000)
        return
    saved(checkpoints, 0, size=10_000)
    assert (tmp_path / ".next-").stat().st_blocks * 512 >= 4 * checkpoints.paths()[0].stat().st_size


def test_a_checkpoint_that_runs_code_is_not_loaded(tmp_path):
    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"state": Runs()}, tmp_path / "release-000000001.pt")
    with pytest.raises(InputError, match="no checkpoint"):
        Checkpoints(tmp_path).newest()
    assert not (tmp_path / "ran").exists()


def test_a_failing_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    files.write_json(path, {"version": 1})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match="No space left"):
        files.write_json(path, {"version": 2})
    assert files.read_json(path) == {"version": 1} and list(tmp_path.iterdir()) == [path]


def test_a_written_file_is_on_disk_with_its_content_and_then_under_its_name(tmp_path, monkeypatch):
    done, fsync = [], os.fsync

    def noted(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}")
        done.append(sorted(os.listdir(path)) if path.is_dir() else path.read_bytes())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    files.write_atomically(tmp_path / "file", b"content")
    assert done == [b"content", ["file"]]
    files.write_atomically(tmp_path / "hidden", b"content", 0o600)
    others = os.umask(0)
    os.umask(others)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "hidden")]
    assert modes == [0o644 & ~others, 0o600 & ~others]


def test_no_file_of_a_run_takes_a_number_that_json_has_not(tmp_path):
    for number in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            files.write_json(tmp_path / "file.json", {"number": number})
        with pytest.raises(ValueError, match="finite number"):
            Metrics(step=1, epsilon=number, accuracy=0.5, accuracy_last=0.5)


def test_lines_can_be_cut_back_to_a_step_and_a_torn_one_is_passed_over(tmp_path):
    path, line = tmp_path / "metrics.jsonl", Metrics(step=1, epsilon=0.5, accuracy=0.5, accuracy_last=0.5)
    lines = RecordLines(path, Metrics, 0o600)
    for step in range(1, 6):
        lines.append(line.model_copy(update={"step": step}))
    with path.open("ab") as file:
        file.write(b'{"step": 6, "accu')
    assert [line.step for line in read_lines(path, Metrics)] == [1, 2, 3, 4, 5]
    lines.keep_up_to(3)
    assert [line.step for line in read_lines(path, Metrics)] == [1, 2, 3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
