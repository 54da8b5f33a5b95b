"""Sweeps whose processes really die: each run ends up there once, with what it would have been."""

import json
import os
import shutil
import signal
import time

import pytest
from PIL import Image

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.searching.storage import close_storage, open_storage
from sfumato.studies.runs import place_of
from tests.training import faults

COMMON = ["sweep", "demo/digits", "--grid", "optimizer.learning_rate=1.0,2.0", "--json"]
for assignment in (
    "model.options.width=8",
    "data.split=train",
    "privacy.target_epsilon=",
    "privacy.noise_multiplier=1.0",
    "training.batch_size=32",
    "training.num_steps=4",
    "training.checkpoint_every=2",
):
    COMMON += ["--set", assignment]


def json_of(folder):
    return json.loads((folder / "sweep.json").read_text())


def found(folder):
    """What a sweep found, without where."""
    values = json_of(folder)
    return {key: value for key, value in values.items() if key not in ("output", "storage")}


def ledgers(folder):
    return {str(path.parent.relative_to(folder)): Ledger.open(path).lines for path in folder.rglob("ledger.jsonl")}


def complete_trials(folder):
    storage = open_storage(f"sqlite:///{folder / 'study.db'}")
    [study] = storage.get_all_studies()
    trials = storage.get_all_trials(study._study_id)
    close_storage(storage)
    return sorted(trial.user_attrs["slot"] for trial in trials if trial.state.name == "COMPLETE")


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "sweep"
    log = folder.parent / "log"
    assert faults.run([*COMMON, "--paired", "--output", str(folder)], log=log) == 0, log.read_text()
    return folder


def test_a_paired_sweep_that_was_killed_several_times_is_the_one_that_was_never_killed(never_killed, tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    arguments = [*COMMON, "--paired", "--output", str(folder)]
    # In the first run's ledger, in a checkpoint, in the second run's ledger.
    for die_at in (("ledger", 4, 0.5), ("file", 9, 0.5), ("ledger", 4, 1.0)):
        assert faults.run(arguments, die_at=die_at, log=log) == -signal.SIGKILL, log.read_text()
    assert faults.run(arguments, log=log) == 0, log.read_text()
    assert found(folder) == found(never_killed)
    assert complete_trials(folder) == ["cell-1/seed-0", "cell-2/seed-0"]
    for lines in ledgers(folder).values():
        assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]
    of_owner = [(place / "sweep_private.json").read_text() for place in (folder, never_killed)]
    assert of_owner[0] == of_owner[1]


def test_a_private_run_that_was_killed_goes_on_with_its_key_and_counts_once(tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    arguments = [*COMMON, "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 5, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    [(name, before)] = ledgers(folder).items()
    assert faults.run(arguments, log=log) == 0, log.read_text()
    lines = ledgers(folder)
    assert len(lines) == 2
    assert lines[name][0]["run_id"] == before[0]["run_id"]
    releases = sum(line["kind"] == "step" for each in lines.values() for line in each)
    values = json_of(folder)
    assert releases == 8 == values["updates_together"]
    assert values["begun_again"] == []
    assert values["epsilon_together"] == epsilon(Mechanism(1150, 32, 1.0, 8), 1e-5).epsilon
    assert not list(folder.rglob("key"))  # complete runs need none


def test_two_processes_with_the_same_command_make_each_cell_once(never_killed, tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    processes = [faults.start([*COMMON, "--paired", "--output", str(folder)], log=log) for _ in range(2)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0, log.read_text()
    assert found(folder) == found(never_killed)
    assert complete_trials(folder) == ["cell-1/seed-0", "cell-2/seed-0"]


def test_a_run_that_another_machine_began_and_left_counts_there_and_here(tmp_path):
    """The other machine has the storage in common, and no folder."""
    storage, log = tmp_path / "study.db", tmp_path / "log"
    arguments = [*COMMON, "--storage", f"sqlite:///{storage}"]
    there, here = tmp_path / "there", tmp_path / "here"
    first = [*arguments, "--output", str(there)]
    assert faults.run(first, die_at=("ledger", 4, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    assert faults.run([*arguments, "--output", str(here)], log=log) == 0, log.read_text()
    values = json_of(here)
    assert values["begun_again"] == ["cell-1/run-1"]
    assert len(ledgers(here)) == 2
    assert len(ledgers(there)) == 1
    # No target bounds what was drawn there: twice the planned updates.
    assert values["updates_together"] == 8 + 2 * 4
    assert any("begun again" in warning for warning in values["warnings"])


@pytest.mark.slow
def test_helpers_end_with_the_sweep_that_started_them(tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    many = [*COMMON, "--set", "training.num_steps=100000", "--workers", "2", "--output", str(folder)]
    process = faults.start(many, log=log)
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("metrics_private.jsonl"))) + len(list(folder.rglob("ledger.jsonl"))) < 2:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    def helpers():
        lines = (path.read_bytes() for path in map(cmdline, os.listdir("/proc")) if path is not None)
        return [line for line in lines if b"sfumato.studies.helper" in line]

    while helpers():
        assert time.monotonic() < deadline + 60, "helpers live on"
        time.sleep(0.2)


def cmdline(process):
    from pathlib import Path

    path = Path("/proc") / process / "cmdline"
    return path if process.isdecimal() and path.exists() else None


def test_a_run_whose_folder_was_taken_away_counts_again(tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    arguments = [*COMMON, "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 5, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    [name] = ledgers(folder)
    shutil.rmtree(folder / name)
    assert faults.run(arguments, log=log) == 0, log.read_text()
    values = json_of(folder)
    assert values["begun_again"] == [name]
    assert values["updates_together"] == 8 + 2 * 4  # no target bounds what was drawn there
    assert values["epsilon_together"] == epsilon(Mechanism(1150, 32, 1.0, 16), 1e-5).epsilon


def test_a_copy_of_a_sweeps_folder_is_another_folder(tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    first = place_of(folder)
    assert place_of(folder) == first
    folder.rename(tmp_path / "moved")
    assert place_of(tmp_path / "moved") == first
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    assert place_of(tmp_path / "copy") != first


def test_another_plan_or_other_images_in_the_folder_of_a_sweep_are_refused(tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    images = [tmp_path / "one", tmp_path / "other"]
    for number, root in enumerate(images):
        for part, count in (("train", 12), ("test", 4)):
            for name in ("a", "b"):
                (root / part / name).mkdir(parents=True)
                for n in range(count):
                    Image.new("L", (8, 8), (17 * n + 90 * number + ord(name)) % 256).save(
                        root / part / name / f"{n}.png"
                    )
    common = ["sweep", "image-folder", "--grid", "optimizer.learning_rate=1.0,2.0", "--output", str(folder)]
    for assignment in (
        "model.name=small_cnn",
        "data.channels=1",
        "data.image_size=8",
        "training.batch_size=4",
        "training.num_steps=2",
        "privacy.noise_multiplier=1.0",
    ):
        common += ["--set", assignment]
    one, other = ([*common, "--data-root", str(root)] for root in images)
    assert faults.run(one, die_at=("ledger", 3, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    assert faults.run(other, log=log) == 2
    assert "was begun with other images" in log.read_text()
    plan = json.loads((folder / "plan.json").read_text())
    for altered in ({**plan, "seeds": 2}, {**plan, "batch_size": [8, 8]}, []):
        (folder / "plan.json").write_text(json.dumps(altered))
        assert faults.run(one, log=log) == 2
        assert "holds another sweep" in log.read_text().splitlines()[-1]
    (folder / "plan.json").write_text(json.dumps(plan))
    assert faults.run(one, log=log) == 0, log.read_text()
