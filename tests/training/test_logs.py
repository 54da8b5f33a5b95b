"""What `run.log` writes while a run trains: metrics.jsonl again, and nothing private unless it is asked for."""

import csv
import json
import stat
import time
from types import SimpleNamespace

import pytest

import sfumato
from sfumato.config import RunConfig
from sfumato.training import logs
from sfumato.training.logs import Progress, StepFacts
from tests.data.conftest import refused

TINY = {
    "model.options.width": 8,
    "training.batch_size": 64,
    "training.num_steps": 6,
    "training.evaluate_every": 2,
    "training.checkpoint_every": 2,
}


def train(folder, progress=Progress(), resume=False, **settings):  # noqa: B008  (immutable)
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    sfumato.train("demo/digits", folder, settings={**TINY, **dotted}, progress=progress, resume=resume)
    return folder


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(path):
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_a_csv_log_is_what_metrics_jsonl_says_and_says_nothing_of_training_images(tmp_path):
    folder = train(tmp_path / "run", run__log="csv")
    assert rows_of(folder / "metrics.csv") == lines_of(folder / "metrics.jsonl")
    modes = [(folder / name).stat().st_mode for name in ("metrics.csv", "metrics.jsonl")]
    assert modes[0] == modes[1]  # whoever may read one may read the other
    assert [path.name for path in folder.rglob("*.csv")] == ["metrics.csv"]


def test_statistics_of_training_images_are_logged_where_asked_for_and_for_the_owner_alone(tmp_path):
    folder = train(tmp_path / "run", run__log="csv", run__log_private=True)
    path = folder / "owner" / "metrics_private.csv"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    noted, keys = (
        lines_of(folder / "owner" / "metrics_private.jsonl"),
        ("step", "loss", "clipped_fraction", "grad_norm"),
    )
    assert rows_of(path) == [{key: line[key] for key in keys} for line in noted]


def test_images_a_second_are_the_expected_batches_over_the_time_since_the_run_began(tmp_path):
    began, noted = time.perf_counter(), []
    train(tmp_path / "run", Progress(step=lambda facts: noted.append((time.perf_counter(), facts.images_per_second))))
    (first, rate), *_, (last, last_rate) = noted
    assert 64 / rate < first - began
    assert 6 * 64 / last_rate - 64 / rate == pytest.approx(last - first, rel=0.3)


def test_time_left_is_told_by_the_steps_of_this_start(capsys, monkeypatch):
    """A run that was gone on with at step 100, of 200: ten steps took 20 seconds."""
    now = SimpleNamespace(perf_counter=lambda: 1000.0)
    monkeypatch.setattr(logs, "time", now)
    display = logs.Display()
    display.step(StepFacts(100, 200, lambda step: 1.0, None, 50.0, evaluated=False))
    now.perf_counter = lambda: 1020.0
    display.step(StepFacts(110, 200, lambda step: 1.0, 0.5, 50.0, evaluated=True))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 110/200") and line.endswith("3:00 left")


class Killed(Exception):
    pass


def killed_and_resumed(folder, **settings):
    """Updates 3 and 4 were logged and are lost: the run goes on from its checkpoint of 2 with update 5."""

    def die(facts):
        if facts.step == 4:
            raise Killed  # before the checkpoint after it

    with pytest.raises(Killed):
        train(folder, Progress(step=die), **settings)
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open("a") as torn:
            torn.write("99,0.")
    return train(folder, resume=True, **settings)


def test_a_log_of_a_run_that_was_killed_has_what_its_weights_came_by(tmp_path):
    folder = killed_and_resumed(tmp_path / "run", run__log="csv")
    assert rows_of(folder / "metrics.csv") == lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows_of(folder / "metrics.csv")] == [2.0, 6.0]


def test_no_log_is_the_default_and_private_statistics_alone_are_refused(tmp_path):
    assert RunConfig().log is None and not RunConfig().log_private
    refused("run.log_private", train, tmp_path / "run", run__log_private=True)
    assert not (tmp_path / "run").exists()


def test_tensorboard_that_is_not_installed_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.training.logs.importlib.util.find_spec", lambda name: None)
    refused(r"pip install tensorboard", train, tmp_path / "run", run__log=["csv", "tensorboard"])
    assert not (tmp_path / "run").exists()


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "owner" / "tensorboard"))
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


def test_tensorboard_shows_what_a_resumed_run_s_weights_came_by(tmp_path):
    pytest.importorskip("tensorboard")
    shown = events_of(killed_and_resumed(tmp_path / "run", run__log="tensorboard", run__log_private=True))
    private = {f"not_private/{name}" for name in ("loss", "clipped_fraction", "grad_norm")}
    assert {tag for tag in shown if tag.startswith("not_private/")} == private
    assert all([event.step for event in events] == [2, 6] for events in shown.values())
