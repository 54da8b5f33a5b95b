"""Many processes on one study: nothing is lost and nothing counted twice, whoever dies."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest

from sfumato.errors import InputError, MachineError
from sfumato.scaling.search.storage import open_storage, shown
from sfumato.scaling.search.worker import Worker as OpenWorker
from tests.scaling.search.one_worker import accuracy, made_up_search, measured


@pytest.fixture
def Worker():
    """Makes workers whose connections are closed at the end of the test."""
    with contextlib.ExitStack() as opened:
        yield lambda *arguments, **options: opened.enter_context(OpenWorker(*arguments, **options))


SCRIPT = Path(__file__).with_name("one_worker.py")


@pytest.fixture(params=["sqlite", "journal", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    if request.param == "journal":
        return f"journal:{tmp_path / 'study.journal'}"
    return request.getfixturevalue("postgresql")


def start(url, log):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), url, str(log)], stderr=subprocess.PIPE, text=True, env=environment
    )


def lines(log):
    return [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []


def kill_in_mid_trial(workers, log):
    """Kills -9 the first worker seen between the beginning and the end of a trial; returns the trial's slot."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process, what, slot in lines(log):
            if what == "begin" and [process, "end", slot] not in lines(log):
                victim = next(worker for worker in workers if worker.pid == int(process))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                if [process, "end", slot] not in lines(log):
                    return victim, slot
        time.sleep(0.01)
    raise AssertionError("no worker was seen in a trial")


def test_four_workers_complete_a_study_though_one_is_killed_in_mid_trial(Worker, url, tmp_path):
    log = tmp_path / "log"
    workers = [start(url, log) for _ in range(4)]
    victim, slot = kill_in_mid_trial(workers, log)
    for worker in workers:
        if worker is not victim:
            assert worker.wait(timeout=120) == 0, worker.stderr.read()
        worker.stderr.close()

    search = made_up_search()
    crew = Worker(search, url, "digits")
    trials = crew.study.trials
    complete = Counter(trial.user_attrs["slot"] for trial in trials if trial.state.name == "COMPLETE")
    agenda = search.agenda(crew.finished())
    assert agenda.complete
    assert complete == Counter(planned.name for planned in agenda.slots)  # each once
    assert complete[slot] == 1  # that of the victim, made again
    assert sum(trial.state.name == "RUNNING" for trial in trials) == 0
    assert agenda.settings == {"optimizer.learning_rate": 8.0, "ema.decay": 0.9}
    for trial in trials:
        if trial.state.name == "COMPLETE":
            slot_facts = trial.user_attrs
            planned = next(planned for planned in agenda.slots if planned.name == slot_facts["slot"])
            assert slot_facts["accuracies"] == [accuracy(planned.settings, planned, seed) for seed in planned.seeds]
    ends = Counter(name for _, what, name in lines(log) if what == "end")
    assert ends == complete  # not even the work was done twice
    best = {name for _, what, name in lines(log) if what == "best"}
    assert best == {str(agenda.settings)}  # the three that lived agree


def test_a_search_goes_on_where_it_stopped(Worker, tmp_path):
    url, made = f"sqlite:///{tmp_path / 'study.db'}", []

    def evaluate(number, settings, slot, watch):
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(slot.name)
        return measured(settings, slot)

    with pytest.raises(KeyboardInterrupt):
        Worker(made_up_search(), url, "digits").run(evaluate)
    first = list(made)
    made.clear()
    made_again = made

    def evaluate_again(number, settings, slot, watch):
        made_again.append(slot.name)
        return measured(settings, slot)

    agenda = Worker(made_up_search(), url, "digits").run(evaluate_again)
    assert agenda.complete
    assert not set(first) & set(made_again)
    assert Counter([*first, *made_again]) == Counter(slot.name for slot in agenda.slots)
    assert (
        Worker(made_up_search(), url, "digits").run(evaluate_again).settings == agenda.settings
    )  # finished: nothing is made again


def test_a_worker_that_gives_no_sign_loses_its_trial_and_what_it_finds_later_is_not_counted(Worker, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    search = made_up_search()
    begun, over = threading.Event(), threading.Event()

    def stalls(number, settings, slot, watch):
        begun.set()
        assert over.wait(60)
        raise SystemExit  # after its trial was settled below

    slow = Worker(search, url, "digits", beat_seconds=1000)
    slow.name = "elsewhere:1:abcd"  # on another machine, where no process can be asked for
    found = []

    def run_slow():
        try:
            slow.run(lambda *trial: found.append(trial[2].name) or stalls(*trial))
        except SystemExit:
            pass

    thread = threading.Thread(target=run_slow)
    thread.start()
    assert begun.wait(60)

    def evaluate(number, settings, slot, watch):
        return measured(settings, slot)

    agenda = Worker(search, url, "digits", beat_seconds=0.05, patience_seconds=0.5).run(evaluate)
    over.set()
    thread.join()
    crew = Worker(search, url, "digits")
    states = Counter((trial.user_attrs["slot"], trial.state.name) for trial in crew.study.trials)
    assert found == ["baseline"]
    assert states["baseline", "FAIL"] == 1
    assert states["baseline", "COMPLETE"] == 1
    assert search.agenda(crew.finished()) == agenda


def test_a_living_worker_keeps_its_trial(Worker, tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    search = made_up_search()

    def slow(number, settings, slot, watch):
        if slot.name == "baseline":
            time.sleep(8.0)  # twice the patience of the other, but it beats
        return measured(settings, slot)

    first = Worker(search, url, "digits", beat_seconds=0.1)
    first.name = "elsewhere:1:abcd"
    second = Worker(search, url, "digits", beat_seconds=0.1, patience_seconds=4.0)
    thread = threading.Thread(target=lambda: first.run(slow))
    thread.start()
    while not any(trial.state.name == "RUNNING" for trial in first.study.trials):
        time.sleep(0.02)
    second.run(slow)
    thread.join()
    assert [trial.state.name for trial in second.study.trials if trial.user_attrs["slot"] == "baseline"] == ["COMPLETE"]


def test_a_container_with_the_same_host_name_is_another_machine():
    """Where a number of a process here is none there: nobody is taken for dead who lives in it."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    script = "from sfumato.scaling.search.worker import _machine; print(_machine())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    here, again, there = (
        subprocess.run([*inside, sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout
        for inside in ([], [], unshare)
    )
    assert here == again != there
    assert here.split("/")[0] == there.split("/")[0] == socket.gethostname()


def test_a_study_whose_space_changed_is_refused_by_name(Worker, tmp_path):
    import dataclasses

    url = f"sqlite:///{tmp_path / 'study.db'}"
    Worker(made_up_search(), url, "digits")
    for changed, name in [
        (
            dataclasses.replace(
                made_up_search(),
                space=dataclasses.replace(made_up_search().space, groups=made_up_search().space.groups[:1]),
            ),
            "space",
        ),
        (dataclasses.replace(made_up_search(), batch_size=32), "batch_size"),
        (dataclasses.replace(made_up_search(), num_examples=1436), "num_examples"),
    ]:
        with pytest.raises(InputError, match=f"another {name}"):
            Worker(changed, url, "digits")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:secret@127.0.0.1:1/none", "cannot be reached"),
        ("sqlite://", "keeps nothing"),
        ("sqlite:///:memory:", "keeps nothing"),
        ("mysql://host/name", "is of no known kind"),
        ("nothing://host/name", "is of no known kind"),
        ("sqlite:////proc/no/such/folder/study.db", "cannot be reached"),
        ("journal:/proc/no/such/study.journal", "cannot be reached"),
        ("nonsense", "is no URL"),
        ("redis://localhost", "is of no known kind"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_one_line_without_the_password(url, says):
    with pytest.raises(InputError, match=says) as error:
        open_storage(url)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_password_is_never_shown():
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"


def test_a_storage_that_goes_away_is_a_fault_of_the_machine_and_loses_nothing(Worker, tmp_path):
    path = tmp_path / "study.db"
    url = f"sqlite:///{path}"
    made = []

    def evaluate(number, settings, slot, watch):
        made.append(slot.name)
        if len(made) == 3:
            path.rename(tmp_path / "gone.db")
            path.mkdir()
        return measured(settings, slot)

    with pytest.raises(MachineError, match="stopped answering"):
        Worker(made_up_search(), url, "digits", beat_seconds=1000).run(evaluate)
    path.rmdir()
    (tmp_path / "gone.db").rename(path)
    assert len(Worker(made_up_search(), url, "digits").finished()) == 2


def altered(path, name, value, slot="sample/1"):
    """Writes what somebody else could into the trial of a slot."""
    with sqlite3.connect(path) as database:
        trials = {
            json.loads(found): trial
            for trial, found in database.execute(
                "SELECT trial_id, value_json FROM trial_user_attributes WHERE key = 'slot'"
            )
        }
        done = database.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = ? AND trial_id = ?",
            (json.dumps(value), name, trials[slot]),
        )
        assert done.rowcount == 1
    database.close()


def sampled_search():
    return dataclasses.replace(made_up_search(), sampler="random", trials=3)


@pytest.mark.parametrize(
    ("name", "value", "slot"),
    [
        ("settings", {"privacy.delta": 0.5}, "sample/1"),
        ("settings", {"model.name": "os:system"}, "sample/1"),
        ("settings", {"optimizer.learning_rate": 3.0, "ema.decay": 0.9}, "sample/1"),  # offered are 1, 2, 4, 8 and 16
        ("settings", {"optimizer.learning_rate": 1.0}, "sample/1"),
        ("settings", {"optimizer.learning_rate": 8.0}, "baseline"),
        ("settings", 7, "sample/2"),
        ("settings", {"training.num_steps": 0}, "sample/2"),
        ("accuracies", [0.5], "sample/1"),
        ("accuracies", [0.5, 2.0], "sample/1"),
        ("accuracies", "high", "sample/1"),
        ("kind", "law", "sample/1"),
        ("kind", ["law"], "sample/1"),
        ("slot", "sample/9", "sample/1"),
        ("batch_size", 512, "sample/1"),
        ("seeds", [7, 8], "sample/1"),
    ],
)
def test_what_a_storage_holds_and_no_search_wrote_is_refused_in_one_line(Worker, tmp_path, name, value, slot):
    path = tmp_path / "study.db"
    url = f"sqlite:///{path}"
    with Worker(sampled_search(), url, "digits") as worker:
        worker.run(lambda number, settings, slot, watch: measured(settings, slot))
    with Worker(sampled_search(), url, "digits") as worker:
        assert worker.run(lambda *asked: pytest.fail("all is finished")).complete
    altered(path, name, value, slot)
    for read in (
        lambda worker: worker.run(lambda *asked: pytest.fail("nothing of it is run")),
        lambda worker: worker.finished(),
    ):
        with (
            Worker(sampled_search(), url, "digits") as worker,
            pytest.raises(InputError, match="none of this search") as refusal,
        ):
            read(worker)
        assert "\n" not in str(refusal.value)


def test_a_waiting_trial_with_other_settings_than_the_search_asks_for_is_not_run(Worker, tmp_path):
    path = tmp_path / "study.db"
    url = f"sqlite:///{path}"

    def evaluate(number, settings, slot, watch):
        raise KeyboardInterrupt

    with Worker(made_up_search(), url, "digits") as worker, pytest.raises(KeyboardInterrupt):
        worker.run(evaluate)
    with Worker(made_up_search(), url, "digits") as worker:
        worker.study.enqueue_trial(
            {},
            user_attrs={
                "kind": "baseline",
                "slot": "baseline",
                "settings_asked": {"data.path": "/etc"},
                "batch_size": 16,
                "seeds": [0, 1],
            },
        )
        with pytest.raises(InputError, match="none of this search"):
            worker.run(lambda *asked: pytest.fail("it is run"))
    with Worker(made_up_search(), url, "other") as worker:
        worker.study.add_trial(optuna.trial.create_trial(value=1.0))  # of another program
        with pytest.raises(InputError, match="none of this search"):
            worker.run(lambda *asked: pytest.fail("it is run"))


@pytest.mark.parametrize("other", [0, 1])
def test_drawn_values_outside_of_the_space_are_not_run(Worker, tmp_path, other):
    """A trial that failed is made again with what it drew; that, too, lies in the storage."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    kinds = (
        optuna.distributions.FloatDistribution(0, 99),
        optuna.distributions.CategoricalDistribution([1.0, 2.0, 4.0, 8.0, 16.0, 77.0]),
    )
    with Worker(sampled_search(), url, "digits") as worker:
        facts = {"kind": "candidate", "slot": "sample/1", "settings_asked": None, "batch_size": 16, "seeds": [0, 1]}
        drawn = {
            "params": {"optimizer.learning_rate": 77.0},
            "distributions": {"optimizer.learning_rate": kinds[other]},
        }
        worker.study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=facts, **drawn))

        def evaluate(number, settings, slot, watch):
            assert settings == {} or settings["optimizer.learning_rate"] <= 16.0
            return measured(settings, slot)

        with pytest.raises(InputError, match="none of this search"):
            worker.run(evaluate)


def test_a_file_of_something_else_is_no_storage_and_stays_as_it_was(tmp_path):
    journal, database = tmp_path / "notes.log", tmp_path / "other.db"
    journal.write_text("my notes\n")
    with contextlib.closing(sqlite3.connect(database)) as other:
        other.execute("CREATE TABLE patients (name TEXT)")
    before = journal.read_bytes(), database.read_bytes()
    for url, says in ((f"journal:{journal}", "is no journal of trials"), (f"sqlite:///{database}", "another database")):
        with pytest.raises(InputError, match=says):
            open_storage(url)
    assert (journal.read_bytes(), database.read_bytes()) == before
