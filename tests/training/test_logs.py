"""What `run.log` writes while a run trains: metrics.jsonl again, and nothing private unless it is asked for."""

import csv
import json
import signal
import stat

import pytest

import sfumato
from sfumato.errors import InputError
from sfumato.training.loop import Progress
from tests.training import faults

TINY = {
    "model.options.width": 8,
    "training.batch_size": 64,
    "training.num_steps": 6,
    "training.evaluate_every": 2,
    "training.checkpoint_every": 2,
}


def train(folder, **settings):
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    sfumato.train("demo/digits", folder, settings={**TINY, **dotted}, progress=Progress())
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(path):
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_without_being_asked_no_log_is_written(tmp_path):
    folder = train(tmp_path / "run")
    assert not list(folder.rglob("*.csv")) and not (folder / "tensorboard").exists()


def test_a_csv_log_is_what_metrics_jsonl_says_and_says_nothing_of_training_images(tmp_path):
    folder = train(tmp_path / "run", run__log="csv")
    assert rows_of(folder / "metrics.csv") == lines_of(folder / "metrics.jsonl")
    assert [path.name for path in folder.rglob("*.csv")] == ["metrics.csv"]


def test_statistics_of_training_images_are_logged_where_asked_for_and_for_the_owner_alone(tmp_path):
    folder = train(tmp_path / "run", run__log="csv", run__log_private=True)
    path = folder / "metrics_private.csv"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    noted = [
        {key: line[key] for key in ("step", "loss", "clipped_fraction", "grad_norm")}
        for line in lines_of(folder / "metrics_private.jsonl")
    ]
    assert rows_of(path) == noted


def test_a_log_of_a_run_that_was_killed_has_each_step_once(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    settings = [word for key, value in {**TINY, "run.log": "csv"}.items() for word in ("--set", f"{key}={value}")]
    arguments = ["train", "demo/digits", *settings, "--output", str(folder)]
    # After step 4 was evaluated and logged, before its checkpoint: steps 3 and 4 are made again.
    assert faults.run(arguments, die_at=("ledger", 6, 0.5), log=log) == -signal.SIGKILL, log.read_text()
    with (folder / "metrics.csv").open("a") as torn:
        torn.write("99,0.")
    assert faults.run(["resume", str(folder)], log=log) == 0, log.read_text()
    assert rows_of(folder / "metrics.csv") == lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows_of(folder / "metrics.csv")] == [2.0, 4.0, 6.0]


def test_private_statistics_without_a_log_are_refused(tmp_path):
    with pytest.raises(InputError, match="run.log_private"):
        train(tmp_path / "run", run__log_private=True)
    assert not (tmp_path / "run").exists()


def test_tensorboard_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.training.logs.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'sfumato\[tensorboard\]'"):
        train(tmp_path / "run", run__log=["csv", "tensorboard"])
    assert not (tmp_path / "run").exists()


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_what_metrics_jsonl_says_and_no_time_of_any_step(tmp_path):
    pytest.importorskip("tensorboard")
    folder = train(tmp_path / "run", run__log="tensorboard")
    shown, lines = events_of(folder), lines_of(folder / "metrics.jsonl")
    assert shown.keys() == {"epsilon", "accuracy", "accuracy_last"}
    for tag, events in shown.items():
        assert [event.step for event in events] == [2, 4, 6]
        assert [event.value for event in events] == pytest.approx([line[tag] for line in lines], rel=1e-6)
        assert [event.wall_time for event in events] == [2.0, 4.0, 6.0]
    assert stat.S_IMODE((folder / "tensorboard").stat().st_mode) == 0o700


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard")
    folder, log = tmp_path / "run", tmp_path / "log"
    asked = {**TINY, "run.log": "tensorboard", "run.log_private": "true"}
    settings = [word for key, value in asked.items() for word in ("--set", f"{key}={value}")]
    arguments = ["train", "demo/digits", *settings, "--output", str(folder)]
    assert faults.run(arguments, die_at=("ledger", 6, 0.5), log=log) == -signal.SIGKILL, log.read_text()
    assert faults.run(["resume", str(folder)], log=log) == 0, log.read_text()
    shown = events_of(folder)
    assert {tag for tag in shown if tag.startswith("not_private/")} == {
        f"not_private/{name}" for name in ("loss", "clipped_fraction", "grad_norm")
    }
    assert all([event.step for event in events] == [2, 4, 6] for events in shown.values())
