"""Sweeps on several machines, and sweeps that are killed again and again: minutes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sfumato.run_folder.ledger import Ledger
from sfumato.searching.storage import close_storage, open_storage
from tests import postgresql
from tests.studies.test_kills import COMMON, found, ledgers

pytestmark = pytest.mark.slow

GRID = ["--grid", "ema.decay=0.1,0.3,0.5,0.7,0.8,0.9", "--paired"]
MANY = [*COMMON[:2], "--grid", "optimizer.learning_rate=0.5,1.0,2.0,4.0", *COMMON[4:], *GRID]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def command(*arguments):
    return [sys.executable, "-m", "sfumato", *MANY, *map(str, arguments)]


def start(*arguments, inside=()):
    return subprocess.Popen([*inside, *command(*arguments)], env=environment(), stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same 24 cells by one process that nobody kills."""
    folder = tmp_path_factory.mktemp("alone") / "sweep"
    assert start("--output", folder).wait() == 0
    return found(folder)


def trials(url):
    storage = open_storage(url)
    try:
        [study] = storage.get_all_studies()
        return storage.get_all_trials(study._study_id)
    finally:
        close_storage(storage)


@contextlib.contextmanager
def machine(name, number):
    """What begins a command on a machine of its own: its network, its processes, and the host name of this one."""
    outer, inner, address = f"{name}o", f"{name}i", f"10.213.{number}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        for line in (
            f"link add {outer} type veth peer name {inner}",
            f"link set {inner} netns {name}",
            f"addr add {address}.1/24 dev {outer}",
            f"link set {outer} up",
            f"-n {name} addr add {address}.2/24 dev {inner}",
            f"-n {name} link set {inner} up",
            f"-n {name} link set lo up",
            f"-n {name} route add default via {address}.1",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        yield ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs ip and unshare")
def test_four_workers_on_two_machines_make_each_of_24_cells_once(alone, tmp_path):
    """The machines have one host name, so that neither may ask for the other's processes."""
    with machine("sfumato-a", 1) as one, machine("sfumato-b", 2) as other, postgresql.server("10.213.1.1") as url:
        folders = [tmp_path / "one", tmp_path / "other"]
        processes = [
            start("--workers", 2, "--storage", url, "--output", folder, inside=inside)
            for folder, inside in zip(folders, (one, other), strict=True)
        ]
        assert [process.wait(timeout=900) for process in processes] == [0, 0]
        made = [trial for trial in trials(url) if "worker" in trial.user_attrs]
    assert Counter(trial.user_attrs["slot"] for trial in made) == Counter(f"cell-{n}/seed-0" for n in range(1, 25))
    assert {trial.state.name for trial in made} == {"COMPLETE"}
    assert len({trial.user_attrs["worker"].split(":")[0] for trial in made}) == 2
    begun = [set(ledgers(folder)) for folder in folders]
    assert begun[0] and begun[1] and not begun[0] & begun[1] and len(begun[0] | begun[1]) == 24
    for folder in folders:
        assert found(folder) == alone


def test_24_cells_killed_five_times_are_what_they_are_without(alone, tmp_path):
    folder = tmp_path / "sweep"
    for finished in (1, 5, 9, 14, 19):
        process = start("--workers", 2, "--output", folder)
        deadline = time.monotonic() + 300
        while len(list(folder.glob("cell-*/seed-0/result.json"))) < finished:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        helpers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        for helper in helpers:  # at once: they may not end by themselves
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(helper), signal.SIGKILL)
        process.wait()
    assert start("--workers", 2, "--output", folder).wait() == 0
    assert found(folder) == alone
    made = Counter(
        trial.user_attrs["slot"]
        for trial in trials(f"sqlite:///{folder / 'study.db'}")
        if trial.state.name == "COMPLETE"
    )
    assert made == Counter(f"cell-{n}/seed-0" for n in range(1, 25))
    for path in folder.rglob("ledger.jsonl"):
        assert [line["step"] for line in Ledger.open(path).lines if line["kind"] == "step"] == [1, 2, 3, 4]
    assert len(json.loads((folder / "sweep.json").read_text())["cells"]) == 24


def test_a_helper_that_is_killed_leaves_its_run_to_others_and_nothing_counts_twice(tmp_path):
    """Private runs: the one that was cut off goes on with its key."""
    folder = tmp_path / "sweep"
    arguments = [word for word in MANY if word != "--paired"]
    arguments += ["--set", "training.num_steps=40", "--workers", "2", "--output", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sfumato", *arguments], env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not [path for path in folder.rglob("ledger.jsonl") if len(path.read_text().splitlines()) > 10]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    helpers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(helpers[0]), signal.SIGKILL)
    assert process.wait() == 0
    values = json.loads((folder / "sweep.json").read_text())
    assert values["begun_again"] == []
    lines = ledgers(folder)
    assert len(lines) == len({each[0]["run_id"] for each in lines.values()}) == 24
    assert values["updates_together"] == 24 * 40
    for each in lines.values():
        assert len({line["step"] for line in each if line["kind"] == "step"}) == 40
