import json
import math
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sfumato.errors import InputError, MachineError
from sfumato.run_folder import files, key_file
from sfumato.run_folder.files import JsonLines
from sfumato.run_folder.ledger import GENESIS, Ledger
from tests.system import of_the_system

KEY = bytes(range(32))


def opened(path, key=KEY):
    ledger = Ledger.open(path, exclusive=True)
    try:
        ledger.appends_under(key)
    except InputError:
        ledger.close()
        raise
    return ledger


def filled(path, count=5):
    ledger = opened(path)
    for number in range(count):
        ledger.append({"kind": "step", "session": 0, "step": number})
    ledger.close()
    return ledger


def test_a_ledger_reads_back_what_was_appended_and_goes_on_from_there(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written = filled(path)
    again = opened(path)
    assert again.lines == written.lines and again.head == written.head != GENESIS
    again.append({"kind": "step", "session": 0, "step": 99})
    assert Ledger.open(path).lines[-1]["step"] == 99 and len(Ledger.open(path).lines) == 6


def test_a_line_that_a_crash_kept_from_the_ledger_is_given_back_by_its_head(tmp_path):
    """However much of the line was written: what it names may have been released, so it counts."""
    path = tmp_path / "ledger.jsonl"
    written = filled(path)
    content = path.read_bytes()
    start_of_last = content[:-1].rfind(b"\n") + 1
    for cut in range(start_of_last, len(content)):
        path.write_bytes(content[:cut])
        assert len(Ledger.open(path).lines) == 4  # nobody who has not the key takes it
        ledger = opened(path)
        assert (
            ledger.lines == written.lines and path.read_bytes() == content[:cut]
        )  # nothing is written before it must be
        ledger.settle()
        assert path.read_bytes() == content
        ledger.close()
    path.write_bytes(content[:start_of_last])
    ledger = opened(path)
    ledger.append({"kind": "step", "session": 0, "step": 5})
    ledger.close()
    assert path.read_bytes().startswith(content) and [line["step"] for line in Ledger.open(path).lines] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_more_lines_cut_off_than_a_crash_can_cost_are_noticed(tmp_path, kept):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    with pytest.raises(InputError, match="lines were removed"):
        opened(path)


def test_a_head_that_is_behind_missing_altered_or_of_another_key_is_refused(tmp_path):
    path, head = tmp_path / "ledger.jsonl", tmp_path / "ledger.head"
    filled(path, 4)
    behind = head.read_bytes()
    ledger = opened(path)
    ledger.append({"kind": "step", "session": 0, "step": 4})
    ledger.close()
    good = head.read_bytes()
    content = json.loads(good)
    content["line"]["step"] = 9
    for version in (
        behind,
        json.dumps(content).encode(),
        json.dumps({**content, "lines": 4}).encode(),
        b"{}",
        b"null",
        b"",
        good[:-20],
    ):
        head.write_bytes(version)
        with pytest.raises(InputError, match="spent is not known"):
            opened(path)
    head.write_bytes(good)
    with pytest.raises(InputError, match="another run's"):
        opened(path, bytes(32))
    head.unlink()
    with pytest.raises(InputError, match="is missing"):
        opened(path)
    head.write_bytes(good)
    assert len(opened(path).lines) == 5


def test_the_head_is_on_disk_before_its_line_and_a_failing_disk_lowers_no_count(tmp_path, monkeypatch):
    path, order = tmp_path / "ledger.jsonl", []
    ledger = opened(path)
    replace, write = os.replace, os.write
    monkeypatch.setattr(os, "replace", lambda *args: order.append("head") or replace(*args))
    monkeypatch.setattr(os, "write", lambda *args: order.append("line") or write(*args))
    ledger.append({"kind": "step", "session": 0, "step": 0})
    assert order == ["head", "line"]

    @of_the_system
    def full(*args):
        raise OSError(28, "No space left on device")

    for name, count in (("replace", 1), ("write", 2)):
        monkeypatch.undo()
        monkeypatch.setattr(os, name, full)
        with pytest.raises(MachineError, match="No space left"):
            ledger.append({"kind": "step", "session": 0, "step": 1})
        monkeypatch.undo()
        ledger.close()
        ledger = opened(path)
        assert len(ledger.lines) == count
    ledger.close()


def test_every_change_of_a_whole_line_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    altered = [
        lines[:1] + lines[2:],  # one removed
        lines[:2] + [lines[1]] + lines[2:],  # one twice
        [lines[1], lines[0], *lines[2:]],  # two exchanged
        [lines[0].replace(b'"step": 0', b'"step": 7'), *lines[1:]],  # one edited
        [*lines[:2], b"not json\n", *lines[2:]],
        [*lines[:-1], b"{}\n"],
    ]
    for version, number in zip(altered, (2, 3, 1, 1, 3, 5), strict=True):
        path.write_bytes(b"".join(version))
        with pytest.raises(InputError, match=rf"ledger\.jsonl, line {number},"):
            Ledger.open(path)


def test_removing_whole_last_lines_shows_in_count_and_head(tmp_path):
    """A chain alone cannot show it; this is why checkpoints, certificates and the head's file carry both."""
    path = tmp_path / "ledger.jsonl"
    whole = filled(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    cut = Ledger.open(path)
    assert len(cut.lines) < len(whole.lines) and cut.head == whole.head_at(3) != whole.head


def test_a_line_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = opened(path)
    for number in range(3):
        ledger.append({"kind": "step", "session": 0, "step": number})
        assert json.loads(path.read_bytes().splitlines()[-1])["step"] == number


def test_the_key_is_for_its_owner_alone_and_gone_after_deletion(tmp_path):
    key = os.urandom(32)
    key_file.write_key(tmp_path, key)
    assert key_file.read_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    key_file.delete_key(tmp_path)
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match="key"):
        key_file.read_key(tmp_path)


def test_a_failing_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    files.write_json(path, {"version": 1})

    @of_the_system
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match="No space left"):
        files.write_json(path, {"version": 2})
    assert files.read_json(path) == {"version": 1} and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def synced(monkeypatch):
    """What was brought to the disk, in this order: (inode, names in it) of folders, (inode, content) of files."""
    done, fsync = [], os.fsync

    def noted(descriptor):
        status = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        done.append((status.st_ino, sorted(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return done


def test_a_written_file_is_on_disk_with_its_content_and_then_under_its_name(tmp_path, synced):
    files.write_atomically(tmp_path / "file", b"content")
    assert synced == [((tmp_path / "file").stat().st_ino, b"content"), (tmp_path.stat().st_ino, ["file"])]


def test_a_new_ledger_is_on_disk_under_its_name_before_anything_stands_in_it(tmp_path, synced):
    Ledger.open(tmp_path / "ledger.jsonl", exclusive=True).close()
    assert synced == [(tmp_path.stat().st_ino, ["ledger.jsonl"])]


def test_a_deleted_key_is_overwritten_on_disk_and_then_gone_from_it(tmp_path, synced):
    key_file.write_key(tmp_path, KEY)
    of_key, size = (tmp_path / "key").stat().st_ino, (tmp_path / "key").stat().st_size
    synced.clear()
    key_file.delete_key(tmp_path)
    assert synced == [(of_key, b"0" * size), (tmp_path.stat().st_ino, [])]


@pytest.mark.parametrize("after", [b"", b"\n", b"\r\n", b"0" * 900], ids=len)
def test_zeros_that_a_key_was_overwritten_with_are_no_key_whatever_an_editor_added(tmp_path, after):
    for zeros in (b"0" * 64, b"0" * 65, b"00 " * 32):
        (tmp_path / "key").write_bytes(zeros + after)
        assert not key_file.has_key(tmp_path) and key_file.is_key(tmp_path)
        with pytest.raises(InputError, match="missing or damaged"):
            key_file.read_key(tmp_path)
        key_file.delete_key(tmp_path)
        assert not (tmp_path / "key").exists()


@pytest.mark.parametrize(
    "content",
    [b"0" * 64 + b"\n" * 937 + b"somebody's data", b"0" * 999 + b"\n\nabc", b"0" * 40 + b" " * 1000 + b"0" * 24],
)
def test_a_longer_file_is_somebodys_whatever_it_begins_with(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    assert key_file.has_key(tmp_path) and not key_file.is_key(tmp_path)
    with pytest.raises(InputError, match="is not the key"):
        key_file.delete_key(tmp_path)
    assert (tmp_path / "key").read_bytes() == content


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_file_of_a_run_takes_a_number_that_json_has_not(tmp_path, number):
    for write in (
        partial(files.write_json, tmp_path / "file.json"),
        JsonLines(tmp_path / "lines.jsonl").append,
        opened(tmp_path / "ledger.jsonl").append,
    ):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"number": number})
    assert all(path.stat().st_size == 0 for path in tmp_path.iterdir())


def test_an_existing_run_is_refused_naming_resume(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    with pytest.raises(InputError, match="--resume"):
        files.create(tmp_path / "run")
    files.create(tmp_path / "new")
    assert (tmp_path / "new" / "checkpoints").is_dir()


@pytest.mark.parametrize("name", ["ledger.jsonl", "checkpoints", "checkpoints/step-3.safetensors"])
def test_a_run_folder_with_a_name_that_leads_elsewhere_is_refused_by_that_name(tmp_path, name):
    files.create(tmp_path / "run")
    files.refuse_links(tmp_path / "run")
    link = tmp_path / "run" / name
    if link.is_dir():
        link.rmdir()
    link.symlink_to(tmp_path / "elsewhere")  # whether that is there or not
    with pytest.raises(InputError, match=f"{name} is a symbolic link"):
        files.refuse_links(tmp_path / "run")


def test_json_lines_can_be_cut_back_to_a_step_and_pass_over_a_torn_line(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl", 0o600)
    for step in range(1, 6):
        lines.append({"step": step})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "accu')
    assert [line["step"] for line in lines.read()] == [1, 2, 3, 4, 5]
    lines.keep_up_to(3)
    assert [line["step"] for line in lines.read()] == [1, 2, 3]
    assert stat.S_IMODE(lines.path.stat().st_mode) == 0o600


def test_two_processes_cannot_append_to_one_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger.open(path, exclusive=True)
    with pytest.raises(InputError, match="another process"):
        Ledger.open(path, exclusive=True)
    assert Ledger.open(path).lines == []  # reading stays possible
    first.close()
    Ledger.open(path, exclusive=True).close()


def test_of_processes_that_begin_a_folder_at_once_one_says_what_it_is_and_all_find_it(tmp_path):
    for trial in range(50):
        path = tmp_path / f"{trial}" / "plan.json"
        barrier = threading.Barrier(8)

        def begin(number, path=path, barrier=barrier):
            barrier.wait()
            files.write_first_json(path, number, "sweep")
            (path.parent / f"run-{number}").mkdir()  # what comes next disturbs no other
            return files.read_json(path)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(begin, range(8)))
        assert len(set(found)) == 1
        assert sorted(os.listdir(path.parent)) == ["plan.json", *(f"run-{number}" for number in range(8))]


def test_a_folder_that_was_killed_while_it_was_begun_is_begun_again(tmp_path):
    (tmp_path / ".plan.json.0011aabb.part").write_text("{")
    files.write_first_json(tmp_path / "plan.json", 1, "sweep")
    assert files.read_json(tmp_path / "plan.json") == 1


def test_a_folder_that_holds_other_things_is_not_begun(tmp_path):
    (tmp_path / "image.png").write_text("")
    with pytest.raises(InputError, match="holds no sweep"):
        files.write_first_json(tmp_path / "plan.json", 1, "sweep")
    assert os.listdir(tmp_path) == ["image.png"]
