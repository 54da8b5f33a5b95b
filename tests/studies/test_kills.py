"""Sweeps whose processes are killed: nothing is lost, nothing counts twice, and what is seeded comes out the same."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Mechanism
from tests.cli.test_cli import settings
from tests.training import faults

SHORT = {"training.batch_size": 32, "training.num_steps": 4, "training.checkpoint_every": 2}
SHORT |= {"privacy.target_epsilon": "", "privacy.noise_multiplier": 1.0}
SHORT |= {"model.options.width": 8, "data.split": "train"}
COMMON = ["sweep", "demo/digits", "--grid", "optimizer.learning_rate=1.0,2.0", "--json", *settings(SHORT)]


def json_of(folder):
    return json.loads((folder / "sweep.json").read_text())


def found(folder):
    """What a sweep found, without where."""
    return {key: value for key, value in json_of(folder).items() if key != "output"}


def releases(folder):
    """How many updates each run's ledger counts."""
    counts = {}
    for path in folder.rglob("ledger.jsonl"):
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        counts[str(path.parent.relative_to(folder))] = sum(kind in ("step", "release") for kind in kinds)
    return counts


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
    assert releases(folder) == {"cell-1/seed-0": 4, "cell-2/seed-0": 4}
    of_owner = [(place / "sweep_private.json").read_text() for place in (folder, never_killed)]
    assert of_owner[0] == of_owner[1]


def test_a_private_run_that_was_killed_goes_on_and_counts_once(tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    arguments = [*COMMON, "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 5, 1.0), log=log) == -signal.SIGKILL, log.read_text()
    [name] = releases(folder)
    first_line = (folder / name / "ledger.jsonl").read_text().splitlines()[0]
    assert faults.run(arguments, log=log) == 0, log.read_text()
    assert (folder / name / "ledger.jsonl").read_text().splitlines()[0] == first_line  # the same run
    assert releases(folder) == {"cell-1/run-1": 4, "cell-2/run-1": 4}
    values = json_of(folder)
    assert values["updates_together"] == 8
    assert values["epsilon_together"] == epsilon(Mechanism(1150, 32, 1.0, 8), 1e-5).epsilon


def test_two_processes_with_the_same_command_make_each_cell_once(never_killed, tmp_path):
    folder, log = tmp_path / "sweep", tmp_path / "log"
    processes = [faults.start([*COMMON, "--paired", "--output", str(folder)], log=log) for _ in range(2)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0, log.read_text()
    assert found(folder) == found(never_killed)
    assert log.read_text().count("seed-0 optimizer.learning_rate=") == 2  # each cell was made by one of them


@pytest.fixture
def begun(tmp_path):
    """Begins a sweep of two private cells with two workers; returns it, and the workers once both are at work."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = []

    def begin(num_steps):
        words = [*COMMON, "--set", f"training.num_steps={num_steps}", "--set", "training.checkpoint_every=1"]
        command = [sys.executable, "-m", "sfumato", *words, "--workers", "2", "--output", str(tmp_path / "sweep")]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        started.append(process)
        while sum(count > 5 for count in releases(tmp_path / "sweep").values()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return process, [child for child in map(int, children) if b"spawn_main" in cmdline(child)]

    yield begin
    for process in started:
        process.terminate()
        process.wait()


def cmdline(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_worker_that_is_killed_leaves_its_run_to_others_and_nothing_counts_twice(begun, tmp_path):
    process, workers = begun(100)
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(600) == 0
    assert releases(tmp_path / "sweep") == {"cell-1/run-1": 100, "cell-2/run-1": 100}
    assert json_of(tmp_path / "sweep")["updates_together"] == 200


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_sweep_that_started_them(begun, sent):
    process, workers = begun(100_000)
    process.send_signal(sent)
    assert process.wait(600) == (1 if sent == signal.SIGTERM else -sent)
    while any(b"spawn_main" in cmdline(worker) for worker in workers):
        time.sleep(0.1)
