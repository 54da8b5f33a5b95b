"""Many processes on one study: nothing is lost and nothing counted twice, whoever dies."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from sfumato.cli import output
from sfumato.errors import InputError, MachineError
from sfumato.searching.space import Space
from sfumato.searching.study import finished, open_study, parse_url, work
from tests.searching.made_up_search import accuracy, made_up_search, measured, quiet, take_part
from tests.training import faults


@pytest.fixture
def opened():
    """Opens studies that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda url, search=None, **options: stack.enter_context(
            open_study(search or made_up_search(), parse_url(url), "digits", **options)
        )


def binaries() -> Path | None:
    folders = [Path(found).resolve().parent for found in [shutil.which("pg_ctl")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a fresh, empty database of a server on loopback; skipped where there is no such server."""
    programs, as_user = binaries(), {}
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    if os.getuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres")
        as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="sfumato-postgresql-"))  # pytest's own folders admit nobody else
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *words: str) -> None:
        command = [str(programs / program), "-D", str(folder / "data"), *words]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, **as_user)

    run("initdb", "-U", "tester", "--auth=trust", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
    run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://tester@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    return request.getfixturevalue("postgresql")


def lines(log):
    return [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []


def kill_in_mid_trial(workers, log):
    """Kills -9 the first worker seen between the beginning and the end of a trial; returns it and the trial's slot."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for process, what, slot in lines(log):
            if what == "begin" and [process, "end", slot] not in lines(log):
                victim = next(worker for worker in workers if worker.pid == int(process))
                victim.kill()
                victim.join()
                if [process, "end", slot] not in lines(log):
                    return victim, slot
        time.sleep(0.01)
    raise AssertionError("no worker was seen in a trial")


def test_three_workers_complete_a_study_though_one_is_killed_in_mid_trial(opened, url, tmp_path):
    log = tmp_path / "log"
    workers = [faults.fork(take_part, url, log) for _ in range(3)]
    victim, slot = kill_in_mid_trial(workers, log)
    assert sorted(faults.join(workers)) == [-signal.SIGKILL, 0, 0]

    search, study = made_up_search(), opened(url)
    complete = Counter(trial.user_attrs["slot"] for trial in study.trials if trial.state.name == "COMPLETE")
    agenda = search.agenda(finished(study))
    assert agenda.complete and agenda.settings == {"optimizer.learning_rate": 8.0, "ema.decay": 0.9}
    assert complete == Counter(planned.name for planned in agenda.slots)  # each once
    assert complete[slot] == 1  # that of the victim, made again
    assert not any(trial.state.name == "RUNNING" for trial in study.trials)
    for planned in agenda.slots:
        found = finished(study)[planned.name]
        assert list(found.accuracies) == [accuracy(planned.settings, planned, seed) for seed in planned.seeds]
    ends = Counter(name for _, what, name in lines(log) if what == "end")
    assert ends == complete  # not even the work was done twice
    assert {name for _, what, name in lines(log) if what == "best"} == {str(agenda.settings)}


@pytest.mark.parametrize("sampler", ["greedy", "tpe"])
def test_a_search_goes_on_where_it_stopped(opened, tmp_path, sampler):
    url, made = f"sqlite:///{tmp_path / 'study.db'}", []
    search = dataclasses.replace(made_up_search(), sampler=sampler)

    def evaluate(settings, slot, watch):
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(slot.name)
        return measured(settings, slot)

    with pytest.raises(KeyboardInterrupt):
        work(search, opened(url, search), evaluate, quiet)
    first = list(made)
    made[:] = ["", "", "", "", ""]  # past the interrupt
    agenda = work(search, opened(url, search), evaluate, quiet)
    assert agenda.complete and Counter([*first, *made[5:]]) == Counter(slot.name for slot in agenda.slots)
    again = work(search, opened(url, search), lambda *asked: pytest.fail("all is finished"), quiet)
    assert again.settings == agenda.settings


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_whose_process_was_killed_before_its_first_heartbeat_is_made_again(opened, tmp_path):
    search, study = made_up_search(), opened(f"sqlite:///{tmp_path / 'study.db'}", heartbeat=1, grace=1)
    study.enqueue_trial({}, user_attrs={"slot": "baseline: the recipe"})
    study.ask()  # runs, as far as the storage knows
    assert work(search, study, measured, quiet, grace=1).complete
    assert [trial.state.name for trial in study.trials][:2] == ["FAIL", "COMPLETE"]


def test_a_process_that_was_taken_for_dead_goes_on_and_its_trial_is_counted_once(opened, tmp_path):
    url, search = f"sqlite:///{tmp_path / 'study.db'}", made_up_search()
    begun, over, said = threading.Event(), threading.Event(), []

    def stalls(settings, slot, watch):
        if not begun.is_set():
            begun.set()
            assert over.wait(60)
        return measured(settings, slot)

    slow = threading.Thread(target=work, args=(search, opened(url, heartbeat=1000), stalls, said.append))
    slow.start()
    assert begun.wait(60)
    agenda = work(search, opened(url, heartbeat=1, grace=1), measured, quiet)
    over.set()
    slow.join()
    study = opened(url)
    states = Counter((trial.user_attrs["slot"], trial.state.name) for trial in study.trials)
    assert states["baseline: the recipe", "FAIL"] == states["baseline: the recipe", "COMPLETE"] == 1
    assert any("took this process for dead" in line for line in said)
    assert search.agenda(finished(study)) == agenda


def test_a_study_that_was_begun_otherwise_is_refused_by_name(opened, tmp_path):
    url, search = f"sqlite:///{tmp_path / 'study.db'}", made_up_search()
    opened(url)
    for changed, name in [
        (dataclasses.replace(search, space=Space({"averaging": search.space.groups["averaging"]})), "space"),
        (dataclasses.replace(search, batch_size=32), "batch_size"),
        (dataclasses.replace(search, num_examples=1436), "num_examples"),
    ]:
        with pytest.raises(InputError, match=f"another {name}"):
            opened(url, changed)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://me:secret@127.0.0.1:1/none", "cannot be reached"),
        ("sqlite:///:memory:", "keeps nothing"),
        ("mysql://me:secret@host/name", "is of no known kind"),
        ("sqlite:////proc/no/such/folder/study.db", "cannot be reached"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_one_line_without_the_password(opened, url, says):
    with pytest.raises(InputError, match=says) as error:
        opened(url)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_a_password_is_never_shown(monkeypatch, capsys):
    url = "postgresql://me:secret@host/db"
    assert repr(parse_url(url)) == "postgresql+psycopg://me:***@host/db"
    monkeypatch.setattr(sys, "argv", ["sfumato", "search", "--storage", url])
    with pytest.raises(typer.Exit), output.interruptible():
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert "secret" not in said and "sfumato search --storage postgresql://me:***@host/db" in said.replace("'", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of a heartbeat
def test_a_storage_that_goes_away_is_a_fault_of_the_machine_and_loses_nothing(opened, tmp_path):
    path, made = tmp_path / "study.db", []

    def evaluate(settings, slot, watch):
        made.append(slot.name)
        if len(made) == 3:
            path.rename(tmp_path / "gone.db")
            path.mkdir()
        return measured(settings, slot)

    with (
        pytest.raises(MachineError, match="stopped answering"),
        open_study(made_up_search(), parse_url(f"sqlite:///{path}"), "digits", heartbeat=1000) as study,
    ):
        work(made_up_search(), study, evaluate, quiet)
    path.rmdir()
    (tmp_path / "gone.db").rename(path)
    assert len(finished(opened(f"sqlite:///{path}"))) == 2


def test_trials_that_fall_behind_are_given_up_where_that_was_asked_for(opened, tmp_path):
    search = dataclasses.replace(made_up_search(), sampler="random", prune=True, trials=12)

    def evaluate(settings, slot, watch):
        for step in range(1, 4):
            watch(step, accuracy(settings, slot, 0))
        return measured(settings, slot)

    study = opened(f"sqlite:///{tmp_path / 'study.db'}", search)
    agenda = work(search, study, evaluate, quiet)
    found = finished(study)
    given_up = [slot for slot in agenda.slots if found[slot.name].accuracies is None]
    assert given_up and all(slot.kind == "candidate" for slot in given_up)
